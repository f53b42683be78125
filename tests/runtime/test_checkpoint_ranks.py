"""Several ranks: a failure of one stops the others, and each reads only what it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunRanks = Callable[..., list[int]]


def told(root: Path, name: str, num_ranks: int) -> list[Any]:
    return [json.loads((root / f"{name}-{rank}").read_text()) for rank in range(num_ranks)]


@pytest.mark.parametrize("failed_rank", [0, 2])
def test_a_failed_thread_of_one_rank_stops_the_uploads_of_all_others(
    failed_rank: int, run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks("save_with_a_failure", 3, root=str(tmp_path), failed_rank=failed_rank) == [
        0,
        0,
        0,
    ]
    for answer in told(tmp_path, "failed", 3):
        # Who was not stopped would have waited for a minute and then have gone on.
        assert answer["was_stopped"] is True
        reasons = answer["reasons"]
        assert reasons[str(failed_rank)] == "OSError: [Errno 28] No space left on device"
        others = {key: reason for key, reason in reasons.items() if key != str(failed_rank)}
        reason = f"given up because rank {failed_rank} failed: {reasons[str(failed_rank)]}"
        assert set(others.values()) == {f"GivenUp: {reason}"}
        assert sorted(map(int, reasons)) == [0, 1, 2]
    assert list(tmp_path.rglob("commit.json")) == []


def test_other_ranks_read_at_most_a_tenth_more_than_they_need(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks("save_sharded", 2, root=str(tmp_path)) == [0, 0]
    for num_ranks in (4, 1):
        assert run_ranks("load_sharded", num_ranks, root=str(tmp_path)) == [0] * num_ranks
        for answer in told(tmp_path, "loaded", num_ranks):
            assert answer["is_right"] is True
            assert answer["needed"] <= answer["read"] <= 1.1 * answer["needed"]
