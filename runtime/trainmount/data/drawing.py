"""How torch's DataLoader draws the files of a `UCVolumeDataset`: places of an epoch's order go to
the loader workers, items come back. Called by `loader`.

A worker finds the files of its places by itself, and knows from the plan which batches come to it
next, so that it reads those ahead that torch has already queued for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from torch.utils.data import Dataset, Sampler, default_collate, get_worker_info
from torch.utils.data._utils.collate import default_convert

from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.items import Fetched
from trainmount.data.position import Grid, Plan
from trainmount.data.shuffle import Order
from trainmount.data.streams import Rest
from trainmount.data.workers import crossing_errors

__all__ = [
    "Collated",
    "Collating",
    "Drawn",
    "Fetching",
    "RankSampler",
    "collate_fn_of",
    "draw",
]


class Drawn(NamedTuple):
    """The first sample of a batch, with what is the same for all of them. The others are places,
    which cost little on their way to a worker.
    """

    group: str
    """Of the iteration that it is for, with its loader."""
    order: Order | Rest
    delivered: int
    """Where its global batch begins."""
    place: int
    """In the order."""
    quarantined: frozenset[int]
    """Files that are left out, by their numbers."""


class Collated(NamedTuple):
    """A batch on its way from a worker."""

    batch: Any
    is_empty: bool
    """True if all of its files were left out."""
    skipped: dict[str, str]
    """Files that were found missing or damaged, and why."""
    copies: list[str]
    """To be released when the batch is used."""


class Draws(Protocol):
    """What the sampler needs of a loader."""

    def next_order(self) -> Iterator[Drawn | int]: ...


def draw(
    group: str,
    order: Order | Rest,
    plan: Plan,
    grid: Grid,
    start: int,
    quarantined: frozenset[int],
) -> Iterator[Drawn | int]:
    """The rank's samples of an epoch's global batches from `start` on."""
    for delivered in range(start, plan.count, plan.global_batch_size):
        share = plan.share(delivered, grid)
        if share:
            yield Drawn(group, order, delivered, share[0], quarantined)
            yield from share[1:]


class Fetching(Dataset[Any]):
    """The dataset as loader workers see it: samples in, items out. Other attributes are the
    dataset's.
    """

    def __init__(self, files: UCVolumeDataset) -> None:
        self.files = files
        self._plan: Plan | None = None
        self._grid = Grid(0, 1)
        self._depth = 1
        self._group = ""
        self._not_expected = 0

    def __getattr__(self, name: str) -> Any:
        if name == "files":  # not there yet while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.files, name)

    def read_ahead_by(self, plan: Plan, grid: Grid, depth: int) -> None:
        """Read ahead so many batches of a worker, from the one that it works on. Before workers
        start.
        """
        self._plan, self._grid, self._depth = plan, grid, depth

    def __getitem__(self, drawn: Drawn) -> Fetched:
        return self.__getitems__([drawn])

    def __getitems__(self, batch: list[Any]) -> Fetched:
        """A `Drawn`, and the places of the samples behind it."""
        group, order, delivered, first, quarantined = batch[0]
        if group != self._group:
            self._group, self._not_expected = group, delivered
            self.files.begin_epoch(quarantined)
        self._expect(order, delivered)
        return self.files.fetch([order[first], *(order[place] for place in batch[1:])], group)

    def _expect(self, order: Order | Rest, delivered: int) -> None:
        """Tell the dataset of the batches that torch has queued since it was last told."""
        if self._plan is None:
            return
        worker = get_worker_info()
        # torch gives its workers a batch in turn.
        step = self._plan.global_batch_size * (worker.num_workers if worker is not None else 1)
        end = min(delivered + self._depth * step, self._plan.count)
        for begin in range(self._not_expected, end, step):
            self.files.expect(order[place] for place in self._plan.share(begin, self._grid))
            self._not_expected = begin + step


class RankSampler(Sampler[Any]):
    """Hands torch the loader's order, anew for each iteration."""

    def __init__(self, loader: Draws) -> None:
        # Weak: in a cycle the loader would be freed by the garbage collector, which closes the
        # queues to the workers before torch can tell them to end; torch then waits five seconds.
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[Drawn | int]:
        loader = self._loader()
        assert loader is not None, "the iteration that asks holds the loader"
        return loader.next_order()


def collate_fn_of(options: Mapping[str, Any], batch_size: int | None) -> Callable[[Any], Any]:
    """The caller's, or torch's own choice."""
    if options["collate_fn"] is not None:
        given: Callable[[Any], Any] = options["collate_fn"]
        return given
    return default_convert if batch_size is None else default_collate


class Collating:
    """The caller's collate function, with what else has to be known of the batch beside it."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, fetched: Fetched) -> Collated:
        items, skipped, copies = fetched
        if not items:
            return Collated(None, True, skipped, copies)
        with crossing_errors():
            batch = self._collate_fn(items if self._is_batched else items[0])
        return Collated(batch, False, skipped, copies)
