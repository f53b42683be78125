"""When Checkpointer saves, what stays, and saves in the background: one process."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainmount.checkpoint import Checkpointer, SaveMetrics
from trainmount.checkpoint.schedule import Kept, Schedule
from trainmount.errors import CheckpointError


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 2)


@pytest.fixture
def make(tmp_path: Path, model: nn.Linear) -> Iterator[Callable[..., Checkpointer]]:
    """`make(**options)`: a checkpointer of `model`, closed after the test."""
    made: list[Checkpointer] = []

    def start(**options: Any) -> Checkpointer:
        made.append(Checkpointer(tmp_path / "saved", state={"model": model}, **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


class Disk:
    """A disk that may be slow, or full: fsync waits, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_asked = threading.Event()
        self.is_full = False
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._wait)

    def _wait(self, descriptor: int) -> None:
        self.is_asked.set()
        assert self.go_on.wait(60)
        if self.is_full:
            raise OSError(28, "No space left on device")
        self._fsync(descriptor)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(monkeypatch)
    yield made
    made.go_on.set()


def steps_saved(root: Path) -> list[int]:
    records = sorted((root / "saved").glob("*/commit.json"))
    return [json.loads(record.read_text())["extra"]["step"] for record in records]


def test_a_save_is_due_at_multiples_of_the_steps_or_after_the_minutes() -> None:
    now = [100.0]
    schedule = Schedule(every_steps=4, every_minutes=0.5, clock=lambda: now[0])
    assert [step for step in range(1, 10) if schedule.is_step_due(step)] == [4, 8]
    now[0] += 29.9
    assert not schedule.is_time_due()
    now[0] += 0.1
    assert schedule.is_time_due()
    schedule.start_over()
    assert not schedule.is_time_due()
    assert not Schedule(None, None).is_time_due()


