"""Loader workers end with the process that they work for, whatever it dies of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

DEADLINE_SECONDS = 30.0

# Batches far larger than a pipe: a worker is in the middle of handing one over when its rank dies.
PROGRAM = """
import json, multiprocessing, sys, time
from trainmount.data import DataLoader, UCVolumeDataset

dataset = UCVolumeDataset(sys.argv[1], item="bytes")
loader = DataLoader(dataset, batch_size=4, num_workers=2, collate_fn=list)
next(iter(loader))
print(json.dumps([child.pid for child in multiprocessing.active_children()]), flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_with_a_batch_in_hand_end_when_their_rank_is_killed(tmp_path: Path) -> None:
    for number in range(64):
        (tmp_path / f"file-{number:02}").write_bytes(os.urandom(400_000))
    rank = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    with rank.stdout:
        workers = json.loads(rank.stdout.readline())
        rank.kill()
        rank.wait()
    assert len(workers) == 2
    deadline = time.monotonic() + DEADLINE_SECONDS
    try:
        while any(map(is_running, workers)):
            assert time.monotonic() < deadline, "a worker outlives its rank"
            time.sleep(0.05)
    finally:
        for pid in filter(is_running, workers):
            os.kill(pid, 9)


@pytest.mark.parametrize(
    ("method", "made"), [("fork", ["early", "late"]), ("forkserver", ["early"])]
)
def test_workers_of_torch_s_own_loader_know_the_rank_that_they_work_for(
    method: str, made: list[str], tmp_path: Path, run_ranks: Any
) -> None:
    (tmp_path / "data").mkdir()
    names = [f"f{number}" for number in range(9)]
    for name in names:
        (tmp_path / "data" / name).touch()
    assert run_ranks("stream", 2, root=str(tmp_path), method=method, made=made) == [0, 0]
    for one in made:
        of_ranks = [(tmp_path / f"{one}-{rank}").read_text().split() for rank in range(2)]
        assert of_ranks == [names[::2], names[1::2]], f"made {one}: before or after the group"
