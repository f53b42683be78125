"""How long batches take, in MLflow; and how far an epoch is, for people."""

from __future__ import annotations

import io
import logging
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.progress import Bars
from trainmount.data.timings import Timings


class Clock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Tracking:
    """In place of the module: keeps what is logged to the active run."""

    def __init__(self) -> None:
        self.is_active = True
        self.logged: list[tuple[dict[str, float], int]] = []
        self.error: Exception | None = None

    def active_run(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="r")) if self.is_active else None

    def log_metrics(self, metrics: dict[str, float], step: int, synchronous: bool) -> None:
        assert not synchronous, "a slow tracking server would hold the training up"
        if self.error is not None:
            raise self.error
        self.logged.append((metrics, step))


@pytest.fixture
def tracking(monkeypatch: pytest.MonkeyPatch) -> Tracking:
    tracking = Tracking()
    monkeypatch.setitem(sys.modules, "mlflow", tracking)  # type: ignore[arg-type]
    return tracking


def consume(timings: Timings, clock: Clock, fetches: list[float], betweens: list[float]) -> None:
    def batches() -> Iterator[int]:
        for number, seconds in enumerate(fetches):
            clock.now += seconds
            yield number

    for _, seconds in zip(timings.timed(batches(), dict), betweens, strict=True):
        clock.now += seconds


def test_means_and_variances_are_logged_every_ten_seconds_and_at_the_end_of_an_epoch(
    tracking: Tracking,
) -> None:
    clock = Clock()
    timings = Timings(lambda: 3, clock)
    consume(timings, clock, [1.0, 2.0, 9.0, 0.5], [0.25, 0.5, 1.0, 2.0])
    (first, first_step), (last, last_step) = tracking.logged
    assert (first_step, last_step) == (3, 4)
    assert first == pytest.approx(
        {
            "dataloader/fetch_seconds/rank_3": 4.0,
            "dataloader/fetch_seconds_variance/rank_3": statistics.pvariance([1.0, 2.0, 9.0]),
            "dataloader/between_next_seconds/rank_3": 0.375,
            "dataloader/between_next_seconds_variance/rank_3": statistics.pvariance([0.25, 0.5]),
        }
    )
    assert last == pytest.approx(
        {
            "dataloader/fetch_seconds/rank_3": 0.5,
            "dataloader/fetch_seconds_variance/rank_3": 0.0,
            "dataloader/between_next_seconds/rank_3": 1.5,
            "dataloader/between_next_seconds_variance/rank_3": 0.25,
        }
    )


def test_without_an_active_run_or_when_logging_fails_the_batches_come_all_the_same(
    tracking: Tracking, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    timings = Timings(lambda: 0, clock)
    tracking.is_active = False
    consume(timings, clock, [11.0, 11.0], [0.0, 0.0])
    assert tracking.logged == []
    tracking.is_active = True
    tracking.error = ConnectionError("no route")
    consume(timings, clock, [11.0, 11.0], [0.0, 0.0])
    assert [record.message for record in caplog.records] == ["cannot log times to MLflow"]


def test_mlflow_is_never_imported(tmp_path: Path, make_files: Callable[[Path, int], Any]) -> None:
    make_files(tmp_path, 2)
    list(DataLoader(UCVolumeDataset(str(tmp_path)), num_workers=0))
    assert "mlflow" not in sys.modules


def test_a_loader_logs_its_times_and_the_files_it_left_out(
    tracking: Tracking, tmp_path: Path, make_files: Callable[[Path, int], Any]
) -> None:
    make_files(tmp_path, 5)
    (tmp_path / "f005").touch()
    loader = DataLoader(UCVolumeDataset(str(tmp_path), on_error="quarantine"), 2, num_workers=0)
    (tmp_path / "f003").unlink()
    list(loader)
    (tmp_path / "f004").unlink()
    list(loader)
    [(metrics, step), (later, _)] = tracking.logged
    assert step == 3
    assert metrics["dataloader/skipped_files/rank_0"] == 1.0
    assert metrics["dataloader/fetch_seconds/rank_0"] > 0
    names = ("skipped_files", "quarantined_files")
    assert [later[f"dataloader/{name}/rank_0"] for name in names] == [2.0, 2.0]


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(
        "rich.console.Console",
        lambda **_: Console(file=terminal, force_terminal=True, width=80, force_interactive=True),
    )
    bars = Bars()
    outer = bars.shown(iter(range(4)), "epoch 1", 10, 6)
    assert next(outer) == 0
    assert list(bars.shown(iter(range(2)), "evaluation", 2, 0)) == [0, 1]
    assert list(outer) == [1, 2, 3]
    shown = terminal.getvalue()
    assert "epoch 1" in shown
    assert "evaluation" in shown
    assert "10/10" in shown


def test_progress_is_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("trainmount.data.progress._LOG_PERIOD_SECONDS", 0.0)
    assert list(Bars().shown(iter("ab"), "epoch 2", 9, 7)) == ["a", "b"]
    told = [(r.message, r.__dict__["of"], r.__dict__["num"]) for r in caplog.records]
    assert told == [("batches consumed", "epoch 2", 8), ("batches consumed", "epoch 2", 9)]


def test_a_loader_shows_its_progress_where_it_is_asked_to(
    tmp_path: Path, make_files: Callable[[Path, int], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    make_files(tmp_path, 5)
    loader = DataLoader(UCVolumeDataset(str(tmp_path)), 2, num_workers=0, progress=True)
    assert [len(batch) for batch in loader] == [2, 2, 1]
    assert [len(batch) for batch in DataLoader([1, 2], num_workers=0, progress=True)] == [1, 1]  # type: ignore[arg-type]


def test_progress_without_rich_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(ImportError, match="progress=True needs rich: pip install rich"):
        DataLoader([1], progress=True)  # type: ignore[arg-type]
