"""Progress as `databricks.air.data` counts it: the files delivered by each stream, which is a
loader worker of a rank. Called by `loader` and `stream_states`; pure.

With R ranks of W workers, file number i of the listing belongs to rank i % R and there to worker
(i // R) % W, so to column i % (R W) of a table with R W columns. A stream goes through its column
from the top. What all streams have delivered is therefore not the beginning of the listing, but a
part of each column; the rest of the epoch is the other files, in the order of the listing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final, NoReturn

from trainmount.data.position import Grid
from trainmount.errors import StateMismatch

__all__ = [
    "STREAM_STATE_VERSION",
    "Rest",
    "Streams",
    "check_grid",
    "delivered_by_workers",
    "entries",
    "joined",
    "rank_state",
]

STREAM_STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Streams:
    """How many files each stream of a job has delivered in an epoch."""

    world_size: int

    delivered: tuple[int, ...]
    """By column: worker w of rank r is number r + `world_size` * w."""

    @property
    def num_workers(self) -> int:
        """Streams of a rank, at least 1."""
        return len(self.delivered) // self.world_size

    @property
    def total(self) -> int:
        return sum(self.delivered)

    def of_rank(self, rank: int) -> tuple[int, ...]:
        """By worker."""
        return self.delivered[rank :: self.world_size]

    def up_to(self, end: int) -> Streams:
        """With the files before number `end` of the listing delivered too."""
        step = len(self.delivered)
        counts = (
            max(count, len(range(column, end, step))) for column, count in enumerate(self.delivered)
        )
        return Streams(self.world_size, tuple(counts))

    def check(self, count: int) -> None:
        """Nothing if these can be streams over `count` files.

        Raises:
            StateMismatch: a stream has delivered more than it has.
        """
        step = len(self.delivered)
        for column, delivered in enumerate(self.delivered):
            files = len(range(column, count, step))
            if delivered > files:
                worker, rank = divmod(column, self.world_size)
                raise StateMismatch(
                    f"the state counts {delivered} files delivered by worker {worker} of rank "
                    f"{rank}, which has {files} of the {count} files; it is of another directory"
                )

    def to_state(self) -> dict[str, Any]:
        """JSON-able."""
        return {"world_size": self.world_size, "delivered": list(self.delivered)}

    @classmethod
    def from_state(cls, state: Any) -> Streams:
        """Raises StateMismatch."""
        match state:
            case {"world_size": int(world_size), "delivered": [*counts]} if (
                world_size > 0
                and counts
                and len(counts) % world_size == 0
                and all(isinstance(count, int) and count >= 0 for count in counts)
            ):
                return cls(world_size, tuple(counts))
        raise StateMismatch(f"streams must have world_size and delivered, got {state!r}")


@dataclass(frozen=True, slots=True)
class Rest:
    """An order of an epoch in which what the streams have delivered comes first, and then the rest
    in the order of the listing. Only places of the rest can be asked for.
    """

    count: int
    """Number of files in the epoch."""

    streams: Streams

    _levels: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Different numbers of delivered files, ascending: from row `_levels[n]` of the table on, the
    columns `_open[n]` are undelivered, and they begin with place `_starts[n]` of the rest."""
    _open: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        delivered = self.streams.delivered
        levels = sorted(set(delivered))
        opened = [
            tuple(column for column, count in enumerate(delivered) if count <= level)
            for level in levels
        ]
        sizes = [
            (after - level) * len(columns)
            for level, after, columns in zip(levels, levels[1:], opened, strict=False)
        ]
        object.__setattr__(self, "_levels", tuple(levels))
        object.__setattr__(self, "_open", tuple(opened))
        object.__setattr__(self, "_starts", tuple(accumulate(sizes, initial=0)))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> int:
        number = place - self.streams.total
        if number < 0 or place >= self.count:
            raise IndexError(f"place {place} is not in the rest of {self.count} files")
        block = bisect_right(self._starts, number) - 1
        columns = self._open[block]
        row, column = divmod(number - self._starts[block], len(columns))
        return (self._levels[block] + row) * len(self.streams.delivered) + columns[column]


def rank_state(streams: Streams, rank: int, num_workers: int) -> dict[str, Any]:
    """The state of version 1 of a rank's loader. `num_workers` may be 0: then it has one stream."""
    return {
        "version": STREAM_STATE_VERSION,
        "world_size": streams.world_size,
        "num_workers": num_workers,
        "per_worker": {
            str(worker): {
                "version": STREAM_STATE_VERSION,
                "delivered": delivered,
                "rank": rank,
                "worker_id": worker,
            }
            for worker, delivered in enumerate(streams.of_rank(rank))
        },
    }


def check_grid(state: Mapping[str, Any], grid: Grid, num_workers: int) -> None:
    """Nothing if a state of version 1 was taken on this grid.

    Raises:
        StateMismatch: on another one.
    """
    saved = (state.get("world_size"), state.get("num_workers"))
    if saved != (grid.world_size, num_workers):
        raise StateMismatch(
            f"the state was taken with world_size={saved[0]}, num_workers={saved[1]}, the loader "
            f"has world_size={grid.world_size}, num_workers={num_workers}; a state of version 1 "
            "counts for each worker and continues on its own grid only"
        )


def entries(state: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """The workers of a state of version 1, and what it says of each.

    Raises:
        StateMismatch: it does not have them.
    """
    per_worker = state.get("per_worker")
    if not isinstance(per_worker, Mapping):
        _refuse(f"{per_worker!r}")
    try:
        # JSON has made the numbers of the workers strings.
        return [(int(worker), of_worker) for worker, of_worker in per_worker.items()]
    except ValueError:
        _refuse(f"workers {', '.join(map(repr, per_worker))}")


def delivered_by_workers(state: Mapping[str, Any], grid: Grid, num_workers: int) -> tuple[int, ...]:
    """What a rank's state of version 1 says of each of its workers.

    Raises:
        StateMismatch: it is of another grid or rank, or not such a state.
    """
    check_grid(state, grid, num_workers)
    delivered = [0] * max(1, num_workers)
    for worker, of_worker in entries(state):
        if not 0 <= worker < len(delivered):
            _refuse(f"worker {worker} of {len(delivered)}")
        match of_worker:
            case {"version": 1, "delivered": int(count), "rank": rank, "worker_id": worker_id} if (
                count >= 0
            ):
                if (rank, worker_id) != (grid.rank, worker):
                    raise StateMismatch(
                        f"the state is of rank {rank}, worker {worker_id}, but this is rank "
                        f"{grid.rank}, worker {worker}; give each rank its own"
                    )
                delivered[worker] = count
            case _:
                _refuse(f"{of_worker!r} for worker {worker}")
    return tuple(delivered)


def joined(of_ranks: Sequence[tuple[int, ...]]) -> Streams:
    """From what the workers of each rank have delivered."""
    world_size, num_workers = len(of_ranks), len(of_ranks[0])
    return Streams(
        world_size,
        tuple(
            of_ranks[rank][worker] for worker in range(num_workers) for rank in range(world_size)
        ),
    )


def _refuse(what: str) -> NoReturn:
    raise StateMismatch(
        f"per_worker of a state of version 1 must have counts by worker, got {what}"
    )
