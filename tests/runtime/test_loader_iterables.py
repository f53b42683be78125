"""Iterable datasets of others in the loader: each worker's own state, as of what was consumed."""

from __future__ import annotations

import importlib
import json
import random
import tarfile
from collections.abc import Callable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset, get_worker_info

from trainmount.data import Checkpointable, DataLoader, UCVolumeDataset
from trainmount.errors import StateMismatch

COUNT = 23


class Numbers(IterableDataset[int]):
    """Numbers in an order of each epoch, shared among workers; counts epochs by itself."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count
        self.round = 0
        self.delivered = 0
        self.resume_at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        order = list(range(self.count))
        random.Random(self.round).shuffle(order)
        mine = order[worker::num_workers]
        self.delivered, self.resume_at = self.resume_at, 0
        for number in mine[self.delivered :]:
            self.delivered += 1
            yield number
        self.round += 1
        self.delivered = 0

    def state_dict(self) -> dict[str, Any]:
        return {"round": self.round, "delivered": self.delivered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.round = state_dict["round"]
        self.resume_at = state_dict["delivered"]


class Renewed(Numbers):
    """Takes the end of an epoch for the beginning of the next."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        if self.resume_at >= len(range(worker, self.count, num_workers)):
            self.round, self.resume_at = self.round + 1, 0


def loader_over(dataset: Any, **options: Any) -> DataLoader:
    return DataLoader(dataset, **{"batch_size": 3, "collate_fn": list, **options})


def saved(loader: DataLoader) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


OPTIONS = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "drop_last": True},
    {"num_workers": 0, "batch_size": None, "collate_fn": None},
]


def undisturbed(dataset: Any, options: dict[str, Any]) -> list[list[Any]]:
    """Three epochs."""
    loader = loader_over(dataset, **options)
    return [list(loader) for _ in range(3)]


def resumed_at(stop: int, make: Callable[[], Any], options: dict[str, Any]) -> list[Any]:
    """The batches before a stop in the first two epochs, and those of another loader after it."""
    loader = loader_over(make(), **options)
    delivered: list[Any] = []
    batches = iter(loader)
    while len(delivered) < stop:
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
        else:
            delivered.append(batch)
    other = loader_over(make(), **options)
    other.load_state_dict(saved(loader))
    return [*delivered, *other, *other]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dataset", [Numbers, Renewed])
def test_from_every_stop_the_batches_and_their_order_are_those_of_a_loader_that_went_on(
    dataset: type[Numbers], options: dict[str, Any]
) -> None:
    epochs = undisturbed(dataset(), options)
    expected = [batch for epoch in epochs for batch in epoch]
    num_batches = len(epochs[0])
    for stop in [1, 4, num_batches - 1, num_batches, num_batches + 1]:
        batches = resumed_at(stop, dataset, options)
        assert batches == expected[: len(batches)], stop
        assert len(batches) >= min(stop + num_batches, len(expected)), "an empty epoch"


COUNTER = """
from torch.utils.data import IterableDataset

class Counter(IterableDataset):
    at = 0
    def __iter__(self):
        while self.at < 50:
            self.at += 1
            yield self.at - 1
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]
"""


def test_workers_that_are_not_forked_are_given_their_states_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "counter_of_this_test.py").write_text(COUNTER)
    monkeypatch.syspath_prepend(tmp_path)
    dataset = importlib.import_module("counter_of_this_test").Counter()
    loader = DataLoader(dataset, 3, num_workers=1, multiprocessing_context="spawn")
    loader.load_state_dict(
        {"version": 1, "world_size": 1, "num_workers": 1, "per_worker": {"0": {"at": 42}}}
    )
    assert [batch.tolist() for batch in loader] == [[42, 43, 44], [45, 46, 47], [48, 49]]


