"""Checkpointer in one process: what is saved and restored, when, and what is told."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainmount.checkpoint import EXIT_CODE_ON_SIGTERM, Checkpointer
from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.errors import CheckpointError, NoCheckpoint


class Job:
    """A small job whose state is everything that a checkpoint has to restore."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.loader = DataLoader(
            UCVolumeDataset(str(root / "data"), shuffle=True), 3, num_workers=0
        )
        state = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.checkpoints = Checkpointer(root / "saved", state=state, loader=self.loader, **options)

    def steps(self) -> Iterator[int]:
        """Train for an epoch; yields the number of steps taken."""
        for step, paths in enumerate(self.loader, start=1):
            inputs = torch.tensor(
                [[float(byte) for byte in Path(path).read_bytes()[:4]] for path in paths]
            )
            self.optimizer.zero_grad()
            (self.model(inputs / 255).sum() * random.random()).backward()
            self.optimizer.step()
            self.schedule.step()
            yield step

    def train(self) -> None:
        for _ in self.steps():
            pass

    def everything(self) -> list[Any]:
        return [
            *(value.tolist() for value in self.model.state_dict().values()),
            [state["momentum_buffer"].tolist() for state in self.optimizer.state.values()],
            self.optimizer.param_groups[0]["lr"],
            self.schedule.last_epoch,
            self.loader.position,
            random.random(),
            torch.rand(1).item(),
        ]


@pytest.fixture
def root(tmp_path: Path, make_files: Callable[[Path, int], list[str]]) -> Iterator[Path]:
    make_files(tmp_path / "data", 20)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)


def test_a_resumed_job_ends_like_one_that_went_on(root: Path) -> None:
    job = Job(root)
    for step in job.steps():
        if step == 3:
            job.checkpoints.save(step)
    expected = job.everything()
    random.seed(99)
    torch.manual_seed(99)
    other = Job(root)
    resumed = other.checkpoints.resume()
    assert resumed is not None
    assert (resumed.step, resumed.world_size, resumed.skipped) == (3, 1, ())
    other.train()
    assert other.everything() == expected


def test_saves_are_due_at_multiples_and_the_newest_few_stay(root: Path) -> None:
    job = Job(root, every_steps=2, keep_last=2)
    assert job.checkpoints.resume() is None
    assert [job.checkpoints.step(step) for step in range(1, 7)] == [False, True] * 3
    assert len(list((root / "saved").iterdir())) == 2
    resumed = job.checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 6


def test_sigterm_saves_at_the_next_step_and_exits_as_interrupted(root: Path) -> None:
    job = Job(root)
    assert job.checkpoints.step(1) is False
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as exit_request:
        job.checkpoints.step(2)
    assert exit_request.value.code == EXIT_CODE_ON_SIGTERM == 143
    resumed = job.checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 2


