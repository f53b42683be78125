"""Loader workers end with the process that they work for, whatever it dies of, and their errors are
its errors.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import time
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.position import Position
from trainmount.errors import DamagedFile, MissingFile

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


# Errors of workers

DATASETS = '''
import os, signal
from pathlib import Path
from torch.utils.data import IterableDataset, get_worker_info

class Shards(IterableDataset):
    """Somebody's dataset: the second worker finds a damaged shard at its seventh sample."""

    def __init__(self, fails):
        self.fails = fails
        self.at = 0

    def __iter__(self):
        while self.at < 40:
            self.at += 1
            if self.at == 7 and get_worker_info().id == 1:
                yield from self.fails()
            yield self.at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]

def with_its_name():
    raise OSError(5, "Input/output error", "/data/shard-00003.tar")
    yield

def with_an_error_that_only_the_worker_knows():
    class Damaged(Exception):
        pass
    raise Damaged("/data/shard-00003.tar is damaged")
    yield

def with_two_arguments():
    raise UnicodeDecodeError("utf-8", b"", 0, 1, "/data/shard-00003.tar is no text")
    yield

def by_dying():
    os.kill(os.getpid(), signal.SIGKILL)
    yield

def with_what_cannot_be_sent():
    yield lambda: None

def names(paths):
    return [Path(path).name for path in paths]
'''


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module that spawned workers can import too."""
    (tmp_path / "datasets_of_this_test.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("datasets_of_this_test")
    del sys.modules["datasets_of_this_test"]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_damaged_file_that_a_worker_finds_is_an_error_of_the_rank_by_name(
    method: str, datasets: Any, tmp_path: Path, make_files: Any
) -> None:
    names = make_files(tmp_path / "data", 12)
    file = tmp_path / "data" / "f005"
    whole = file.read_bytes()
    dataset = UCVolumeDataset(
        str(tmp_path / "data"), checksums={"f005": f"crc32:{zlib.crc32(whole):08x}"}
    )
    loader = DataLoader(
        dataset, 2, num_workers=2, multiprocessing_context=method, collate_fn=datasets.names
    )
    for damage, error, message in [
        (lambda: os.truncate(file, 3), DamagedFile, "/f005 had 14 bytes when it was listed, now 3"),
        (lambda: file.write_bytes(bytes(14)), DamagedFile, "/f005 has other bytes than its crc32"),
        (file.unlink, MissingFile, "/f005 was listed and is gone"),
    ]:
        damage()
        for _ in range(2):
            batches = iter(loader)
            assert [next(batches), next(batches)] == [names[:2], names[2:4]]
            with pytest.raises(error, match=message):
                next(batches)
            assert loader.position == Position(0, 4)
    file.write_bytes(whole)
    assert [name for batch in loader for name in batch] == names


@pytest.mark.parametrize(
    ("method", "fails", "error", "message"),
    [
        ("fork", "with_its_name", OSError, "'/data/shard-00003.tar'"),
        ("spawn", "with_its_name", OSError, "'/data/shard-00003.tar'"),
        (
            *("fork", "with_an_error_that_only_the_worker_knows", RuntimeError),
            "Damaged: /data/shard-00003.tar is damaged",
        ),
        ("fork", "with_two_arguments", RuntimeError, "/data/shard-00003.tar is no text"),
        ("fork", "by_dying", RuntimeError, "worker .* exited unexpectedly|killed by signal"),
        ("spawn", "by_dying", RuntimeError, "worker .* exited unexpectedly|killed by signal"),
        ("fork", "with_what_cannot_be_sent", RuntimeError, "worker .* exited unexpectedly"),
    ],
)
def test_a_worker_that_fails_is_an_error_of_the_rank_and_never_a_short_epoch_or_a_wait(
    method: str, fails: str, error: type[Exception], message: str, datasets: Any
) -> None:
    dataset = datasets.Shards(getattr(datasets, fails))
    loader = DataLoader(dataset, 2, num_workers=2, multiprocessing_context=method, collate_fn=list)
    for _ in range(2 if method == "fork" else 1):
        with pytest.raises(error, match=message):
            list(loader)


def test_a_worker_over_files_that_is_killed_is_an_error_of_the_rank(
    datasets: Any, tmp_path: Path, make_files: Any
) -> None:
    make_files(tmp_path / "data", 12)

    def collate(paths: list[str]) -> list[str]:
        if paths[0].endswith("f004"):
            next(datasets.by_dying())
        return paths

    loader = DataLoader(
        UCVolumeDataset(str(tmp_path / "data")), 2, num_workers=2, collate_fn=collate
    )
    with pytest.raises(RuntimeError, match=r"worker .* exited unexpectedly|killed by signal"):
        list(loader)


@pytest.mark.parametrize("fails", ["with_its_name", "by_dying"])
def test_a_loader_whose_error_was_caught_is_freed_without_the_garbage_collector(
    fails: str, datasets: Any
) -> None:
    def fail() -> weakref.ref[DataLoader]:
        dataset = datasets.Shards(getattr(datasets, fails))
        loader = DataLoader(dataset, 2, num_workers=2, collate_fn=list)
        try:
            list(loader)
        except (OSError, RuntimeError):
            return weakref.ref(loader)
        raise AssertionError("no error")

    gc.disable()
    try:
        # The collector frees its queues first: torch then waits five seconds for each worker.
        assert fail()() is None
    finally:
        gc.enable()


# The error is nobody's to catch: the program must end of it.
UNCAUGHT = """
import sys
from trainmount.data import DataLoader, UCVolumeDataset

if __name__ == "__main__":
    dataset = UCVolumeDataset(sys.argv[1], files={"f000": 9, "f001": 10, "f002": 99, "f003": 12})
    for batch in DataLoader(dataset, 1, num_workers=2):
        print(batch)
"""


def test_a_program_ends_of_a_damaged_file_that_a_worker_found(
    tmp_path: Path, make_files: Any
) -> None:
    make_files(tmp_path / "data", 4)
    program = tmp_path / "program.py"
    program.write_text(UNCAUGHT)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert f"{tmp_path}/data/f002 had 99 bytes when it was listed, now 11" in done.stderr
    assert done.stdout.count("f00") == 2
