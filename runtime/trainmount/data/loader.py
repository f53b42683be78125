"""torch's DataLoader with one position for the whole job. Called by training programs.

For a `UCVolumeDataset` the loader itself decides which files make up a batch (`position`), in the
process that consumes the batches; loader workers get file numbers and keep no state. So the
position counts what was *consumed*, not what was prefetched, is the same on all ranks after the
same step, and can be continued with any number of ranks and workers.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import select
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler, default_collate
from torch.utils.data._utils.collate import default_convert

from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.manifest import Entry
from trainmount.data.position import Plan, Position
from trainmount.data.shuffle import Order
from trainmount.distributed import announced_world_size, is_distributed
from trainmount.errors import StateMismatch

__all__ = ["DataLoader"]

_log = logging.getLogger(__name__)

_STATE_VERSION: Final = 2
# Enough requests in flight to hide a store's latency: 48 on a node with 8 ranks, or in a lone
# process.
_WORKERS_PER_RANK: Final = 6
_WORKERS_ALONE: Final = 48
# How many names of skipped files the state keeps.
_MAX_SKIPPED_NAMES: Final = 100


class DataLoader(TorchDataLoader[Any]):
    """`torch.utils.data.DataLoader` that resumes at the next sample, on the same or on another
    grid.

    Its iterator yields this rank's batches of the current epoch. An epoch begins where the loaded
    state says, once; otherwise with its first sample, so leaving the loop early and iterating again
    repeats the epoch (`set_epoch` goes on to another). After the last batch of an epoch the state
    is the beginning of the next.

    `num_workers` defaults to 6 a rank, and to 48 without a process group; `prefetch_factor` to 4;
    workers are kept between epochs. All start methods and `num_workers=0` work.

    A global batch is `batch_size` x number of ranks samples. Without `drop_last` the last one of an
    epoch may be short: it is shared as evenly as possible, and every rank still takes `num_batches`
    steps if it has at least one sample a rank. With fewer, the last ranks end one step early
    (`len(loader)` is theirs): use `drop_last=True`, or `torch.distributed.algorithms.join.Join`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        *,
        num_workers: int = -1,
        prefetch_factor: int | None = 4,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        **kwargs: Any,
    ) -> None:
        """Options are torch's.

        Raises:
            ValueError: `shuffle`, `sampler` or `batch_sampler` with a `UCVolumeDataset`, which has
            its own order.
            ManifestChanged: the ranks see different files.
        """
        self._has_default_workers = num_workers < 0
        if num_workers < 0:
            num_workers = _WORKERS_PER_RANK if is_distributed() else _WORKERS_ALONE
        self._files: UCVolumeDataset | None = None
        self._position = self._start = Position()
        self._is_resumed = False
        self._run = 0
        self._skipped: list[str] = []
        self._num_skipped = 0
        options: dict[str, Any] = {
            **kwargs,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor if num_workers else None,
            "persistent_workers": num_workers > 0,
            "drop_last": drop_last,
            "collate_fn": collate_fn,
            "generator": generator,
            "worker_init_fn": _OwnGroup(kwargs.get("worker_init_fn")),
        }
        if isinstance(dataset, UCVolumeDataset):
            self._files = dataset
            dataset.agree()
            options = self._options_for_files(dataset, batch_size, options)
            dataset = _Fetching(dataset)
        super().__init__(dataset, batch_size, **options)
        if self._files is not None and self.plan.num_batches() == 0:
            raise ValueError(
                f"{self._files.path} has {len(self._files)} files, fewer than a global batch of "
                f"{self.plan.global_batch_size}, and drop_last leaves none; reduce batch_size"
            )

    def check_worker_number_rationality(self) -> None:
        """torch's warning of more workers than cores; not for our default: they mostly wait."""
        if not self._has_default_workers:
            super().check_worker_number_rationality()

    # What is where

    @property
    def has_position(self) -> bool:
        """True over a UCVolumeDataset: one state for the whole job, the same on all ranks. False
        over anything else: each rank's own.
        """
        return self._files is not None

    @property
    def plan(self) -> Plan:
        """How an epoch is cut into global batches on the present grid."""
        files = self._require_files()
        per_rank = 1 if self.batch_size is None else self.batch_size
        return Plan(len(files), per_rank * files.grid().world_size, bool(self.drop_last))

    @property
    def position(self) -> Position:
        """What the job has consumed; the same on all ranks after the same step."""
        self._require_files()
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.position.epoch

    @property
    def num_batches(self) -> int:
        """Steps of a whole epoch: its global batches."""
        return self.plan.num_batches()

    @property
    def num_batches_left(self) -> int:
        """Steps from the position to the end of its epoch."""
        return self.plan.num_batches(self._position.delivered)

    @property
    def num_skipped(self) -> int:
        """Files that were missing or damaged and left out on this rank, with `on_error="skip"`."""
        return self._num_skipped

    @property
    def skipped(self) -> tuple[str, ...]:
        """The first of their names."""
        return tuple(self._skipped)

    def __len__(self) -> int:
        """Batches that this rank gets in a whole epoch."""
        if self._files is None:
            return super().__len__()
        return self.plan.num_shares(self._files.grid())

    def set_epoch(self, epoch: int) -> None:
        """Iterate over this epoch next. A position in its middle is kept; any other epoch begins at
        its start.
        """
        if epoch < 0:
            raise ValueError(f"epoch must not be negative, got {epoch}")
        if epoch != self.position.epoch:
            self._position = Position(epoch, 0)
            self._is_resumed = False

    # Checkpointing

    def state_dict(self) -> dict[str, Any]:
        """The job's position after the batches that were yielded. JSON-able; the same on all ranks.

        Raises:
            TypeError: the dataset is not a UCVolumeDataset.
        """
        files = self._require_files()
        return {
            "version": _STATE_VERSION,
            "epoch": self._position.epoch,
            "delivered": self._position.delivered,
            "shuffle": files.shuffle,
            "seed": files.seed,
            "global_batch_size": self.plan.global_batch_size,
            "drop_last": bool(self.drop_last),
            "manifest": files.manifest.summary(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a position, whatever grid it was taken on. Nothing skipped is read again.

        Raises:
            ManifestChanged: the directory has other files now; the first that differs is named.
            StateMismatch: another version, seed or shuffle, or a position that cannot be. Both are
            ValueErrors.
            TypeError: the dataset is not a UCVolumeDataset.
        """
        files = self._require_files()
        version = state_dict.get("version")
        if version != _STATE_VERSION:
            raise StateMismatch(
                f"state of the loader must have version {_STATE_VERSION}, got {version!r}"
            )
        files.manifest.check(state_dict.get("manifest", {}), files.path)
        for name in ("shuffle", "seed"):
            if state_dict.get(name) != getattr(files, name):
                raise StateMismatch(
                    f"the state was taken with {name}={state_dict.get(name)!r}, "
                    f"the dataset has {name}={getattr(files, name)!r}; give it the state's"
                )
        epoch, delivered = state_dict.get("epoch"), state_dict.get("delivered")
        if not isinstance(epoch, int) or not isinstance(delivered, int) or epoch < 0:
            raise StateMismatch(
                f"epoch and delivered must be numbers from 0, got {epoch!r} and {delivered!r}"
            )
        if not 0 <= delivered <= len(files):
            raise StateMismatch(f"delivered must be from 0 to {len(files)}, got {delivered}")
        saved_batch = state_dict.get("global_batch_size")
        if delivered and saved_batch != self.plan.global_batch_size:
            _log.warning(
                "resumed with another global batch size: the same samples, in other batches",
                extra={"global_batch_size": self.plan.global_batch_size, "saved": saved_batch},
            )
        self._position = self.plan.settle(Position(epoch, delivered))
        self._is_resumed = True

    # Iteration

    def __iter__(self) -> Any:
        if self._files is None:
            return super().__iter__()
        if not is_distributed() and self._files.distributed and announced_world_size() > 1:
            _log.warning(
                "this process reads all files: init_process_group was not called before",
                extra={"world_size": announced_world_size()},
            )
        self._files.agree()
        if not self._is_resumed:
            self._position = Position(self._position.epoch, 0)
        self._is_resumed = False
        self._run += 1
        self._start = self._position
        abandoned = self._files.cache.held()
        batches = super().__iter__()
        # By now the workers have finished what an iteration that was left early had asked for.
        self._files.cache.release(abandoned)
        return self._consume(batches, self._run, self._start)

    def _consume(self, batches: Iterator[Any], run: int, start: Position) -> Iterator[Any]:
        files = self._require_files()
        plan, order = self.plan, files.order(start.epoch)
        position = start
        used: list[Entry] = []
        for share in plan.shares(start.delivered, files.grid()):
            batch, skipped = next(batches)
            # The batch before is valid until here: its consumer has come back for the next one.
            files.cache.release(used)
            used = [files.manifest[order[place]] for place in share] if files.cache.is_open else []
            self._note_skipped(skipped)
            position = plan.after_batch(position)
            if run == self._run:
                self._position = position
            if len(skipped) < len(share):
                yield batch
        files.cache.release(used)
        if run == self._run and self._position.epoch == start.epoch:
            # The last global batch had no sample for this rank.
            self._position = Position(start.epoch + 1, 0)
        # torch ends its own iteration, and with it that of the workers, when it is asked for one
        # more.
        for _ in batches:
            raise AssertionError("torch yielded a batch that is not in the plan")

    def next_order(self) -> Iterator[int]:
        """The numbers of this rank's files from the position to the end of the epoch, held in the
        cache as they go.

        Called by torch when an iteration begins, and drawn from as far as it prefetches.
        """
        files = self._require_files()
        shares = self.plan.shares(self._start.delivered, files.grid())
        return _held(files, files.order(self._start.epoch), shares)

    # Private

    def _options_for_files(
        self, files: UCVolumeDataset, batch_size: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """torch's options under which it draws file numbers from this loader."""
        for name in ("shuffle", "sampler", "batch_sampler"):
            if options.pop(name, None):
                raise ValueError(
                    f"{name} is not for a UCVolumeDataset: give shuffle and seed to the dataset"
                )
        if not options.get("in_order", True):
            raise ValueError(
                "in_order must be true for a UCVolumeDataset: the position counts batches in order"
            )
        collate_fn = options["collate_fn"]
        if collate_fn is None:
            collate_fn = default_convert if batch_size is None else default_collate
        options["collate_fn"] = _Collating(collate_fn, is_batched=batch_size is not None)
        if options["generator"] is None:
            # torch draws a seed for its workers at each iteration. From the global generator, that
            # draw would make the random numbers of a resumed run differ from those of one that
            # went on. Ranks differ, so that their workers do not augment alike.
            digest = hashlib.sha256(f"{files.seed}/{files.grid().rank}".encode()).digest()
            seed = int.from_bytes(digest[:7], "big")
            options["generator"] = torch.Generator().manual_seed(seed)
        options["sampler"] = _RankSampler(self)
        return options

    def _require_files(self) -> UCVolumeDataset:
        if self._files is None:
            raise TypeError(
                "the loader has a position only over a UCVolumeDataset, "
                f"not over {type(self.dataset).__name__}"
            )
        return self._files

    def _note_skipped(self, skipped: list[str]) -> None:
        self._num_skipped += len(skipped)
        self._skipped.extend(skipped[: _MAX_SKIPPED_NAMES - len(self._skipped)])


class _Fetching(Dataset[Any]):
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


class _RankSampler(Sampler[int]):
    """Hands torch the loader's order, anew for each iteration."""

    def __init__(self, loader: DataLoader) -> None:
        # Weak: in a cycle the loader would be freed by the garbage collector, which closes the
        # queues to the workers before torch can tell them to end; torch then waits five seconds.
        self._loader = weakref.ref(loader)

    def __iter__(self) -> Iterator[int]:
        loader = self._loader()
        assert loader is not None, "the iteration that asks holds the loader"
        return loader.next_order()


class _OwnGroup:
    """Starts a loader worker in a process group of its own, then calls the caller's function.

    torchrun passes SIGTERM on to the whole group of a rank. A worker would die of it at once, and
    torch would then raise in the rank, which could not save any more. A worker still ends when its
    rank tells it to, and with its rank, whatever that dies of.
    """

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, worker_id: int) -> None:
        os.setpgid(0, 0)
        _end_with_rank()
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


def _end_with_rank() -> None:
    """Let this process, a loader worker, end as soon as its rank has.

    torch's own watch sees the death too, unless it comes while the worker starts, but then waits
    for the batch in hand to be taken, which nobody does: a batch larger than a pipe would keep the
    worker, and the files that it has open, for ever.
    """
    rank = multiprocessing.parent_process()
    if sys.platform != "linux" or rank is None or rank.pid is None:
        return
    try:
        # Not the parent's: that is somebody else by now where the rank died first.
        descriptor = os.pidfd_open(rank.pid)
    except ProcessLookupError:
        os._exit(1)
    except OSError:
        # Some sandboxes have no such descriptors; torch's own watch has to do.
        return
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)

    def watch() -> None:
        ended.poll()
        os._exit(1)

    threading.Thread(target=watch, name="end-with-rank", daemon=True).start()


class _Collating:
    """The caller's collate function, with the skipped files carried beside the batch."""

    def __init__(self, collate_fn: Callable[[Any], Any], *, is_batched: bool) -> None:
        self._collate_fn = collate_fn
        self._is_batched = is_batched

    def __call__(self, fetched: tuple[list[Any], list[str]]) -> tuple[Any, list[str]]:
        items, skipped = fetched
        if not items:
            return None, skipped
        return self._collate_fn(items if self._is_batched else items[0]), skipped


def _held(files: UCVolumeDataset, order: Order, shares: Iterator[range]) -> Iterator[int]:
    for share in shares:
        for place in share:
            index = order[place]
            files.cache.hold([files.manifest[index]])
            yield index