def test_the_handler_of_sigterm_is_given_back(root: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Job(root).checkpoints:
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_save_that_did_not_finish_and_a_damaged_one_are_skipped_and_told(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = Job(root, keep_last=3)
    whole, damaged, unfinished = (job.checkpoints.save(step) for step in (1, 2, 3))
    (root / "saved" / unfinished / "commit.json").unlink()
    shard = root / "saved" / damaged / "r00000-000.bin"
    content = bytearray(shard.read_bytes())
    content[5] ^= 1
    shard.write_bytes(content)
    resumed = job.checkpoints.resume()
    assert resumed is not None
    assert (resumed.generation, resumed.step) == (whole, 1)
    assert [(one.generation, one.is_committed) for one in resumed.skipped] == [
        (unfinished, False),
        (damaged, True),
    ]
    assert f"{shard} is damaged" in resumed.skipped[1].reason
    told = [record for record in caplog.records if record.message == "checkpoint is not whole"]
    assert [record.levelname for record in told] == ["WARNING", "WARNING"]


def test_committed_checkpoints_that_are_all_damaged_are_an_error_not_a_new_start(
    root: Path,
) -> None:
    job = Job(root)
    generation = job.checkpoints.save(1)
    (root / "saved" / generation / "r00000-000.bin").unlink()
    with pytest.raises(NoCheckpoint, match=r"no checkpoint is whole: .*r00000-000.bin is missing"):
        job.checkpoints.resume()


def test_before_commit_is_called_with_the_step_and_its_error_fails_the_save(root: Path) -> None:
    calls: list[int] = []

    def note(step: int) -> None:
        calls.append(step)
        assert not list((root / "saved").glob("*/commit.json"))
        if step == 2:
            raise OSError(28, "No space left on device")

    job = Job(root, before_commit=note)
    with pytest.raises(
        CheckpointError, match=r"save at step 2 failed: rank 0: OSError: .*No space left"
    ):
        job.checkpoints.save(2)
    job.checkpoints.save(4)
    assert calls == [2, 4]


def test_another_model_cannot_be_resumed_and_the_parameter_is_named(root: Path) -> None:
    Job(root).checkpoints.save(1)
    job = Job(root)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    other = Checkpointer(root / "saved", state={"model": model}, loader=job.loader)
    with pytest.raises(CheckpointError, match=r"cannot be loaded: .*model.2.weight|Size mismatch"):
        other.resume()


def test_steps_may_be_numbers_of_numpy_and_torch_but_no_fractions(root: Path) -> None:
    job = Job(root, every_steps=1)
    for step in (np.int64(5), torch.tensor(6)):
        assert job.checkpoints.step(step) is True  # type: ignore[arg-type]
        resumed = job.checkpoints.resume()
        assert resumed is not None
        assert resumed.step == int(step)
    before = sorted((root / "saved").iterdir())
    for method in (job.checkpoints.step, job.checkpoints.save):
        with pytest.raises(TypeError, match=r"global_step must be a whole number, got 7.5"):
            method(7.5)  # type: ignore[arg-type]
    assert sorted((root / "saved").iterdir()) == before


def test_modules_without_values_are_no_hindrance(tmp_path: Path) -> None:
    model, counts = nn.Linear(2, 2), nn.Module()
    counts.register_buffer("seen", torch.tensor(7))
    state = {"model": model, "loss": nn.CrossEntropyLoss(), "counts": counts}
    checkpoints = Checkpointer(tmp_path, state=state, on_sigterm=False)
    weights = model.weight.tolist()
    checkpoints.save(1)
    nn.init.zeros_(model.weight)
    counts.seen.zero_()  # type: ignore[operator]
    assert checkpoints.resume() is not None
    assert (model.weight.tolist(), counts.seen.item()) == (weights, 7)  # type: ignore[operator]
    alone = Checkpointer(tmp_path / "alone", state={"loss": nn.MSELoss()}, on_sigterm=False)
    alone.save(2)
    resumed = alone.resume()
    assert resumed is not None
    assert resumed.step == 2


def test_a_program_that_changes_its_directory_saves_where_it_saved_before(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root)
    checkpoints = Checkpointer("saved", state={"model": nn.Linear(2, 2)}, on_sigterm=False)
    first = str(checkpoints.save(1))
    (root / "elsewhere").mkdir()
    monkeypatch.chdir(root / "elsewhere")
    second = str(checkpoints.save(2))
    assert {path.name for path in (root / "saved").iterdir()} == {first, second}
    assert list((root / "elsewhere").iterdir()) == []


def test_in_a_thread_the_handler_of_sigterm_has_to_be_left_out(root: Path) -> None:
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match=r"on_sigterm: only the main thread can handle sign"):
            threads.submit(Job, root).result()
        job = threads.submit(Job, root, on_sigterm=False).result()
        assert threads.submit(job.checkpoints.save, 1).result() is not None


def test_wrong_arguments_are_told_in_one_line(root: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match="every_steps must be at least 1, got 0"):
        Checkpointer(root, state={"model": model}, every_steps=0)
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        Checkpointer(root, state={"model": model}, keep_last=0)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"'optimizer'. has parameters of no model in state"):
        Checkpointer(root, state={"model": model, "optimizer": optimizer})
    with pytest.raises(
        TypeError, match=r"'step'. must have state_dict and load_state_dict, got int"
    ):
        Checkpointer(root, state={"step": 3})
    with pytest.raises(TypeError, match=r"loader must be a trainmount.data.DataLoader, got list"):
        Checkpointer(root, state={"model": model}, loader=[])  # type: ignore[arg-type]