def test_the_state_counts_what_was_consumed_and_not_what_was_prefetched() -> None:
    loader = loader_over(Numbers(100), num_workers=2)
    assert loader.state_dict()["per_worker"] == {}
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert saved(loader) == {
        "version": 1,
        "world_size": 1,
        "num_workers": 2,
        "per_worker": {
            "0": {"round": 0, "delivered": 6},
            "1": {"round": 0, "delivered": 3},
        },
        "epoch": 0,
        "next_worker": 1,
        "done": [],
        "ended": [],
    }


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_left_early_begins_anew_and_a_state_is_loaded_in_place(num_workers: int) -> None:
    loader = loader_over(Numbers(), num_workers=num_workers)
    first = list(loader)
    second = list(loader)
    assert first != second
    left = iter(loader)
    third = [next(left), next(left)]
    assert list(loader)[:2] == third
    assert loader.epoch == 3
    with pytest.raises(RuntimeError, match="ended when another one began"):
        next(left)
    batches = iter(loader)
    fourth = [next(batches), next(batches)]
    state = saved(loader)
    assert state["epoch"] == 3
    rest = list(batches)
    loader.load_state_dict(state)
    assert list(loader) == rest
    assert fourth + rest == undisturbed_epoch(3, num_workers)


def undisturbed_epoch(number: int, num_workers: int) -> list[Any]:
    loader = loader_over(Numbers(), num_workers=num_workers)
    return [list(loader) for _ in range(number + 1)][number]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hugging_face_datasets_resume_and_their_later_epochs_are_whole(num_workers: int) -> None:
    datasets = pytest.importorskip("datasets")

    def make() -> Any:
        parts = [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11], [12, 13]]
        return datasets.IterableDataset.from_generator(
            lambda parts: iter([{"x": number} for part in parts for number in part]),
            gen_kwargs={"parts": parts},
        )

    def loader_of(dataset: Any) -> DataLoader:
        return DataLoader(dataset, 2, num_workers=num_workers)

    whole = loader_of(make())
    epochs = [[batch["x"].tolist() for batch in whole] for _ in range(3)]
    assert [sorted(chain.from_iterable(epoch)) for epoch in epochs] == [list(range(14))] * 3
    for epoch, stop in [(0, 3), (0, len(epochs[0])), (1, 1)]:
        loader = loader_of(make())
        for _ in range(epoch):
            list(loader)
        batches = iter(loader)
        for _ in range(stop):
            next(batches)
        other = loader_of(make())
        other.load_state_dict(saved(loader))
        expected = [one for one in (epochs[epoch][stop:], *epochs[epoch + 1 :]) if one]
        for rest in expected[:2]:
            assert [batch["x"].tolist() for batch in other] == rest


class Samples(IterableDataset[str]):
    """A user's class around a WebDataset, which has no state: counts, and skips the counted."""

    def __init__(self, shards: list[str]) -> None:
        self.shards = shards
        self.delivered = self.resume_at = 0

    def __iter__(self) -> Iterator[str]:
        import webdataset

        pipeline = webdataset.WebDataset(self.shards, shardshuffle=False)
        self.delivered, self.resume_at = self.resume_at, 0
        for sample in islice(pipeline, self.delivered, None):
            self.delivered += 1
            yield sample["__key__"]

    def state_dict(self) -> dict[str, Any]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resume_at = state_dict["delivered"]


def test_a_class_around_a_webdataset_resumes(tmp_path: Path) -> None:
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as tar:
            for number in range(5):
                tar.addfile(tarfile.TarInfo(f"{shard}{number}.txt"))
    shards = [str(tmp_path / f"{shard}.tar") for shard in range(2)]
    loader = loader_over(Samples(shards), num_workers=2)
    batches = iter(loader)
    delivered = [next(batches), next(batches), next(batches)]
    assert delivered == [["00", "01", "02"], ["10", "11", "12"], ["03", "04"]]
    resumed = loader_over(Samples(shards), num_workers=2)
    resumed.load_state_dict(saved(loader))
    assert list(resumed) == [["13", "14"]]
    assert list(resumed) == [*delivered, ["13", "14"]]


