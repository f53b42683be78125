"""A job on several processes with DDP and with FSDP on gloo: stopped, killed, resumed on the same
and on another number of ranks.

46 files in global batches of 16: three steps an epoch, the last with 14 samples over four ranks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainmount.checkpoint import Checkpointer

NUM_FILES = 46
JOB = {"batch_size": 4, "num_epochs": 3}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any, run_ranks: Any) -> Path:
    root = tmp_path_factory.mktemp("undisturbed")
    _make_data(root)
    assert run_ranks("train", 4, root=str(root), **JOB) == [0, 0, 0, 0]
    return root


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: Any, run_ranks: Any) -> Path:
    """A job that got SIGTERM on one of its ranks in the middle of the second epoch."""
    root = tmp_path_factory.mktemp("stopped")
    _make_data(root)
    assert run_ranks("train", 4, root=str(root), sigterm_at=4, num_workers=1, **JOB) == [143] * 4
    return root


def test_undisturbed_epochs_deliver_every_file_once(undisturbed: Path) -> None:
    _assert_exactly_once(undisturbed)
    assert _steps_of_ranks(undisturbed) == dict.fromkeys(range(4), 9)


def test_sigterm_on_one_rank_saves_on_all_and_the_resumed_job_is_equal_bit_for_bit(
    undisturbed: Path, stopped: Path, tmp_path: Path, run_ranks: Any
) -> None:
    root = _copied(stopped, tmp_path)
    assert run_ranks("train", 4, root=str(root), num_workers=1, **JOB) == [0, 0, 0, 0]
    assert (root / "resumed_at").read_text() == "4"
    _assert_exactly_once(root)
    assert _lines(root) == _lines(undisturbed)
    assert _is_equal(_final(root), _final(undisturbed))


def test_resumed_on_two_ranks_the_global_batches_are_the_same(
    undisturbed: Path, stopped: Path, tmp_path: Path, run_ranks: Any
) -> None:
    root = _copied(stopped, tmp_path)
    assert run_ranks("train", 2, root=str(root), batch_size=8, num_epochs=3) == [0, 0]
    _assert_exactly_once(root)
    assert _global_batches(root) == _global_batches(undisturbed)


def test_resumed_on_more_ranks_than_saved_the_global_batches_are_the_same(
    undisturbed: Path, tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    options = {"root": str(tmp_path), "every_steps": 1}
    assert run_ranks("train", 1, batch_size=16, num_epochs=1, **options) == [0]
    assert run_ranks("train", 4, batch_size=4, num_epochs=3, **options) == [0] * 4
    assert (tmp_path / "resumed_at").read_text() == "3"
    _assert_exactly_once(tmp_path)
    assert _global_batches(tmp_path) == _global_batches(undisturbed)


def test_resumed_on_one_rank_with_another_batch_size_every_file_is_delivered_once(
    stopped: Path, tmp_path: Path, run_ranks: Any
) -> None:
    root = _copied(stopped, tmp_path)
    assert run_ranks("train", 1, root=str(root), batch_size=6, num_epochs=3) == [0]
    _assert_exactly_once(root)


def test_a_rank_killed_inside_a_save_loses_only_that_save(
    undisturbed: Path, tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    codes = run_ranks(
        "train", 4, root=str(tmp_path), every_steps=2, die_in_save_at=6, die_on_rank=2, **JOB
    )
    assert codes[2] == -9
    assert all(codes)
    assert run_ranks("train", 4, root=str(tmp_path), every_steps=2, **JOB) == [0, 0, 0, 0]
    assert (tmp_path / "resumed_at").read_text() == "4"
    _assert_exactly_once(tmp_path)
    assert _is_equal(_final(tmp_path), _final(undisturbed))


@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}])
def test_a_job_that_saves_what_stands_in_the_ddp_resumes_equal_bit_for_bit(
    ddp: dict[str, bool], tmp_path: Path, run_ranks: Any
) -> None:
    options = {**JOB, "ddp": ddp, "save_inner": True}
    for name in ("undisturbed", "stopped"):
        (tmp_path / name).mkdir()
        _make_data(tmp_path / name)
    undisturbed, stopped = str(tmp_path / "undisturbed"), str(tmp_path / "stopped")
    assert run_ranks("train", 4, root=undisturbed, **options) == [0] * 4
    assert run_ranks("train", 4, root=stopped, sigterm_at=4, **options) == [143] * 4
    assert run_ranks("train", 4, root=stopped, **options) == [0] * 4
    assert _is_equal(_final(tmp_path / "stopped"), _final(tmp_path / "undisturbed"))


def test_asynchronous_saves_at_each_step_neither_hang_nor_change_the_weights(
    undisturbed: Path, tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    options = {**JOB, "asynchronous": True, "every_steps": 1}
    codes = run_ranks("train", 4, root=str(tmp_path), sigterm_at=5, **options)
    assert codes == [143] * 4
    assert run_ranks("train", 4, root=str(tmp_path), **options) == [0] * 4
    assert (tmp_path / "resumed_at").read_text() == "5"
    _assert_exactly_once(tmp_path)
    assert _is_equal(_final(tmp_path), _final(undisturbed))


def test_minutes_are_those_of_the_first_rank_and_all_ranks_save_together(
    tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    assert run_ranks("train", 2, root=str(tmp_path), every_minutes=1e-9, **JOB) == [0, 0]
    records = sorted((tmp_path / "checkpoints").glob("*/commit.json"))
    steps = [json.loads(record.read_text())["extra"]["step"] for record in records]
    assert steps == [17, 18]
    assert len(list((tmp_path / "consumed").iterdir())) == 2 * (18 + 1)


def test_fsdp_resumed_on_the_same_ranks_is_equal_bit_for_bit_and_on_others_from_the_same_weights(
    tmp_path: Path, run_ranks: Any
) -> None:
    for name in ("undisturbed", "stopped"):
        (tmp_path / name).mkdir()
        _make_data(tmp_path / name)
    undisturbed, stopped = tmp_path / "undisturbed", tmp_path / "stopped"
    fsdp = {**JOB, "kind": "fsdp"}
    assert run_ranks("train", 4, root=str(undisturbed), **fsdp) == [0] * 4
    codes = run_ranks("train", 4, root=str(stopped), sigterm_at=4, asynchronous=True, **fsdp)
    assert codes == [143] * 4
    on_two = _copied(stopped, tmp_path / "on_two")
    assert run_ranks("train", 4, root=str(stopped), **fsdp) == [0] * 4
    _assert_exactly_once(stopped)
    assert _is_equal(_final(stopped), _final(undisturbed))
    assert run_ranks("train", 2, root=str(on_two), **{**fsdp, "batch_size": 8}) == [0, 0]
    _assert_exactly_once(on_two)
    assert _global_batches(on_two) == _global_batches(undisturbed)
    assert _is_equal(torch.load(on_two / "begun"), torch.load(stopped / "begun"))


@pytest.mark.parametrize(
    ("failure", "asynchronous"),
    [("raise_in_save_at", False), ("raise_in_save_at", True), ("disk_full_at", True)],
)
def test_an_error_on_one_rank_fails_the_save_on_all(
    failure: str, asynchronous: bool, tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    options = {**JOB, "every_steps": 2, "asynchronous": asynchronous, failure: 2, "die_on_rank": 1}
    codes = run_ranks("train", 2, root=str(tmp_path), **options)
    assert codes == [1, 1]
    assert not list((tmp_path / "checkpoints").glob("*/commit.json"))


def test_ranks_at_different_places_are_refused_on_all_ranks(tmp_path: Path, run_ranks: Any) -> None:
    _make_data(tmp_path)
    assert run_ranks("disagree", 2, root=str(tmp_path)) == [0, 0]
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[0] == told[1]
    assert "sample 4; rank 1 at step 1, epoch 0, sample 8" in told[0]


def test_under_torchrun_an_fsdp_job_whose_rank_was_killed_in_a_save_resumes_on_two_and_on_one(
    tmp_path: Path,
) -> None:
    root, copy = tmp_path / "job", tmp_path / "copy"
    root.mkdir()
    _make_data(root)
    job = {**JOB, "root": str(root), "kind": "fsdp", "every_steps": 2, "asynchronous": True}
    assert _torchrun(3, {**job, "die_in_save_at": 6, "die_on_rank": 2}) == 1
    shutil.copytree(root, copy)
    assert _torchrun(2, {**job, "batch_size": 8}) == 0
    assert (root / "resumed_at").read_text() == "4"
    _assert_exactly_once(root)
    # One process without FSDP finds the same weights.
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4))
    state = {"model": network}
    resumed = Checkpointer(copy / "checkpoints", state=state, on_sigterm=False).resume()
    assert resumed is not None
    assert (resumed.step, resumed.world_size) == (4, 3)
    assert _is_equal(dict(network.state_dict()), torch.load(root / "begun"))


def test_files_that_any_rank_has_left_out_are_in_the_state_of_the_job(
    tmp_path: Path, run_ranks: Any
) -> None:
    _make_data(tmp_path)
    assert run_ranks("skip", 2, root=str(tmp_path)) == [0, 0]
    for rank in range(2):
        own, state = json.loads((tmp_path / f"told-{rank}").read_text())
        assert own == 0  # since the resume
        assert state["count"] == 2
        assert sorted(state["names"]) == ["f000", "f001"]


def test_a_dataset_with_a_state_a_rank_resumes_on_as_many_ranks_and_refuses_others(
    tmp_path: Path, run_ranks: Any
) -> None:
    def told(count: int) -> list[str]:
        return [(tmp_path / f"told-{rank}").read_text() for rank in range(count)]

    assert run_ranks("count_on", 2, root=str(tmp_path)) == [0, 0]
    assert told(2) == ["[0, 1, 2]", "[100, 101, 102, 103]"]
    assert run_ranks("count_on", 2, root=str(tmp_path)) == [0, 0]
    assert told(2) == [str(list(range(3, 10))), str(list(range(104, 110)))]
    assert run_ranks("count_on", 1, root=str(tmp_path)) == [0]
    assert "a state for each of 2 ranks, and there are 1 now; resume on 2 ranks" in told(1)[0]


def _torchrun(count: int, arguments: dict[str, Any]) -> int:
    """Exit code of the program `train` on that many ranks."""
    program = str(Path(__file__).with_name("rank_programs.py"))
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*start, f"--nproc-per-node={count}", program, "train", json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    print(done.stderr[-4000:])
    return done.returncode


def _make_data(root: Path) -> None:
    data = root / "data"
    data.mkdir()
    for number in range(NUM_FILES):
        (data / f"f{number:03d}").write_bytes(
            bytes((number * 37 + i * 11) % 256 for i in range(8)) + bytes([number % 4])
        )


def _copied(root: Path, target: Path) -> Path:
    shutil.copytree(root, target, dirs_exist_ok=True)
    # The copy's data has another directory, as a volume that is mounted elsewhere has.
    return target


def _lines(root: Path) -> list[tuple[int, int, int, str]]:
    found = []
    for file in (root / "consumed").iterdir():
        for line in file.read_text().splitlines():
            epoch, step, rank, name = line.split()
            found.append((int(epoch), int(step), int(rank), name))
    return sorted(found)


def _assert_exactly_once(root: Path) -> None:
    counts = Counter((epoch, name) for epoch, _, _, name in _lines(root))
    expected = {(epoch, f"f{number:03d}") for epoch in range(3) for number in range(NUM_FILES)}
    assert set(counts) == expected
    assert set(counts.values()) == {1}


def _steps_of_ranks(root: Path) -> dict[int, int]:
    return {
        rank: len({step for _, step, other, _ in _lines(root) if other == rank})
        for rank in range(4)
    }


def _global_batches(root: Path) -> dict[int, set[str]]:
    batches: dict[int, set[str]] = {}
    for _, step, _, name in _lines(root):
        batches.setdefault(step, set()).add(name)
    return batches


def _final(root: Path) -> Any:
    return torch.load(root / "final")


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return bool(one == other)
