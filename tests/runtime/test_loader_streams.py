"""States of version 1, as `databricks.air.data` makes them: a count for each loader worker.

They continue as the job's position, and a position is given out as them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.data.position import Grid, Position
from trainmount.data.streams import Rest, Streams, delivered_by_workers, joined, rank_state
from trainmount.errors import StateMismatch

MakeFiles = Callable[[Path, int], list[str]]


def column(rank: int, worker: int, grid: tuple[int, int], count: int) -> list[int]:
    """The files of a stream, in its order, as `databricks.air.data` shares them out."""
    world_size, num_workers = grid
    return list(range(count))[rank::world_size][worker::num_workers]


@st.composite
def streams_over_files(draw: Any) -> tuple[int, tuple[int, int], Streams]:
    count = draw(st.integers(1, 80))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    of_ranks = [
        tuple(
            draw(st.integers(0, len(column(rank, worker, grid, count))))
            for worker in range(grid[1])
        )
        for rank in range(grid[0])
    ]
    return count, grid, joined(of_ranks)


def delivered_files(streams: Streams, grid: tuple[int, int], count: int) -> set[int]:
    return {
        number
        for rank in range(grid[0])
        for worker, delivered in enumerate(streams.of_rank(rank))
        for number in column(rank, worker, grid, count)[:delivered]
    }


@settings(max_examples=200, deadline=None)
@given(streams_over_files())
def test_the_rest_is_what_no_stream_has_delivered_in_the_order_of_the_listing(
    case: tuple[int, tuple[int, int], Streams],
) -> None:
    count, grid, streams = case
    streams.check(count)
    rest = Rest(count, streams)
    expected = sorted(set(range(count)) - delivered_files(streams, grid, count))
    assert [rest[place] for place in range(streams.total, count)] == expected
    for place in (streams.total - 1, count):
        with pytest.raises(IndexError, match="is not in the rest"):
            rest[place]


@settings(max_examples=200, deadline=None)
@given(streams_over_files(), st.integers(0, 80))
def test_any_place_of_the_rest_is_counts_of_the_same_streams_again(
    case: tuple[int, tuple[int, int], Streams], more: int
) -> None:
    count, grid, streams = case
    rest = Rest(count, streams)
    place = min(streams.total + more, count)
    before = {rest[number] for number in range(streams.total, place)}
    after = streams.up_to(rest[place] if place < count else count)
    assert after.total == place
    expected = delivered_files(streams, grid, count) | before
    assert delivered_files(after, grid, count) == expected
    states = [json.loads(json.dumps(rank_state(after, rank, grid[1]))) for rank in range(grid[0])]
    read = [
        delivered_by_workers(state, Grid(rank, grid[0]), grid[1])
        for rank, state in enumerate(states)
    ]
    assert joined(read) == after
    assert Streams.from_state(json.loads(json.dumps(after.to_state()))) == after


def loader_over(directory: Path, batch_size: int | None = 2, **options: Any) -> DataLoader:
    dataset = UCVolumeDataset(str(directory), shuffle=options.pop("shuffle", False))
    return DataLoader(dataset, batch_size, **{"num_workers": 0, **options})


def names(batches: Any) -> list[str]:
    return [Path(path).name for batch in batches for path in batch]


def state_of(counts: list[int], **changes: Any) -> dict[str, Any]:
    """Of a lone process, as the other library writes it."""
    return {
        "version": 1,
        "world_size": 1,
        "num_workers": len(counts),
        "per_worker": {
            worker: {"version": 1, "delivered": delivered, "rank": 0, "worker_id": worker}
            for worker, delivered in enumerate(counts)
            if delivered
        },
        **changes,
    }


@pytest.mark.parametrize("counts", [[0, 0], [3, 0], [2, 2], [4, 1], [7, 6]])
def test_files_that_the_streams_did_not_deliver_are_delivered_once(
    counts: list[int], tmp_path: Path, make_files: MakeFiles
) -> None:
    every = make_files(tmp_path, 13)
    before = [
        every[number]
        for worker, count in enumerate(counts)
        for number in column(0, worker, (1, 2), 13)[:count]
    ]
    loader = loader_over(tmp_path, num_workers=2)
    loader.load_state_dict(json.loads(json.dumps(state_of(counts))))
    expected = sorted(set(every) - set(before))
    if not expected:
        assert loader.position == Position(1, 0), "an epoch is not resumed to an empty one"
        expected = every
    assert names(loader) == expected
    assert names(loader) == every
    assert "streams" not in loader.state_dict()


def test_such_a_resumed_epoch_is_saved_as_a_position_and_goes_on_with_other_workers(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    every = make_files(tmp_path, 13)
    loader = loader_over(tmp_path, num_workers=2)
    loader.load_state_dict(state_of([4, 1]))
    delivered = names([next(iter(loader))])
    assert delivered == ["f003", "f005"]
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["streams"] == {"world_size": 1, "delivered": [4, 1]}
    assert (state["version"], state["delivered"]) == (2, 7)
    other = loader_over(tmp_path, 3)
    other.load_state_dict(state)
    gone = {"f000", "f002", "f004", "f006", "f001", *delivered}
    assert names(other) == [name for name in every if name not in gone]
    other.load_state_dict(state)
    other.set_epoch(2)
    assert names(other) == every


def test_a_position_is_given_out_as_counts_of_the_workers(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 13)
    loader = loader_over(tmp_path, num_workers=2)
    batches = iter(loader)
    assert loader.state_dict(version=1)["per_worker"]["1"]["delivered"] == 0
    next(batches)
    next(batches)
    next(batches)
    assert loader.state_dict(version=1) == {
        "version": 1,
        "world_size": 1,
        "num_workers": 2,
        "per_worker": {
            "0": {"version": 1, "delivered": 3, "rank": 0, "worker_id": 0},
            "1": {"version": 1, "delivered": 3, "rank": 0, "worker_id": 1},
        },
    }
    loader.load_state_dict(state_of([4, 1]))
    next(iter(loader))
    counts = [one["delivered"] for one in loader.state_dict(version=1)["per_worker"].values()]
    assert counts == [4, 3]
    alone = loader_over(tmp_path)
    alone.load_state_dict(loader.state_dict())
    with pytest.raises(StateMismatch, match="begun by 2 workers on each of 1 ranks"):
        alone.state_dict(version=1)
    with pytest.raises(StateMismatch, match="version must be 1 or 2, got 3"):
        alone.state_dict(version=3)


def test_a_state_of_another_grid_rank_or_directory_is_refused(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 13)
    loader = loader_over(tmp_path, num_workers=2)

    def refused(state: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as failure:
            loader.load_state_dict(state)
        assert isinstance(failure.value, StateMismatch)

    refused(state_of([1, 1, 1]), "taken with world_size=1, num_workers=3, the loader has")
    refused(state_of([1, 1], world_size=2), "taken with world_size=2, num_workers=2, the loader")
    stream = {"version": 1, "delivered": 1, "rank": 1, "worker_id": 0}
    refused(state_of([1, 1], per_worker={"0": stream}), "rank 1, worker 0, but this is rank 0")
    refused(state_of([8, 1]), "8 files delivered by worker 0 of rank 0, which has 7 of the 13")
    refused(state_of([1, 1], per_worker=None), "must have counts by worker, got None")
    refused(state_of([1, 1], per_worker={"x": stream}), "got workers 'x'")
    refused(state_of([1, 1], per_worker={"2": stream}), "got worker 2 of 2")
    refused(state_of([-1, 1]), "got .*-1.* for worker 0")
    position = {**loader.state_dict(), "streams": {"world_size": 2, "delivered": [1]}}
    refused(position, "streams must have world_size and delivered")
    refused(
        {**position, "streams": {"world_size": 1, "delivered": [3, 3]}},
        "at least the 6 of streams, got 0",
    )
    assert loader.position == Position(0, 0)


def test_a_dataset_whose_files_or_order_are_not_the_streams_is_refused(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 5)
    shuffled = loader_over(tmp_path, num_workers=2, shuffle=True)
    for call in (
        lambda: shuffled.load_state_dict(state_of([1, 1])),
        lambda: shuffled.state_dict(version=1),
    ):
        with pytest.raises(StateMismatch, match="shuffle=False"):
            call()
    listed = DataLoader(UCVolumeDataset(str(tmp_path), files=["f002", "f000"]), num_workers=0)
    with pytest.raises(StateMismatch, match="order of their names, and f000 comes after f002"):
        listed.state_dict(version=1)
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(StateMismatch, match="differs in 1, _SUCCESS first: start the epoch anew"):
        loader_over(tmp_path, num_workers=2).load_state_dict(state_of([1, 1]))
    make_files(tmp_path / "sub", 1)
    with pytest.raises(StateMismatch, match=r"has sub/f000: give the dataset pattern='\*'"):
        loader_over(tmp_path, num_workers=2).load_state_dict(state_of([1, 1]))


def test_direct_iteration_gives_each_worker_the_files_that_version_1_says(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    from torch.utils.data import DataLoader as TorchDataLoader

    every = make_files(tmp_path, 13)
    loader = TorchDataLoader(
        UCVolumeDataset(str(tmp_path)), num_workers=2, batch_size=None, collate_fn=_with_worker
    )
    streams: dict[int, list[str]] = {}
    for worker, name in loader:
        streams.setdefault(worker, []).append(name)
    assert streams == {
        worker: [every[number] for number in column(0, worker, (1, 2), 13)] for worker in range(2)
    }


def _with_worker(path: str) -> tuple[int, str]:
    from torch.utils.data import get_worker_info

    return get_worker_info().id, Path(path).name
