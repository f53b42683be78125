"""MosaicML's `StreamingDataset` in the loader: each sample once over any stop, on any grid.

The package is installed into an environment of its own. One program has it imported and forks the
ranks of each job.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tests.environments import streaming_python

PROGRAM = Path(__file__).with_name("streaming_program.py")
TREE = Path(__file__).resolve().parents[2]
COUNT = 100
BATCH = 4
"""Samples of a global batch."""

RunJob = Callable[..., list[list[Any]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder; `shards` in it is what is read."""
    return tmp_path_factory.mktemp("streaming")


@pytest.fixture(scope="module")
def run_job(root: Path) -> Iterator[RunJob]:
    """`run_job(*steps, grid=(ranks, workers), library=...)`: what each rank answers."""
    errors = root / "stderr"
    python_path = os.pathsep.join(str(TREE / name) for name in ("runtime", "fuse"))
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [streaming_python(), str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1"},
            text=True,
        ) as program,
    ):
        assert program.stdin is not None
        assert program.stdout is not None
        jobs, answers = program.stdin, program.stdout

        def answer_of(**job: Any) -> list[list[Any]]:
            jobs.write(json.dumps(job) + "\n")
            jobs.flush()
            line = answers.readline()
            assert line, errors.read_text()[-4000:]
            answer: list[list[Any]] = json.loads(line)
            return answer

        def run(*steps: Any, grid: tuple[int, int] = (1, 2), **options: Any) -> list[list[Any]]:
            world_size, num_workers = grid
            job = {"path": path, "world_size": world_size, "num_workers": num_workers, **options}
            pairs = [step if isinstance(step, tuple) else (step, None) for step in steps]
            return answer_of(action="read", batch_size=BATCH // world_size, steps=pairs, **job)

        path = str(root / "shards")
        answer_of(action="write", path=path, count=COUNT, world_size=1)
        yield run
        jobs.close()


@pytest.fixture(scope="module")
def epochs(run_job: RunJob) -> list[list[int]]:
    """The numbers of three epochs, in their order, of a job that nothing disturbs."""
    [answers] = run_job(*["iterate", "rest"] * 3)
    found = [list(chain(*answer)) for answer in answers]
    assert [sorted(epoch) for epoch in found] == [list(range(COUNT))] * 3
    return found


def together(ranks: list[list[Any]], number: int) -> list[int]:
    """What the ranks have delivered at a step, in the order of the job."""
    batches = zip(*(rank[number] for rank in ranks), strict=True)
    return [one for batch in batches for samples in zip(*batch, strict=True) for one in samples]


@pytest.mark.parametrize("grid", [(1, 0), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("num_batches", [3, 24, 25])
def test_from_every_stop_any_grid_delivers_the_rest_and_then_whole_epochs(
    run_job: RunJob, epochs: list[list[int]], num_batches: int, grid: tuple[int, int]
) -> None:
    [[first, state]] = run_job("iterate", ("take", num_batches), "state")
    assert list(chain(*first)) == epochs[0][: num_batches * BATCH]
    assert state["sample_in_epoch"] == num_batches * BATCH
    steps = [("load", state), "iterate", "rest", "state", "iterate", "rest"]
    ranks = run_job(*steps, grid=grid)
    rest = epochs[0][num_batches * BATCH :]
    following = [rest, *epochs[1:]] if rest else epochs[1:]
    assert together(ranks, 0) == following[0]
    assert together(ranks, 2) == following[1]
    is_next = 1 if rest else 2
    for rank in ranks:
        assert (rank[1]["epoch"], rank[1]["sample_in_epoch"]) == (is_next, 0)


def test_states_go_back_and_forth_between_this_loader_and_the_package_s_own(
    run_job: RunJob, epochs: list[list[int]]
) -> None:
    steps = ("iterate", ("take", 5), "state")
    [[_, ours]] = run_job(*steps)
    [[_, theirs]] = run_job(*steps, library="streaming")
    assert ours == theirs
    [[rest]] = run_job(("load", ours), "iterate", "rest", library="streaming")
    assert list(chain(*rest)) == epochs[0][5 * BATCH :]


def test_an_epoch_left_early_begins_anew_and_a_state_is_loaded_in_place(
    run_job: RunJob, epochs: list[list[int]]
) -> None:
    leave = ("iterate", ("take", 3), "iterate")
    steps = ("iterate", *leave, ("take", 3), "state", "rest", *leave, "rest")
    [[left, again, state, rest, later, whole]] = run_job(*steps)
    assert left == again
    assert list(chain(*again, *rest)) == epochs[0]
    assert list(chain(*later)) == epochs[1][: 3 * BATCH]
    assert list(chain(*whole)) == epochs[1]
    in_place = ("iterate", "rest", "iterate", ("take", 1), ("load", state), "iterate", "rest")
    [[*_, rest, following]] = run_job(*in_place, "iterate", "rest")
    assert list(chain(*rest)) == epochs[0][3 * BATCH :]
    assert list(chain(*following)) == epochs[1]


def test_a_checkpoint_has_one_state_of_the_job_and_resumes_on_other_ranks(
    run_job: RunJob, epochs: list[list[int]], tmp_path: Path
) -> None:
    saves = str(tmp_path / "checkpoints")
    run_job("iterate", ("take", 7), ("save", saves), grid=(2, 1))
    for grid in [(1, 2), (4, 1)]:
        ranks = run_job(("resume", saves), "iterate", "rest", grid=grid)
        assert together(ranks, 0) == epochs[0][7 * BATCH :]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_shard_is_an_error_by_name_and_no_short_epoch_or_wait(
    run_job: RunJob, root: Path, tmp_path: Path, damage: str, num_workers: int
) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(root / "shards", shards)
    damaged = shards / "shard.00002.mds"
    content = damaged.read_bytes()
    if damage == "changed":
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    else:
        damaged.unlink()
    options = {"path": str(shards), "copies": str(tmp_path / "copies")}
    [[first, again]] = run_job("fail", "fail", grid=(1, num_workers), **options)
    assert re.fullmatch(
        r"StreamingDataset cannot read ahead: .*shard\.00002\.mds'?; restore what it names.*", first
    )
    assert again == first
