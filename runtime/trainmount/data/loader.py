"""torch's DataLoader with one position for the whole job. Called by training programs.

For a `UCVolumeDataset` the loader itself decides which files make up a batch (`position`), in the
process that consumes the batches; loader workers get file numbers and keep no state (`drawing`). So
the position counts what was *consumed*, not what was prefetched, is the same on all ranks after the
same step, and can be continued with any number of ranks and workers.

Any other iterable dataset with `state_dict` and `load_state_dict` shares itself out among ranks and
workers, and the loader keeps the state of each worker's replica (`iterables`), or tells the dataset
how much was consumed (`counted`).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final, TypeGuard

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from trainmount.data.checkpointable import is_told_its_progress, tells_its_progress
from trainmount.data.counted import Counted, Counting
from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.drawing import Collating, Drawn, Fetching, RankSampler, collate_fn_of, draw
from trainmount.data.failures import Watching
from trainmount.data.iterables import Replicas, Seeding, Stamping
from trainmount.data.position import Plan, Position
from trainmount.data.progress import BARS, require_rich
from trainmount.data.queues import prompt_queues
from trainmount.data.shuffle import Order
from trainmount.data.state import JOB_STATE_VERSION, Place, Skipped, job_state, place_of
from trainmount.data.stream_states import place_of_streams, stream_state
from trainmount.data.streams import STREAM_STATE_VERSION, Rest
from trainmount.data.timings import Timings
from trainmount.data.workers import OwnGroup, break_cycle
from trainmount.distributed import announced_world_size, gather, grid_of_process, is_distributed
from trainmount.errors import StateMismatch

__all__ = ["DataLoader"]

_log = logging.getLogger(__name__)

# Enough requests in flight to hide a store's latency: 48 on a node with 8 ranks, or in a lone
# process.
_WORKERS_PER_RANK: Final = 6
_WORKERS_ALONE: Final = 48
# Batches that the lone process reads ahead with num_workers=0, the one that it works on included.
_DEPTH_ALONE: Final = 2
# Loaders over one dataset must not take each other's copies for their own.
_LOADERS: Final = itertools.count()


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

    Over another iterable dataset with `state_dict` and `load_state_dict`, the state is this rank's,
    has that of each worker's replica, and continues on the same number of ranks and workers. Over
    one whose `state_dict` takes `num_samples` and `from_beginning`, it is the dataset's own state.

    How long batches take is logged to the active MLflow run, if there is one: see `timings`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = -1,
        *,
        prefetch_factor: int | None = 4,
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        generator: torch.Generator | None = None,
        progress: bool = False,
        **kwargs: Any,
    ) -> None:
        """Options are torch's, and `progress`: rank 0 shows how far the epoch is, as a bar on a
        terminal, and in its log elsewhere.

        Raises:
            ValueError: `shuffle`, `sampler` or `batch_sampler` with a `UCVolumeDataset`, which has
            its own order.
            ManifestChanged: the ranks see different files.
        """
        self._has_default_workers = num_workers < 0
        if num_workers < 0:
            num_workers = _WORKERS_PER_RANK if is_distributed() else _WORKERS_ALONE
        if progress:
            require_rich()
        self._shows_progress = progress
        self._timings = Timings(lambda: grid_of_process()[0])
        self._files: UCVolumeDataset | None = None
        self._replicas: Replicas | Counted | None = None
        self._place = Place()
        self._start = Position()
        self._order: Order | Rest | None = None
        self._is_resumed = False
        self._number = next(_LOADERS)
        self._run = 0
        self._group = "run-none"
        self._skipped = Skipped()
        self._quarantined: frozenset[int] = frozenset()
        options: dict[str, Any] = {
            **kwargs,
            "shuffle": shuffle,
            "sampler": sampler,
            "batch_sampler": batch_sampler,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor if num_workers else None,
            "persistent_workers": num_workers > 0,
            "drop_last": drop_last,
            "collate_fn": collate_fn,
            "generator": generator,
            "worker_init_fn": OwnGroup(kwargs.get("worker_init_fn")),
        }
        if _is_read_by_position(dataset):
            self._files = dataset
            dataset.agree()
            options = self._options_for_files(dataset, batch_size, options)
            dataset = Fetching(dataset)
        elif isinstance(dataset, IterableDataset) and tells_its_progress(dataset):
            replicas = Replicas(dataset, num_workers, batch_size, drop_last=drop_last)
            # The replicas' states travel with their batches.
            options["collate_fn"] = Stamping(collate_fn_of(options, batch_size), replicas.replica)
            options["worker_init_fn"] = Seeding(options["worker_init_fn"], replicas)
            self._replicas, dataset = replicas, replicas.replica
        elif isinstance(dataset, IterableDataset) and is_told_its_progress(dataset):
            self._replicas = Counted(dataset, batch_size, num_workers)
            _require_order(dataset, options)
            failures = self._replicas.failures
            options["worker_init_fn"] = Watching(options["worker_init_fn"], failures)
            options["collate_fn"] = Counting(
                collate_fn_of(options, batch_size), is_batched=batch_size is not None
            )
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
        """True over a UCVolumeDataset, whose files the loader itself counts: then it has a
        `position` and a `plan`.
        """
        return self._files is not None

    @property
    def has_state_of_job(self) -> bool:
        """True where `state_dict` is one for the whole job, the same on all ranks, and resumes on
        any number of ranks: over a UCVolumeDataset, and one that is told how much was delivered.
        False over another Checkpointable: each rank's own.
        """
        return not isinstance(self._replicas, Replicas)

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
        return self._place.position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._replicas.epoch if self._replicas is not None else self.position.epoch

    @property
    def num_batches(self) -> int:
        """Steps of a whole epoch: its global batches."""
        return self.plan.num_batches()

    @property
    def num_batches_left(self) -> int:
        """Steps from the position to the end of its epoch."""
        return self.plan.num_batches(self.position.delivered)

    @property
    def num_skipped(self) -> int:
        """Files that were found missing or damaged, and left out, by this rank."""
        return self._skipped.count

    @property
    def skipped(self) -> tuple[str, ...]:
        """The first of their names."""
        return self._skipped.names

    @property
    def quarantined(self) -> Mapping[str, str]:
        """Files that are not looked at again, with `on_error="quarantine"`, and why. Those that
        other ranks find are among them from the next epoch on.
        """
        return self._place.skipped.plus(self._skipped).quarantined

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
            self._move_to(Position(epoch, 0))
            self._is_resumed = False

    # Checkpointing

    def state_dict(self, *, version: int | None = None) -> dict[str, Any]:
        """The progress after the batches that were yielded. JSON-able.

        Over a `UCVolumeDataset` it is the job's position, the same on all ranks but for `skipped`,
        which is this rank's. `version=1` gives what `databricks.air.data` loads: this rank's own,
        for the present number of ranks and workers, of a dataset without shuffle.

        Raises:
            TypeError: the dataset is neither a UCVolumeDataset nor another Checkpointable that is
                iterable.
            StateMismatch: the progress cannot be said in this version. It is a ValueError.
        """
        if self._replicas is not None and version in (None, STREAM_STATE_VERSION):
            return self._replicas.state_dict()
        files = self._require_files()
        if version == STREAM_STATE_VERSION:
            return stream_state(files, self._place, self.num_workers)
        if version not in (None, JOB_STATE_VERSION):
            raise StateMismatch(f"version must be 1 or {JOB_STATE_VERSION}, got {version!r}")
        skipped = self._place.skipped.plus(self._skipped)
        return job_state(files, self.plan, replace(self._place, skipped=skipped))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a position, whatever grid it was taken on. Nothing skipped is read again.

        A state of version 1 counts for each worker of a rank: it continues on the grid it was taken
        on, and each rank passes its own, all together. From then on the state is the job's again.

        Raises:
            ManifestChanged: the directory has other files now; the first that differs is named.
            StateMismatch: another version, seed or shuffle, or a position that cannot be. Both are
                ValueErrors.
            TypeError: the dataset is neither a UCVolumeDataset nor another Checkpointable that is
                iterable.
        """
        if self._replicas is not None:
            self._replicas.load_state_dict(state_dict)
            if isinstance(self._replicas, Replicas):
                self._stop_workers()
            return
        files = self._require_files()
        version = state_dict.get("version")
        if version == STREAM_STATE_VERSION:
            place = place_of_streams(state_dict, files, self.num_workers, self.epoch)
        elif version == JOB_STATE_VERSION:
            place = place_of(state_dict, files, self.plan)
        else:
            raise StateMismatch(
                f"state of the loader must have version {JOB_STATE_VERSION}, or 1, got {version!r}"
            )
        self._place = place
        self._move_to(self.plan.settle(place.position))
        self._skipped = Skipped()
        self._is_resumed = True

    # Iteration

    def __iter__(self) -> Any:
        self._run += 1
        total: int | None = None
        done = 0
        if self._files is not None:
            batches = self._alone(self._consume(*self._begin(self._files)), self._run)
            total, done = self.num_batches, self.num_batches - self.num_batches_left
        elif self._replicas is not None:
            if self._replicas.begin():
                self._stop_workers()
            start = self._torch_batches
            batches = self._alone(self._replicas.consume(start(), start), self._run)
        else:
            batches = self._torch_batches()
            total = _length(self)
        batches = self._timings.timed(batches, self._gauges)
        if self._shows_progress and grid_of_process()[0] == 0:
            title = "batches" if self._files is None else f"epoch {self.epoch}"
            batches = BARS.shown(batches, title, total, done)
        return batches

    def next_order(self) -> Iterator[Drawn | int]:
        """This rank's samples from the position to the end of the epoch.

        Called by torch when an iteration begins, and drawn from as far as it prefetches.
        """
        files = self._require_files()
        assert self._order is not None, "the iteration that asks has set it"
        start = self._start.delivered
        grid, quarantined = files.grid(), self._quarantined
        return draw(self._group, self._order, self.plan, grid, start, quarantined)

    # Private

    def _begin(self, files: UCVolumeDataset) -> tuple[Iterator[Any], int, Position]:
        """Torch's iteration over what is left of the epoch, or over a new one."""
        if not is_distributed() and files.distributed and announced_world_size() > 1:
            _log.warning(
                "this process reads all files: init_process_group was not called before",
                extra={"world_size": announced_world_size()},
            )
        files.agree()
        if not self._is_resumed:
            self._place = replace(self._place, streams=None)
            self._move_to(Position(self.epoch, 0))
        self._is_resumed = False
        self._quarantined = self._agree_on_quarantined(files)
        self._start = self._place.position
        streams = self._place.streams
        self._order = Rest(len(files), streams) if streams else files.order(self._start.epoch)
        abandoned, self._group = self._group, f"run-{self._number}-{self._run}"
        assert isinstance(self.dataset, Fetching)
        depth = self.prefetch_factor or _DEPTH_ALONE
        self.dataset.read_ahead_by(self.plan, files.grid(), depth)
        batches = self._torch_batches()
        # By now the workers have finished what an iteration that was left early had asked for.
        files.abandon(abandoned)
        return batches, self._run, self._start

    def _torch_batches(self) -> Any:
        """Torch's own iteration."""
        with prompt_queues(self):
            return super().__iter__()

    def _consume(self, batches: Iterator[Any], run: int, start: Position) -> Iterator[Any]:
        files = self._require_files()
        plan = self.plan
        position = start
        used: list[str] = []
        for _ in plan.shares(start.delivered, files.grid()):
            batch, is_empty, skipped, copies = next(batches)
            # The batch before is valid until here: its consumer has come back for the next one.
            files.release(used)
            used = copies
            if skipped:
                self._leave_out(files, skipped)
            position = plan.after_batch(position)
            if run == self._run:
                self._move_to(position)
            if not is_empty:
                yield batch
        files.release(used)
        if run == self._run and self.epoch == start.epoch:
            # The last global batch had no sample for this rank.
            self._move_to(Position(start.epoch + 1, 0))
        # torch ends its own iteration, and with it that of the workers, when it is asked for one
        # more.
        for _ in batches:
            raise AssertionError("torch yielded a batch that is not in the plan")

    def _agree_on_quarantined(self, files: UCVolumeDataset) -> frozenset[int]:
        """The numbers of the files that any rank knows to be in quarantine."""
        if files.on_error != "quarantine":
            return frozenset()
        mine = self.quarantined
        of_ranks = gather(lambda: mine) if files.distributed else [mine]
        known = {name: reason for one in of_ranks for name, reason in one.items()}
        skipped = replace(self._place.skipped, quarantined=known)
        self._place = replace(self._place, skipped=skipped)
        return files.manifest.numbers_of(known)

    def _leave_out(self, files: UCVolumeDataset, found: dict[str, str]) -> None:
        """Raises TooManySkipped where these are too many."""
        quarantined = found if files.on_error == "quarantine" else {}
        self._skipped = self._skipped.plus(Skipped(len(found), tuple(found), quarantined))
        count = len(self.quarantined) if quarantined else self._skipped.count
        files.check_skipped(count, [*found.values()][-1])

    def _alone(self, batches: Iterator[Any], run: int) -> Iterator[Any]:
        """The same batches, as long as no other iteration has begun: it would get some of them."""
        while run == self._run:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except Exception as error:
                break_cycle(error)
                raise
            yield batch
        raise RuntimeError("this iteration over the loader ended when another one began")

    def _move_to(self, position: Position) -> None:
        is_same_epoch = position.epoch == self._place.position.epoch
        streams = self._place.streams if is_same_epoch else None
        self._place = replace(self._place, position=position, streams=streams)

    def _options_for_files(
        self, files: UCVolumeDataset, batch_size: int | None, options: dict[str, Any]
    ) -> dict[str, Any]:
        """torch's options under which it draws file numbers from this loader."""
        for name in ("shuffle", "sampler", "batch_sampler"):
            if options.pop(name, None):
                raise ValueError(
                    f"{name} is not for a UCVolumeDataset: give shuffle and seed to the dataset"
                )
        _require_order(files, options)
        collate_fn = collate_fn_of(options, batch_size)
        options["collate_fn"] = Collating(collate_fn, is_batched=batch_size is not None)
        if options["generator"] is None:
            # torch draws a seed for its workers at each iteration. From the global generator, that
            # draw would make the random numbers of a resumed run differ from those of one that
            # went on. Ranks differ, so that their workers do not augment alike.
            digest = hashlib.sha256(f"{files.seed}/{files.grid().rank}".encode()).digest()
            seed = int.from_bytes(digest[:7], "big")
            options["generator"] = torch.Generator().manual_seed(seed)
        options["sampler"] = RankSampler(self)
        return options

    def _require_files(self) -> UCVolumeDataset:
        if self._files is not None:
            return self._files
        if self._replicas is not None:
            raise TypeError(
                "the loader has a position only over a UCVolumeDataset, "
                f"not over {type(self._replicas.dataset).__name__}"
            )
        raise TypeError(
            "the loader keeps the progress of a UCVolumeDataset, or of an IterableDataset with "
            "state_dict() and load_state_dict(state), not of "
            f"{type(self.dataset).__name__}"
        )

    def _gauges(self) -> dict[str, float]:
        counts = {
            "skipped_files": self._skipped.count,
            "quarantined_files": len(self.quarantined),
        }
        return {name: float(count) for name, count in counts.items() if count}

    def _stop_workers(self) -> None:
        """Let the next iteration start its workers anew."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and self.num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def _is_read_by_position(dataset: Any) -> TypeGuard[UCVolumeDataset]:
    """True for a dataset of files, unless its class changes what an iteration yields."""
    return (
        isinstance(dataset, UCVolumeDataset) and type(dataset).__iter__ is UCVolumeDataset.__iter__
    )


def _require_order(dataset: Any, options: Mapping[str, Any]) -> None:
    if not options.get("in_order", True):
        raise ValueError(
            f"in_order must be true for a {type(dataset).__name__}: batches are counted in order"
        )


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None
