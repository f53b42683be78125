"""How torch draws a `UCVolumeDataset`'s files by position: what its sampler and its workers are
given. Called by `loader`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset, Sampler

from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.shuffle import Order
from trainmount.data.streams import Rest

if TYPE_CHECKING:
    from trainmount.data.loader import DataLoader

__all__ = ["Collating", "Fetching", "RankSampler", "held"]


class Fetching(Dataset[Any]):
    """The dataset as loader workers see it: file numbers in, items out. Other attributes are the
    dataset's.
    """

    def __init__(self, files: UCVolumeDataset) -> None:
        self.files = files

    def __getattr__(self, name: str) -> Any:
        if name == "files":  # not there yet while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.files, name)

    def __getitem__(self, index: int) -> tuple[list[Any], list[str]]:
        return self.files.fetch([index])

    def __getitems__(self, indices: list[int]) -> tuple[list[Any], list[str]]:
        return self.files.fetch(indices)


class RankSampler(Sampler[int]):
    """Hands torch the loader's order, anew for each iteration."""

    def __init__(self, loader: DataLoader) -> None:
        # Weak: in a cycle the loader would be freed by the garbage collector, which closes the
        # queues to the workers before torch can tell them to end; torch then waits five seconds.
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        assert loader is not None, "the iteration that asks holds the loader"
        return loader.next_order()


class Collating:
    """The caller's collate function, with the skipped files carried beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, fetched: tuple[list[Any], list[str]]) -> tuple[Any, list[str]]:
        items, skipped = fetched
        if not items:
            return None, skipped
        return self._collate_fn(items if self._is_batched else items[0]), skipped


def held(files: UCVolumeDataset, order: Order | Rest, shares: Iterator[range]) -> Iterator[int]:
    """The numbers of the files, each held in the cache as it is drawn."""
    for share in shares:
        for place in share:
            index = order[place]
            files.cache.hold([files.manifest[index]])
            yield index