def test_the_minutes_begin_anew_with_each_save(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    checkpoints = make(every_minutes=1e-9)
    assert [checkpoints.step(step) for step in (1, 2, 3)] == [True] * 3
    assert steps_saved(tmp_path) == [2, 3]
    assert [make(every_minutes=60).step(step) for step in (4, 5)] == [False, False]


def test_every_kth_checkpoint_stays_for_good_over_restarts(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    options = {"every_steps": 2, "keep_last": 2, "keep_every": 3}
    checkpoints = make(**options)
    for step in range(1, 17):
        checkpoints.step(step)
    assert steps_saved(tmp_path) == [6, 12, 14, 16]
    # A checkpoint because of SIGTERM, and a restart, shift nothing.
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpoints.step(17)
    checkpoints = make(**options)
    resumed = checkpoints.resume()
    assert resumed is not None
    assert resumed.step == 17
    for step in range(18, 27):
        checkpoints.step(step)
    assert steps_saved(tmp_path) == [6, 12, 18, 24, 26]
    # Without the option, and without a resume, what was kept still stays.
    make(keep_last=1).save(28)
    assert steps_saved(tmp_path) == [6, 12, 18, 24, 28]


def test_what_is_kept_follows_from_the_record_before() -> None:
    extra: dict[str, Any] = Kept().next(is_counted=True)
    assert extra == {"number": 1, "kept": [], "is_counted": True}
    assert Kept.from_record("g1", extra, every=1) == Kept(1, ("g1",))
    assert Kept.from_record("g1", {**extra, "is_counted": False}, every=1) == Kept(1)
    assert Kept.from_record("g1", {"step": 4}, every=2) == Kept()


def test_what_a_save_cost_is_told(make: Callable[..., Checkpointer], tmp_path: Path) -> None:
    told: list[SaveMetrics] = []
    checkpoints = make(on_save=told.append)
    assert checkpoints.last_save is None
    generations = [checkpoints.save(step) for step in (3, 4)]
    files = (tmp_path / "saved" / str(generations[1])).iterdir()
    assert [(one.step, one.generation, one.number) for one in told] == [
        (3, generations[0], 1),
        (4, generations[1], 2),
    ]
    assert told[1].num_bytes == sum(
        file.stat().st_size for file in files if file.name != "commit.json"
    )
    assert 0 < told[1].seconds <= told[1].blocked_seconds < 60
    assert checkpoints.last_save == told[1]


def test_an_asynchronous_save_has_the_values_of_the_call(
    make: Callable[..., Checkpointer], model: nn.Linear, disk: Disk, tmp_path: Path
) -> None:
    expected = model.weight.detach().clone()
    checkpoints = make(asynchronous=True)
    disk.go_on.clear()
    assert checkpoints.save(1) is None
    with torch.no_grad():
        model.weight.zero_()
    assert checkpoints.step(2) is False
    assert steps_saved(tmp_path) == []
    disk.go_on.set()
    metrics = checkpoints.wait()
    assert metrics is not None
    assert (metrics.step, metrics.generation) == (
        1,
        next((tmp_path / "saved").iterdir()).name,
    )
    assert metrics.blocked_seconds < metrics.seconds
    assert checkpoints.wait() is None
    assert checkpoints.resume() is not None
    assert torch.equal(model.weight, expected)


def test_a_save_that_has_ended_is_told_at_the_next_step(
    make: Callable[..., Checkpointer], disk: Disk
) -> None:
    told: list[SaveMetrics] = []
    checkpoints = make(asynchronous=True, every_steps=2, on_save=told.append)
    disk.go_on.clear()
    assert [checkpoints.step(step) for step in (1, 2, 3)] == [False, True, False]
    assert told == []
    disk.go_on.set()
    step = 3
    while not told:  # each step asks once
        checkpoints.step(step)
    assert told[0].step == 2


def test_the_next_save_waits_for_the_one_on_its_way(
    make: Callable[..., Checkpointer], disk: Disk, tmp_path: Path
) -> None:
    checkpoints = make(asynchronous=True, keep_last=3)
    disk.go_on.clear()
    checkpoints.save(1)
    second = threading.Thread(target=checkpoints.save, args=(2,))
    second.start()
    assert disk.is_asked.wait(60)
    assert len(list((tmp_path / "saved").iterdir())) == 1
    assert second.is_alive()
    disk.go_on.set()
    second.join()
    checkpoints.wait()
    assert steps_saved(tmp_path) == [1, 2]


@pytest.mark.parametrize("call", ["step", "save", "wait", "close"])
def test_an_error_in_the_background_is_raised_by_the_next_call(
    call: str, make: Callable[..., Checkpointer], disk: Disk, tmp_path: Path
) -> None:
    checkpoints = make(asynchronous=True)
    disk.is_full = True
    checkpoints.save(1)
    flight = checkpoints._in_flight
    assert flight is not None
    while flight.save.is_running:
        disk.go_on.wait()
    arguments = (2,) if call in ("step", "save") else ()
    with pytest.raises(
        CheckpointError, match=r"save at step 1 failed: rank 0: OSError: .*No space left"
    ):
        getattr(checkpoints, call)(*arguments)
    disk.is_full = False
    checkpoints.save(3)
    checkpoints.wait()
    assert steps_saved(tmp_path) == [3]


def test_leaving_by_an_error_ends_the_save_and_keeps_the_error(
    make: Callable[..., Checkpointer],
    disk: Disk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:

    def fail_at(step: int) -> None:
        with make(asynchronous=True) as checkpoints:
            checkpoints.save(step)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_at(1)
    assert steps_saved(tmp_path) == [1]
    disk.is_full = True
    with pytest.raises(ZeroDivisionError):
        fail_at(2)
    (warning,) = [one for one in caplog.records if one.message == "checkpoint not saved"]
    assert "No space left" in warning.__dict__["reason"]


def test_sigterm_waits_for_the_save_on_its_way_and_saves_no_step_twice(
    make: Callable[..., Checkpointer], disk: Disk, tmp_path: Path
) -> None:
    checkpoints = make(asynchronous=True, keep_last=9)
    disk.go_on.clear()
    checkpoints.save(1)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.05, disk.go_on.set).start()
    with pytest.raises(SystemExit):
        checkpoints.step(1)
    assert steps_saved(tmp_path) == [1]
    checkpoints = make(asynchronous=True, keep_last=9)
    checkpoints.save(2)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpoints.step(3)
    assert steps_saved(tmp_path) == [1, 2, 3]


def test_sigterm_after_a_failed_save_still_saves(
    make: Callable[..., Checkpointer],
    disk: Disk,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoints = make(asynchronous=True)
    disk.is_full = True
    checkpoints.save(1)
    flight = checkpoints._in_flight
    assert flight is not None
    while flight.save.is_running:
        disk.go_on.wait()
    disk.is_full = False
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        checkpoints.step(2)
    assert steps_saved(tmp_path) == [2]
    assert "checkpoint not saved" in caplog.text


def test_before_commit_of_an_asynchronous_save_is_called_at_once(
    make: Callable[..., Checkpointer], tmp_path: Path
) -> None:
    calls: list[tuple[int, str]] = []

    def note(step: int) -> None:
        calls.append((step, threading.current_thread().name))
        if step == 2:
            raise OSError(28, "No space left on device")

    checkpoints = make(asynchronous=True, before_commit=note)
    checkpoints.save(1)
    with pytest.raises(
        CheckpointError, match=r"save at step 2 failed: rank 0: OSError: .*No space left"
    ):
        checkpoints.save(2)
    assert calls == [(1, "MainThread"), (2, "MainThread")]
    assert steps_saved(tmp_path) == [1]


def test_a_gradient_scaler_goes_on_with_its_scale(tmp_path: Path, model: nn.Linear) -> None:
    def job() -> tuple[Checkpointer, torch.amp.GradScaler]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "scaler": scaler}
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return Checkpointer(tmp_path / "saved", state=state, on_sigterm=False), scaler

    checkpoints, scaler = job()
    checkpoints.save(3)
    assert scaler.get_scale() == 2048.0
    other, again = job()
    again.load_state_dict({**again.state_dict(), "scale": 1.0, "_growth_tracker": 0})
    assert other.resume() is not None
    assert again.state_dict() == scaler.state_dict()


def test_wrong_options_are_told(make: Callable[..., Checkpointer]) -> None:
    with pytest.raises(ValueError, match="every_minutes must be greater than 0, got 0"):
        make(every_minutes=0)
    with pytest.raises(ValueError, match="every_minutes must be greater than 0, got nan"):
        make(every_minutes=float("nan"))
    with pytest.raises(ValueError, match="keep_every must be at least 1, got 0"):
        make(keep_every=0)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