class Shards(IterableDataset[str]):
    """A user's class around files of the volume: decodes, and hands the progress on."""

    def __init__(self, directory: Path) -> None:
        self.files = UCVolumeDataset(str(directory))

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield Path(path).name.upper()

    def state_dict(self) -> dict[str, Any]:
        return self.files.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.files.load_state_dict(state_dict)


class Decoded(UCVolumeDataset):
    """A user's class of files that changes what is yielded."""

    def __iter__(self) -> Iterator[str]:
        for path in super().__iter__():
            yield Path(path).name.upper()


@pytest.mark.parametrize("dataset", [Shards, Decoded])
def test_classes_around_the_files_of_a_volume_are_iterated_and_resumed_by_worker(
    dataset: Any, tmp_path: Path, make_files: Any
) -> None:
    every = [name.upper() for name in make_files(tmp_path, 11)]
    loader = loader_over(dataset(tmp_path), num_workers=2)
    assert not loader.has_position
    batches = iter(loader)
    delivered = [next(batches), next(batches), next(batches)]
    assert delivered == [every[0:6:2], every[1:6:2], every[6:11:2]]
    state = saved(loader)
    assert state["per_worker"]["0"]["delivered"] == 6
    resumed = loader_over(dataset(tmp_path), num_workers=2)
    resumed.load_state_dict(state)
    assert list(resumed) == [every[7::2]]
    assert sorted(chain.from_iterable(resumed)) == every
    with pytest.raises(
        TypeError, match=f"only over a UCVolumeDataset, not over {dataset.__name__}"
    ):
        _ = loader.position


def test_a_state_of_another_version_grid_or_kind_is_refused() -> None:
    loader = loader_over(Numbers(), num_workers=2)
    state = saved(loader)
    for changes, message in [
        ({"version": 2}, "state of a loader over Numbers must have version 1, got 2"),
        ({"num_workers": 3}, "num_workers=3, the loader has world_size=1, num_workers=2"),
        ({"world_size": 4}, "taken with world_size=4"),
        ({"per_worker": []}, "must have counts by worker"),
        ({"next_worker": 2}, r"workers of the state must be from 0 to 1, got \[2\]"),
    ]:
        with pytest.raises(StateMismatch, match=message):
            loader.load_state_dict({**state, **changes})
    assert isinstance(Numbers(), Checkpointable)


class Stateless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def test_datasets_without_a_state_load_as_in_torch_and_are_refused_by_name() -> None:
    loader = loader_over(Stateless(), num_workers=1)
    assert list(loader) == [[0, 1, 2], [3, 4]]
    with pytest.raises(TypeError, match=r"IterableDataset with state_dict\(\) .* not of Stateless"):
        loader.state_dict()
    with pytest.raises(TypeError, match="not of Stateless"):
        loader.load_state_dict({"version": 1})


class Told(Numbers):
    def state_dict(self, num_samples: int) -> dict[str, Any]:  # type: ignore[override]
        return {"num_samples": num_samples}


def test_a_dataset_that_has_to_be_told_its_progress_loads_and_is_refused_a_state() -> None:
    loader = loader_over(Told(5), num_workers=0)
    assert sorted(chain.from_iterable(loader)) == list(range(5))
    with pytest.raises(TypeError, match="not of Told"):
        loader.state_dict()


class Broken(Numbers):
    def __iter__(self) -> Iterator[int]:
        for number, item in enumerate(super().__iter__()):
            if number == 6:
                raise OSError(5, "the seventh is unreadable")
            yield item


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_comes_after_the_batches_before_it(num_workers: int) -> None:
    loader = loader_over(Broken(), num_workers=num_workers)
    batches = iter(loader)
    assert len(next(batches) + next(batches)) == 6
    with pytest.raises(OSError, match="the seventh is unreadable"):
        next(batches)
