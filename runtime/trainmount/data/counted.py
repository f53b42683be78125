"""Iterable datasets of others that keep one progress for the whole job and have to be told how many
samples were delivered: mosaicml's `StreamingDataset`. Called by `loader`.

    state_dict(num_samples, from_beginning) -> {"epoch": ..., "sample_in_epoch": ..., ...}

Batches come from the loader workers in turn, which is the dataset's own order, so what was consumed
is always its beginning, and its state continues on any grid that the dataset can be on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainmount.data.failures import Failures
from trainmount.data.workers import crossing_errors
from trainmount.distributed import announced_world_size, grid_of_process, is_distributed
from trainmount.errors import StateMismatch

__all__ = ["Counted", "Counting"]


class Counting:
    """The caller's collate function, with the number of samples beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, items: Any) -> tuple[int, Any]:
        with crossing_errors():
            batch = self._collate_fn(items)
        return len(items) if self._is_batched else 1, batch


class Counted:
    """Such a dataset in one rank's loader."""

    def __init__(self, dataset: Any, batch_size: int | None, num_workers: int) -> None:
        """Raises ValueError: the dataset makes its batches of another size than the loader."""
        own = getattr(dataset, "batch_size", None)
        if own is not None and own != (batch_size or 1):
            raise ValueError(
                f"batch_size must be that of the {type(dataset).__name__}, {own}, "
                f"got {batch_size}: it gives each loader worker whole batches"
            )
        self.dataset = dataset
        self.failures = Failures(type(dataset).__name__)
        if num_workers == 0:
            self.failures.watch(dataset)
        self._epoch = 0
        self._offset = 0
        """Samples of the epoch, over all ranks, that were delivered before the iteration."""
        self._num_delivered = 0
        """Samples of this rank since then."""
        self._loaded: dict[str, Any] | None = None
        """Where the next iteration goes on, if it is not where the last one has ended."""
        self._start: dict[str, Any] | None = None
        """Where the iteration on its way began."""
        self._untouched: Iterator[Any] | None = None
        """Its batches, until the first has come."""

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    def state_dict(self) -> dict[str, Any]:
        """The dataset's state, the same on all ranks, after the batches that were consumed."""
        if self._loaded is not None:
            return dict(self._loaded)
        replication = getattr(self.dataset, "replication", None) or 1
        num_samples = self._offset + self._num_delivered * _world_size() // replication
        state = self.dataset.state_dict(num_samples=num_samples, from_beginning=True)
        # The dataset's own is that of the epoch that was begun last.
        return {**state, "epoch": self._epoch}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state of the dataset in the next iteration.

        Raises:
            StateMismatch: it is none.
        """
        match state_dict:
            case {"epoch": int(epoch), "sample_in_epoch": int(offset)} if offset >= 0:
                # Before its first iteration the dataset says that it is in epoch -1.
                self._epoch, self._offset = max(0, epoch), offset
            case _:
                raise StateMismatch(
                    f"state of a loader over {type(self.dataset).__name__} must have epoch and "
                    f"sample_in_epoch, got {dict(state_dict)!r}"
                )
        self._num_delivered = 0
        self._start = None
        self._loaded = {**state_dict, "epoch": self._epoch}

    def begin(self) -> bool:
        """An iteration begins. Where the one before was left early, the epoch begins anew. False:
        the workers find where to go on by themselves.

        Raises:
            DataError: the dataset has failed in a thread of its own.
        """
        self.failures.check()
        if self._untouched is not None:
            # All workers of a node begin the dataset's epoch together: until a batch has come they
            # would take what follows for the epoch on its way.
            next(self._untouched, None)
            self._untouched = None
        if self._start is not None:
            self.load_state_dict(self._start)
        self._start = self.state_dict()
        if self._loaded is not None:
            self.dataset.load_state_dict(self._loaded)
            if hasattr(self.dataset, "next_epoch"):
                # It takes a state of an epoch that it has begun before for an old one.
                self.dataset.next_epoch = self._epoch
            # What else the state says is only taken over when this object is asked.
            self.dataset.state_dict(num_samples=0, from_beginning=True)
        return False

    def consume(
        self, counted: Iterator[tuple[int, Any]], again: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        """The batches of an epoch, from torch's iterator over it; `again` gives one over the next.

        A state that was taken at the end of an epoch, and does not say so, goes on with the next.
        """
        self._untouched = counted
        return self._consume(counted, again)

    # Private

    def _consume(
        self, counted: Iterator[tuple[int, Any]], again: Callable[[], Iterator[Any]]
    ) -> Iterator[Any]:
        was_loaded, self._loaded = self._loaded is not None, None
        is_empty = True
        try:
            for num_samples, batch in counted:
                is_empty, self._untouched = False, None
                self._num_delivered += num_samples
                yield batch
        except RuntimeError:
            # Of a worker that has ended, perhaps; others may wait for what it has not read.
            self.failures.check(getattr(counted, "_workers", ()))
            raise
        self.failures.check()
        self._epoch += 1
        self._offset = self._num_delivered = 0
        self._start = self._untouched = None
        if is_empty and was_loaded:
            self.begin()
            yield from self.consume(again(), again)


def _world_size() -> int:
    """The number of ranks, as the dataset counts them."""
    return grid_of_process()[1] if is_distributed() else announced_world_size()
