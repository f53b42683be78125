"""Iterable datasets of others in the loader: anything with `state_dict` and `load_state_dict`.
Called by `loader`.

Each loader worker has a replica of the dataset, and each replica a progress of its own. The state
of a replica travels with each of its batches, so that what the loader keeps is as of the batches
that were *consumed*. Restoring starts the workers anew, each with its own state: on the same
number of ranks and workers, since only the dataset knows how it shares itself out.

    worker: dataset -> Replica.__iter__ -> torch's fetcher -> Stamping (batch, state)
    rank:   torch's iterator -> Replicas.consume -> the training program
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

from torch.utils.data import IterableDataset, get_worker_info

from trainmount.data.position import Grid
from trainmount.data.streams import STREAM_STATE_VERSION, check_grid, entries
from trainmount.data.workers import crossing_errors
from trainmount.distributed import grid_of_process
from trainmount.errors import StateMismatch

__all__ = ["Replica", "Replicas", "Seeding", "Stamping"]

_END: Final = object()


@dataclass(slots=True)
class Progress:
    """Where the replicas of a rank stand."""

    epoch: int = 0

    states: dict[int, Any] = field(default_factory=dict)
    """By worker, as the dataset gave it after the last batch that was consumed from the worker."""

    done: set[int] = field(default_factory=set)
    """Workers that have nothing more in this epoch."""

    ended: set[int] = field(default_factory=set)
    """Workers whose state is still of the end of the epoch before: none of their batches of this
    epoch was consumed.
    """

    next_worker: int = 0
    """Whose turn it is."""

    def note(self, worker: int, state: Any, *, is_done: bool) -> None:
        """A batch of the worker was consumed."""
        self.states[worker] = state
        self.ended.discard(worker)
        if is_done:
            self.done.add(worker)

    def copied(self) -> Progress:
        return Progress(
            self.epoch, dict(self.states), set(self.done), set(self.ended), self.next_worker
        )


class Replica(IterableDataset[Any]):
    """The dataset as torch sees it in one process. Other attributes are the dataset's."""

    def __init__(self, dataset: Any, max_leftover: int) -> None:
        """`max_leftover` is how many items a worker may have read and dropped at an epoch's end."""
        self.dataset = dataset
        self.max_leftover = max_leftover
        self.num_passes = 0
        self.is_done = False
        self.ended_with: Any = None
        self.epoch_before: int | None = None
        self._stream: Iterator[Any] = iter(())
        self._ahead: list[tuple[Any, Exception | None]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not there yet while a copy is being unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        num_passes, self.num_passes = self.num_passes, 0
        yield from repeat(Pass(), num_passes)
        if self.is_done:
            self.is_done = False
            return
        if self.ended_with is not None:
            self._end_again()
        self.advance_epoch()
        self._ahead.clear()
        with crossing_errors():
            self._stream = iter(self.dataset)
            while (item := self._next()) is not _END:
                yield item

    def is_at_end(self) -> bool:
        """True if this iteration has no more items. Reads the next one ahead to know it."""
        if not self._ahead:
            try:
                self._ahead.append((next(self._stream, _END), None))
            except Exception as error:
                # It belongs to the next item, not to those that are there.
                self._ahead.append((None, error))
        return self._ahead[0][0] is _END

    def restore(self, progress: Progress, worker: int, num_passes: int) -> None:
        """Go on from this worker's state in the next iteration, after `num_passes` times nothing
        and thereby the turns of the workers before it.
        """
        self.num_passes = num_passes
        self.is_done = worker in progress.done
        self.epoch_before = self.ended_with = None
        state = progress.states.get(worker)
        if state is None:
            return
        self.dataset.load_state_dict(copy.deepcopy(state))
        if worker in progress.ended | progress.done:
            self.ended_with = state
            self.epoch_before = _epoch_of(state)

    def advance_epoch(self) -> None:
        """Tell a dataset that counts epochs, but leaves it to others to set the next, of it."""
        epoch = getattr(self.dataset, "epoch", None)
        if not isinstance(epoch, int) or not hasattr(self.dataset, "set_epoch"):
            return
        if epoch == self.epoch_before:
            self.dataset.set_epoch(epoch + 1)
        self.epoch_before = self.dataset.epoch

    def _next(self) -> Any:
        if not self._ahead:
            return next(self._stream, _END)
        item, error = self._ahead.pop()
        if error is not None:
            raise error
        return item

    def _end_again(self) -> None:
        """Bring a dataset that was restored at the end of an epoch to where it is after it."""
        state, self.ended_with = self.ended_with, None
        stream = iter(self.dataset)
        for _ in range(self.max_leftover + 1):
            if next(stream, _END) is _END:
                return
        # It takes its end for the next beginning.
        self.dataset.load_state_dict(copy.deepcopy(state))


class Pass:
    """In place of an item: the turn goes to the next worker."""


class Stamping:
    """The caller's collate function, with the worker and the replica's state beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], replica: Replica) -> None:
        self._collate_fn = collate_fn
        self._replica = replica

    def __call__(self, items: Any) -> tuple[int, Any, bool, Any] | None:
        if isinstance(items[0] if isinstance(items, list) and items else items, Pass):
            return None
        info = get_worker_info()
        worker = info.id if info is not None else 0
        replica = _replica_here(self._replica)
        with crossing_errors():
            batch = self._collate_fn(items)
            # A copy: a queue writes it later, when the dataset has gone on.
            state = copy.deepcopy(replica.state_dict())
        return worker, state, replica.is_at_end(), batch


class Seeding:
    """Restores the replica of a loader worker that starts, after the caller's function."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None, replicas: Replicas) -> None:
        self._worker_init_fn = worker_init_fn
        self._replica = replicas.replica
        self._seed = replicas.seed
        self._batch_size = replicas.batch_size

    def __call__(self, worker_id: int) -> None:
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)
        num_passes = self._batch_size if worker_id < self._seed.next_worker else 0
        _replica_here(self._replica).restore(self._seed, worker_id, num_passes)


