"""Several ranks: a failure of one stops the others, and each reads only what it needs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from trainmount.checkpoint import failures

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


def test_a_lost_connection_is_told_with_the_rank_that_failed(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("end_in_the_midst", 3, root=str(tmp_path), how="raise")
    first = r"rank 1 failed: ValueError: f\udcff.bin cannot be read"
    lost = ["RuntimeError", [f"{first}; look into its log first"]]
    assert told(tmp_path, "told", 3) == [lost, ["ValueError", []], lost]


def test_of_a_rank_that_was_killed_the_others_are_told_where_to_look(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    codes = run_ranks("end_in_the_midst", 3, root=str(tmp_path), how="be killed")
    assert codes == [0, -9, 0]
    for rank in (0, 2):
        kind, (note,) = json.loads((tmp_path / f"told-{rank}").read_text())
        assert kind == "RuntimeError"
        assert note.startswith("no rank told of a failure: one was killed, hangs, or has lost")


def test_to_an_error_that_all_ranks_have_nothing_is_added(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    assert run_ranks("end_in_the_midst", 3, root=str(tmp_path), how="all raise") == [0, 0, 0]
    assert told(tmp_path, "told", 3) == [["ValueError", []]] * 3


def test_of_two_ranks_that_fail_by_themselves_the_later_is_told_of_the_first(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    run_ranks("end_in_the_midst", 2, root=str(tmp_path), how="each raise")
    answers = told(tmp_path, "told", 2)
    (later,) = [rank for rank, (_, notes) in enumerate(answers) if notes]
    assert answers[later] == [
        "KeyError",
        [f"before, rank {1 - later} failed: KeyError: {1 - later}"],
    ]


class SilentStore:
    """As one on a node that is gone."""

    def __init__(self) -> None:
        self.is_over = threading.Event()

    def compare_set(self, *_: str) -> bytes:
        self.is_over.wait()
        raise RuntimeError("the test is over")


def test_a_store_that_does_not_answer_keeps_no_rank_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, error = SilentStore(), ValueError("a sample that cannot be read")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(failures, "_STORE_SECONDS", 0.01)
        failures.note_first_failure("end-0", error)
    finally:
        store.is_over.set()
        dist.destroy_process_group()
    assert not hasattr(error, "__notes__")
