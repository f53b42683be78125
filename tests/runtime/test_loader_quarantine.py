"""Files in quarantine: what failed once is left out of all later epochs, on any grid."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.position import Grid, Position
from trainmount.errors import TooManySkipped

MakeFiles = Callable[[Path, int], list[str]]


class OnGrid(UCVolumeDataset):
    """A dataset that believes to be on this rank of a job."""

    place = Grid(0, 1)

    def grid(self) -> Grid:
        return self.place


@pytest.fixture
def data(tmp_path: Path, make_files: MakeFiles) -> Path:
    """A directory of ten files."""
    make_files(tmp_path / "data", 10)
    return tmp_path / "data"


def over(data: Path, place: Grid = Grid(0, 1), **options: Any) -> OnGrid:  # noqa: B008 - immutable
    """Listed once for all, as a directory without the file would be another one."""
    recorded = str(data.with_name("listing.jsonl"))
    options = {"on_error": "quarantine", "manifest": recorded, **options}
    dataset = OnGrid(str(data), distributed=False, **options)
    dataset.place = place
    return dataset


def names(paths: Any) -> list[str]:
    return [Path(path).name for path in paths]


def loader_over(dataset: UCVolumeDataset, batch_size: int = 4, num_workers: int = 0) -> DataLoader:
    return DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=names)


def damage(data: Path, *damaged: str) -> Callable[[], None]:
    """Cut these files; what is returned makes them whole again."""
    contents = {name: (data / name).read_bytes() for name in damaged}
    for name in damaged:
        os.truncate(data / name, 3)

    def restore() -> None:
        for name, content in contents.items():
            (data / name).write_bytes(content)

    return restore


def delivered(loader: DataLoader) -> list[str]:
    return sorted(name for batch in loader for name in batch)


def everything_but(*left_out: str) -> list[str]:
    return [name for name in (f"f{number:03d}" for number in range(10)) if name not in left_out]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_that_failed_once_is_left_out_of_later_epochs_though_it_is_whole_again(
    num_workers: int, data: Path
) -> None:
    loader = loader_over(over(data, shuffle=True), 1, num_workers)
    restore = damage(data, "f005")
    assert delivered(loader) == everything_but("f005")
    restore()
    for epoch in range(1, 4):
        assert loader.position == Position(epoch, 0)
        assert delivered(loader) == everything_but("f005")
    reason = f"{data}/f005 had 14 bytes when it was listed, now 3"
    assert list(loader.quarantined) == ["f005"]
    assert loader.quarantined["f005"].startswith(reason)
    assert (loader.num_skipped, loader.skipped) == (1, ("f005",)), "it was found once"
    assert json.loads(json.dumps(loader.state_dict()))["skipped"] == {
        "count": 1,
        "names": ["f005"],
        "quarantined": dict(loader.quarantined),
    }


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resumed_job_on_another_grid_leaves_it_out_and_delivers_all_others_once(
    stop: int, data: Path
) -> None:
    loader = loader_over(over(data, shuffle=True, seed=3), 3, num_workers=2)
    restore = damage(data, "f004", "f007")
    epochs: list[list[str]] = [[], [], []]
    batches = iter(loader)
    for _ in range(stop):
        epoch = loader.epoch
        batch = next(batches, None)
        if batch is None:
            batches = iter(loader)
            batch = next(batches)
        epochs[epoch] += batch
    restore()
    known = set(loader.quarantined)
    state = json.loads(json.dumps(loader.state_dict()))
    assert loader.position == Position(*divmod(stop * 3, 12))
    ranks = [loader_over(over(data, Grid(rank, 2), shuffle=True, seed=3), 2) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
        while rank.epoch < 3:
            epoch = rank.epoch
            for batch in rank:
                epochs[epoch] += batch
    for number, epoch_names in enumerate(epochs):
        left_out = known if number >= loader.epoch else {"f004", "f007"}
        assert sorted(epoch_names) == everything_but(*left_out), number
    assert len({json.dumps(rank.state_dict()) for rank in ranks}) == 1


def test_a_batch_of_files_in_quarantine_yields_nothing_and_counts_as_delivered(data: Path) -> None:
    loader = loader_over(over(data), 3)
    restore = damage(data, "f003", "f004", "f005")
    list(loader)
    restore()
    batches = iter(loader)
    assert next(batches) == ["f000", "f001", "f002"]
    assert next(batches) == ["f006", "f007", "f008"]
    assert loader.position == Position(1, 9)
    assert list(batches) == [["f009"]]
    assert (loader.position, loader.num_batches) == (Position(2, 0), 4)


def test_the_limit_counts_each_file_once_over_epochs_and_resumed_jobs(data: Path) -> None:
    loader = loader_over(over(data, max_skipped=2))
    restore = damage(data, "f001", "f002")
    for _ in range(5):
        assert delivered(loader) == everything_but("f001", "f002")
    resumed = loader_over(over(data, max_skipped=2))
    resumed.load_state_dict(loader.state_dict())
    assert delivered(resumed) == everything_but("f001", "f002")
    restore()
    damage(data, "f008")
    with pytest.raises(TooManySkipped, match=r"3 files of .*, max_skipped is 2; the last: .*f008"):
        list(resumed)
    lower = loader_over(over(data, max_skipped=1))
    lower.load_state_dict(loader.state_dict())
    with pytest.raises(TooManySkipped, match=r"2 files of .* were skipped, max_skipped is 1$"):
        list(lower)


def test_another_setting_looks_at_the_files_again(data: Path) -> None:
    loader = loader_over(over(data))
    restore = damage(data, "f001")
    list(loader)
    restore()
    for on_error in ("raise", "skip", "retry"):
        other = loader_over(over(data, on_error=on_error))
        other.load_state_dict(loader.state_dict())
        assert delivered(other) == everything_but()
        assert other.state_dict()["skipped"] == {"count": 1, "names": ["f001"]}
    kept = {**loader.state_dict()["skipped"], "quarantined": {}}
    loader.load_state_dict({**loader.state_dict(), "skipped": kept})
    assert delivered(loader) == everything_but()


def test_a_stream_remembers_its_own_and_tells_them_in_its_state(data: Path) -> None:
    stream = over(data, max_skipped=1)
    restore = damage(data, "f001")
    assert names(stream) == everything_but("f001")
    restore()
    first = iter(stream)
    assert names([next(first), next(first)]) == ["f000", "f002"]
    state = json.loads(json.dumps(stream.state_dict()))
    assert state["delivered"] == 3
    assert list(state["quarantined"]) == ["f001"]
    resumed = over(data, max_skipped=1)
    resumed.load_state_dict(state)
    assert names(resumed) == everything_but("f000", "f001", "f002")
    assert names(resumed) == everything_but("f001")
    damage(data, "f006")
    with pytest.raises(TooManySkipped, match=r"2 files of .* were skipped, max_skipped is 1"):
        list(resumed)


def test_ranks_tell_each_other_and_a_checkpoint_has_the_files_of_all(
    data: Path, tmp_path: Path, run_ranks: Any
) -> None:
    assert run_ranks("quarantine", 2, root=str(tmp_path)) == [0, 0]
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(2)]
    for rank, (first, known_first, second, known, known_after) in enumerate(told):
        assert first == [f"f{number:03d}" for number in range(10) if number % 2 == rank][1:]
        assert known_first == [f"f00{rank}"]
        assert known == known_after == ["f000", "f001"]
        assert second == first