class Replicas:
    """The replicas of one rank's loader."""

    def __init__(
        self, dataset: Any, num_workers: int, batch_size: int | None, *, drop_last: bool
    ) -> None:
        self.batch_size = batch_size or 1
        self.dataset = dataset
        self.replica = Replica(dataset, self.batch_size - 1 if drop_last else 0)
        self.seed = Progress()
        """What workers that start begin with; changed in place, since the loader keeps it."""
        self.progress = Progress()
        self._num_workers = num_workers
        self._start: Progress | None = None
        self._is_restored = False

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self.progress.epoch

    def state_dict(self) -> dict[str, Any]:
        """Of this rank, after the batches that were consumed."""
        progress = self.progress
        return {
            "version": STREAM_STATE_VERSION,
            "world_size": grid_of_process()[1],
            "num_workers": self._num_workers,
            "per_worker": {str(worker): state for worker, state in progress.states.items()},
            "epoch": progress.epoch,
            "next_worker": progress.next_worker,
            "done": sorted(progress.done),
            "ended": sorted(progress.ended),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Begin with these states. The workers have to be started anew.

        Raises:
            StateMismatch: another version or grid, or not such a state.
        """
        version = state_dict.get("version")
        if version != STREAM_STATE_VERSION:
            raise StateMismatch(
                f"state of a loader over {type(self.dataset).__name__} must have version "
                f"{STREAM_STATE_VERSION}, got {version!r}"
            )
        check_grid(state_dict, Grid(*grid_of_process()), self._num_workers)
        states = dict(entries(state_dict))
        epochs = [epoch for state in states.values() if (epoch := _epoch_of(state)) is not None]
        progress = Progress(
            state_dict.get("epoch", max(epochs, default=0)),
            states,
            set(state_dict.get("done", ())),
            set(state_dict.get("ended", ())),
            state_dict.get("next_worker", 0),
        )
        workers = range(max(1, self._num_workers))
        named = {*states, *progress.done, *progress.ended, progress.next_worker}
        if not named <= set(workers):
            raise StateMismatch(
                f"workers of the state must be from 0 to {workers[-1]}, got {sorted(named)}"
            )
        self._go_to(progress)
        self._is_restored = True

    def begin(self) -> bool:
        """An iteration begins. True if the one before was left early: the epoch begins anew, and
        the workers have to be started anew.
        """
        is_left_early = self._start is not None
        if self._start is not None:
            self._go_to(self._start)
        self._start = self.progress.copied()
        if self._num_workers:
            # For datasets whose replicas share their epoch; the others do it themselves.
            self.replica.advance_epoch()
        elif not self._start.states:
            self._start.states[0] = copy.deepcopy(self.dataset.state_dict())
        return is_left_early

    def consume(self, stamped: Iterator[Any], again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The batches of an epoch, from torch's iterator over it; `again` gives one over the next.

        A state that was taken at the end of an epoch, and does not say so, goes on with the next.
        """
        is_restored, self._is_restored = self._is_restored, False
        is_empty = True
        for stamp in stamped:
            if stamp is None:
                continue
            worker, state, is_done, batch = stamp
            is_empty = False
            self.progress.note(worker, state, is_done=is_done)
            self.progress.next_worker = (worker + 1) % max(1, self._num_workers)
            yield batch
        states = self.progress.states
        self.progress = Progress(self.progress.epoch + 1, states, ended=set(states))
        self._start = None
        if is_empty and is_restored:
            self.begin()
            yield from self.consume(again(), again)

    # Private

    def _go_to(self, progress: Progress) -> None:
        self.progress = progress
        self._start = None
        dataset = self.dataset
        epochs = [
            epoch for state in progress.states.values() if (epoch := _epoch_of(state)) is not None
        ]
        if epochs and hasattr(dataset, "set_epoch"):
            # Some take a state for one of another dataset unless they are at its epoch.
            dataset.set_epoch(max(epochs))
        if self._num_workers == 0:
            self.replica.restore(progress, 0, 0)
            return
        seed = progress.copied()
        self.seed.states, self.seed.done, self.seed.ended = seed.states, seed.done, seed.ended
        self.seed.epoch, self.seed.next_worker = seed.epoch, seed.next_worker
        is_ended = progress.ended and progress.ended >= set(progress.states)
        self.replica.epoch_before = max(epochs) if epochs and is_ended else None


def _replica_here(replica: Replica) -> Any:
    """The one that is iterated in this process."""
    info = get_worker_info()
    return replica if info is None else info.dataset


def _epoch_of(state: Any) -> int | None:
    epoch = state.get("epoch") if isinstance(state, Mapping) else None
    return epoch if isinstance(epoch, int) else None
