"""Datasets that are told how much was delivered: their state is of what was consumed."""

from __future__ import annotations

import json
import multiprocessing
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from trainmount.data import DataLoader
from trainmount.errors import DataError, StateMismatch

COUNT = 23
BATCH = 3


class Told(IterableDataset[int]):
    """As mosaicml's `StreamingDataset`: workers get whole batches in turn, begin an epoch together,
    and find what was loaded in memory that they share.
    """

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.batch_size = BATCH
        self._loaded = folder / "loaded"
        self._loaded.unlink(missing_ok=True)
        self._next_epoch = multiprocessing.Value("q", 0)
        self._together = multiprocessing.Barrier(max(1, num_workers))

    @property
    def next_epoch(self) -> int:
        return int(self._next_epoch.value)

    @next_epoch.setter
    def next_epoch(self, epoch: int) -> None:
        self._next_epoch.value = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        epoch, offset = self._resumed(self.next_epoch)
        self._together.wait(30)
        self.next_epoch = epoch + 1
        order = order_of(epoch)[offset:]
        for start in range(worker * BATCH, len(order), num_workers * BATCH):
            yield from order[start : start + BATCH]

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        epoch, offset = self._resumed(self.next_epoch - 1)
        count = num_samples if from_beginning else offset + num_samples
        return {"epoch": epoch, "sample_in_epoch": count, "seed": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded.write_text(json.dumps(state))

    def _resumed(self, epoch: int) -> tuple[int, int]:
        state = json.loads(self._loaded.read_text()) if self._loaded.exists() else {"epoch": -1}
        is_old = state["epoch"] < epoch
        return (epoch, 0) if is_old else (state["epoch"], state.get("sample_in_epoch", 0))


def order_of(epoch: int) -> list[int]:
    order = list(range(COUNT))
    random.Random(epoch).shuffle(order)
    return order


def loader_over(folder: Path, num_workers: int, **options: Any) -> DataLoader:
    dataset = Told(folder, num_workers)
    return DataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=list, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 5, 7, 8, 10])
def test_what_was_consumed_and_not_what_was_prefetched_is_told_and_goes_on_with_other_workers(
    stop: int, num_workers: int, tmp_path: Path
) -> None:
    loader = loader_over(tmp_path, num_workers)
    expected = list(chain(*map(order_of, range(4))))
    delivered: list[int] = []
    batches = iter(loader)
    for _ in range(stop):
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        delivered += batch
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {
        "epoch": loader.epoch,
        "sample_in_epoch": len(delivered) - COUNT * loader.epoch,
        "seed": 7,
    }
    resumed = loader_over(tmp_path, 2 - num_workers)
    assert resumed.has_state_of_job
    assert not resumed.has_position
    resumed.load_state_dict(state)
    assert (resumed.state_dict(), resumed.epoch) == (state, state["epoch"])
    delivered += chain(*chain(resumed, resumed))
    assert delivered == expected[: len(delivered)]
    assert len(delivered) >= stop * BATCH + COUNT - 1


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_left_early_begins_anew_and_a_state_is_loaded_in_place(
    num_workers: int, tmp_path: Path
) -> None:
    loader = loader_over(tmp_path, num_workers)
    for _ in range(2):
        iter(loader)
    left = iter(loader)
    first = [next(left), next(left)]
    state = loader.state_dict()
    assert list(chain(*loader)) == order_of(0)
    assert list(chain(*first)) == order_of(0)[:6]
    next(iter(loader))
    assert (loader.epoch, loader.state_dict()["sample_in_epoch"]) == (1, 3)
    loader.load_state_dict(state)
    assert list(chain(*loader)) == order_of(0)[6:]
    assert list(chain(*loader)) == order_of(1)


def test_an_epoch_whose_rest_is_dropped_ends_and_the_next_is_whole(tmp_path: Path) -> None:
    loader = loader_over(tmp_path, 2, drop_last=True)
    batches = iter(loader)
    state = [(next(batches), loader.state_dict())[1] for _ in range(7)][-1]
    assert state["sample_in_epoch"] == 21
    resumed = loader_over(tmp_path, 0, drop_last=True)
    resumed.load_state_dict(state)
    assert list(chain(*resumed)) == order_of(1)[:21]
    assert resumed.state_dict() == {"epoch": 2, "sample_in_epoch": 0, "seed": 7}


def test_ranks_are_counted_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    loader = loader_over(tmp_path, 0)
    next(iter(loader))
    assert loader.state_dict()["sample_in_epoch"] == 12
    loader.dataset.replication = 2  # type: ignore[attr-defined]
    assert loader.state_dict()["sample_in_epoch"] == 6


def test_batches_that_are_not_the_dataset_s_and_states_of_others_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match="batch_size must be that of the Told, 3, got 4"):
        DataLoader(Told(tmp_path, 0), 4, num_workers=0)
    with pytest.raises(ValueError, match="in_order must be true for a Told"):
        loader_over(tmp_path, 2, in_order=False)
    loader = loader_over(tmp_path, 0)
    for state in ({}, {"epoch": 1}, {"epoch": 0, "sample_in_epoch": -1}):
        with pytest.raises(StateMismatch, match="over Told must have epoch and sample_in_epoch"):
            loader.load_state_dict(state)
    with pytest.raises(TypeError, match="only over a UCVolumeDataset, not over Told"):
        _ = loader.position
    # Before it is iterated for the first time, the dataset has no epoch.
    loader.load_state_dict({"epoch": -1, "sample_in_epoch": 0})
    assert list(chain(*loader)) == order_of(0)


class Unreadable(Told):
    """A thread fails to read a shard: its worker ends as if it was done, and another one waits."""

    def on_exception(self, future: Future[None]) -> None:
        assert future.exception() is not None

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from islice(super().__iter__(), BATCH)
        if info is not None and info.id == 0:
            threading.Event().wait()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(fail).add_done_callback(self.on_exception)


def fail() -> None:
    raise OSError(5, "Input/output error", "/data/shard-00003")


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_thread_of_the_dataset_that_fails_is_an_error_by_name_and_no_short_epoch_or_wait(
    num_workers: int, tmp_path: Path
) -> None:
    dataset = Unreadable(tmp_path, num_workers)
    loader = DataLoader(dataset, BATCH, num_workers=num_workers, collate_fn=list)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^Unreadable cannot read ahead: .*/data/shard-00003"):
            list(loader)
    assert loader.epoch == 0
