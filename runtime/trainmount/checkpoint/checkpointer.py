"""Saves and resumes a whole training job. Called by training programs.

What belongs to it: models, optimizers, loader, random numbers, step.

    with Checkpointer(
        path, state={"model": model, "optimizer": optimizer}, loader=loader, every_steps=50
    ) as checkpoints:
        resumed = checkpoints.resume()
        step = resumed.step if resumed else 0
        for epoch in range(loader.epoch, num_epochs):
            for batch in loader:
                ...
                step += 1
                checkpoints.step(step)

Every method is called by all ranks together. `step` -> `schedule` (whether) -> `job_state` (what)
-> `saves` -> `writer` -> the commit record; `resume` -> `generations` (which one) -> `reader`.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed

from trainmount.checkpoint.failures import note_first_failure
from trainmount.checkpoint.generations import SkippedGeneration, inspect_generations
from trainmount.checkpoint.job_state import JobState
from trainmount.checkpoint.layout import CommitRecord
from trainmount.checkpoint.reader import UCVolumeReader
from trainmount.checkpoint.saves import Save, SaveMetrics, expect_one_process, told
from trainmount.checkpoint.schedule import Kept, Schedule
from trainmount.checkpoint.stores import open_store
from trainmount.checkpoint.writer import UCVolumeWriter
from trainmount.data.loader import DataLoader
from trainmount.distributed import (
    Group,
    from_first_rank,
    gather,
    grid_of_process,
    is_distributed,
    largest,
    new_group,
)
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint
from trainmount.locations import whole_path
from trainmount.run import heartbeat

__all__ = ["EXIT_CODE_ON_SIGTERM", "Checkpointer", "Resumed"]

_log = logging.getLogger(__name__)

EXIT_CODE_ON_SIGTERM: Final = 143
"""What a process exits with after it saved because of SIGTERM: 128 + 15, what a shell reports of a
process that SIGTERM killed. So whoever started the job counts the attempt as interrupted, not as
failed or finished.
"""

_STEP: Final = "step"

_numbers: Final = itertools.count()
"""Of the objects of this process, which all ranks make together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What `resume` restored."""

    step: int
    """The global step after which the checkpoint was saved."""

    generation: str

    world_size: int
    """Number of ranks that saved it."""

    skipped: tuple[SkippedGeneration, ...] = ()
    """Newer generations that were not whole, newest first."""


class Checkpointer:
    """Saves every N steps or minutes and at SIGTERM, keeps the newest few and every k-th, resumes
    from the newest whole.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        state: Mapping[str, Any],
        loader: DataLoader | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 2,
        keep_every: int | None = None,
        asynchronous: bool = False,
        on_sigterm: bool = True,
        before_commit: Callable[[int], None] | None = None,
        on_save: Callable[[SaveMetrics], None] | None = None,
        thread_count: int = 1,
    ) -> None:
        """Nothing is read or written yet; with `on_sigterm` the process's handler is set.

        Args:
            path: directory of the checkpoints: on a mount, anywhere, or `/Volumes/...` that is not
            mounted.
            state: what is saved, by name: models, optimizers of these models, and anything with
                `state_dict` and `load_state_dict` that is the same on all ranks (a learning rate
                schedule, a gradient scaler). Models are saved by their parameters' names, without
                the prefixes of DDP or FSDP, so that another number of ranks, or one process without
                DDP, can resume. Where replicas differ (batch norm's statistics), rank 0's count.
            loader: a `trainmount.data.DataLoader`, whose position is saved too.
            every_steps: `step` saves at the multiples of it.
            every_minutes: `step` saves when so much time has passed since the save before began,
                by the first rank's clock. With both, whichever comes first; with neither, only at
                SIGTERM and when `save` is called.
            keep_last: how many whole checkpoints stay, at least 1.
            keep_every: besides, every k-th checkpoint stays for good. Those saved because of
                SIGTERM are not counted, so with `every_steps` these are the multiples of
                `keep_every * every_steps`. None keeps no more than `keep_last`.
            asynchronous: copy the values and write them in the background, while training goes on.
                Takes as much memory as the rank's share of the state. At most one save is on its
                way: another one waits for it. An error is raised by the next call of `step`,
                `save`, `wait` or `close`.
            on_sigterm: at SIGTERM to any rank, the next `step` saves on all ranks and exits with
                EXIT_CODE_ON_SIGTERM. It costs one all-reduce of twelve bytes a step, as
                `every_minutes` and a save on its way do.
            before_commit: called on each rank with the step, when its part is written and before
                the checkpoint counts (with `asynchronous`, before anything is written): the place
                to write files that belong to it. What it raises fails the save on all ranks. A save
                can still fail on another rank afterwards, and a crash repeats steps: after
                `resume`, files of later steps than the resumed one belong to no checkpoint and
                should be removed.
            on_save: called on each rank with what a save cost, once it is committed.
            thread_count: files that each rank writes at a time.
        """
        self._schedule = Schedule(every_steps, every_minutes)
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"keep_every must be at least 1, got {keep_every}")
        self._number = next(_numbers)
        self._path = whole_path(path)
        self._state = JobState(state, loader)
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._kept: Kept | None = None
        self._thread_count = thread_count
        self._asynchronous = asynchronous
        self._before_commit = before_commit
        self._on_save = on_save
        self._last_save: SaveMetrics | None = None
        self._in_flight: _InFlight | None = None
        self._groups: tuple[Group, Group] | None = None
        self._on_sigterm = on_sigterm
        self._is_terminated = False
        self._previous_handler: Any = None
        if on_sigterm:
            try:
                self._previous_handler = signal.signal(signal.SIGTERM, self._note_sigterm)
            except ValueError as error:
                raise ValueError(
                    "on_sigterm: only the main thread can handle signals; make the Checkpointer "
                    "there, or pass on_sigterm=False"
                ) from error

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, Exception):
            note_first_failure(f"end-{self._number}", error)
        # The others may be anywhere: nothing is asked of them, and the first error is the one told.
        if self._in_flight is not None:
            try:
                self._in_flight.save.result(self._path)
            except CheckpointError as failure:
                _log.warning("checkpoint not saved", extra={"reason": str(failure)})
            self._in_flight = None
        self.close()

    @property
    def last_save(self) -> SaveMetrics | None:
        """What the newest committed save of this object cost; None before the first."""
        return self._last_save

    def close(self) -> None:
        """Wait for a save on its way, and give the SIGTERM handler back. May be called again.

        Raises:
            CheckpointError: that save failed.
        """
        if self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
            self._on_sigterm = False
        self._state.close()
        self.wait()

    def step(self, global_step: int) -> bool:
        """Call after each step, on all ranks: saves when one is due, and tells whether it did.

        Leaves a sign of life too (`trainmount.run.heartbeat`).

        Raises:
            SystemExit: with EXIT_CODE_ON_SIGTERM, after a save, if any rank got SIGTERM.
            CheckpointError: this save failed, or the one on its way; the checkpoints before stand.
        """
        global_step = _whole(global_step)
        heartbeat(global_step)
        self._state.settle()
        is_terminated, is_due, is_running = self._agree()
        is_due = is_due or self._schedule.is_step_due(global_step)
        if is_terminated:
            self._save_at_the_end(global_step)
        if not is_running:
            self.wait()
        if is_due:
            self.save(global_step)
        return is_due

    def save(self, global_step: int) -> str | None:
        """Save now, on all ranks. Returns the name of the generation once it is committed; with
        `asynchronous` None, once the values are copied.

        Raises:
            RanksDisagree: ranks are at different steps or positions.
            CheckpointError: any thread of any rank failed; nothing was committed. Or the save on
                its way failed; this one was not begun.
        """
        began = time.monotonic()
        global_step = _whole(global_step)
        self.wait()
        self._begin(global_step, began, is_asynchronous=self._asynchronous, is_counted=True)
        if self._asynchronous:
            return None
        metrics = self.wait()
        assert metrics is not None
        return metrics.generation

    def wait(self) -> SaveMetrics | None:
        """Wait for the save on its way, on all ranks, and tell what it cost; None if there is none.

        Raises:
            CheckpointError: any thread of any rank failed; nothing was committed.
        """
        if self._in_flight is None:
            return None
        flight, self._in_flight = self._in_flight, None
        answers = gather(partial(flight.save.result, self._path), self._control())
        generation, num_bytes, seconds = answers[0]
        self._kept = Kept.from_record(generation, flight.extra, self._keep_every)
        self._last_save = SaveMetrics(
            step=flight.save.step,
            generation=generation,
            num_bytes=num_bytes,
            seconds=seconds,
            blocked_seconds=flight.blocked_seconds,
            number=1 + (self._last_save.number if self._last_save else 0),
        )
        if grid_of_process()[0] == 0:
            _log.info(
                "checkpoint committed",
                extra={"step": flight.save.step, "generation": generation, "seconds": seconds},
            )
        if self._on_save is not None:
            self._on_save(self._last_save)
        return self._last_save

    def resume(self) -> Resumed | None:
        """Restore everything from the newest whole checkpoint, on all ranks; None if none was ever
        committed.

        A newer generation that is not whole (a save that was killed, a file that was damaged) is
        logged, listed in the answer, and left alone.

        Raises:
            NoCheckpoint: there are committed checkpoints, but each is damaged.
            ManifestChanged, StateMismatch: the loader's data or settings are not those of the
            checkpoint.
        """
        self.wait()
        # Looked at on the first rank, one after the other, until one is whole.
        found = inspect_generations(open_store(self._path))
        skipped: list[SkippedGeneration] = []
        while (one := from_first_rank(lambda: next(found, None), self._control())) is not None:
            if isinstance(one, SkippedGeneration):
                skipped.append(one)
                continue
            try:
                self._load(one)
            except DamagedCheckpoint as error:
                skipped.append(SkippedGeneration(one.generation, str(error), is_committed=True))
                continue
            self._report(skipped)
            self._kept = Kept.from_record(one.generation, one.extra, self._keep_every)
            self._schedule.start_over()
            return Resumed(
                step=int(one.extra[_STEP]),
                generation=one.generation,
                world_size=one.world_size,
                skipped=tuple(skipped),
            )
        self._report(skipped)
        damaged = [one.reason for one in skipped if one.is_committed]
        if damaged:
            raise NoCheckpoint(f"{self._path}: no checkpoint is whole: {'; '.join(damaged)}")
        return None

    # Private

    def _agree(self) -> tuple[bool, bool, bool]:
        """Of all ranks: whether any got SIGTERM, whether it is time for a save by the first rank's
        clock, and whether the save on its way is still running on any.
        """
        if not (self._on_sigterm or self._schedule.needs_clock or self._in_flight):
            return False, False, False
        mine = (
            self._is_terminated,
            grid_of_process()[0] == 0 and self._schedule.is_time_due(),
            self._in_flight is not None and self._in_flight.save.is_running,
        )
        is_terminated, is_due, is_running = largest([int(one) for one in mine], self._control())
        return bool(is_terminated), bool(is_due), bool(is_running)

    def _save_at_the_end(self, global_step: int) -> None:
        """After SIGTERM: make sure that this step is saved, and exit."""
        try:
            saved = self.wait()
        except CheckpointError as error:
            # There may still be time for another one.
            _log.warning("checkpoint not saved", extra={"reason": str(error)})
            saved = None
        if saved is None or saved.step != global_step:
            self._begin(global_step, time.monotonic(), is_asynchronous=False, is_counted=False)
            self.wait()
        _log.warning("SIGTERM: checkpoint saved, exiting", extra={"step": global_step})
        raise SystemExit(EXIT_CODE_ON_SIGTERM)

    def _begin(
        self, global_step: int, began: float, *, is_asynchronous: bool, is_counted: bool
    ) -> None:
        self._schedule.start_over()
        control, saving = self._control(), self._saving()
        kept = self._known_kept()
        content = self._state.capture(self._path, global_step, control)
        extra = {
            _STEP: global_step,
            **kept.next(is_counted=is_counted),
            **self._state.extra(),
        }
        before_commit = partial(self._before_commit, global_step) if self._before_commit else None
        if before_commit is not None and is_asynchronous:
            # In the background it would find the program at another step.
            self._call_on_all_ranks(before_commit, global_step)
        writer = UCVolumeWriter(
            self._path,
            thread_count=self._thread_count,
            keep_last=self._keep_last,
            keep=kept.names,
            extra=extra,
            before_commit=None if is_asynchronous else before_commit,
        )
        save = Save(global_step, content, writer, saving, is_asynchronous=is_asynchronous)
        self._in_flight = _InFlight(save, extra, time.monotonic() - began)

    def _call_on_all_ranks(self, before_commit: Callable[[], None], global_step: int) -> None:
        rank, _ = grid_of_process()

        def call() -> None:
            try:
                before_commit()
            except Exception as error:
                raise CheckpointError(
                    f"{self._path}: save at step {global_step} failed: "
                    f"rank {rank}: {type(error).__name__}: {error}"
                ) from error

        gather(call, self._control())

    def _known_kept(self) -> Kept:
        """What the newest checkpoint says of those that stay, also when `resume` was not called."""
        if self._kept is None:

            def find() -> Kept:
                for one in inspect_generations(open_store(self._path)):
                    if isinstance(one, CommitRecord):
                        return Kept.from_record(one.generation, one.extra, self._keep_every)
                return Kept()

            self._kept = from_first_rank(find, self._control())
        return self._kept

    def _load(self, record: CommitRecord) -> None:
        content = self._state.template(record)
        reader = UCVolumeReader(self._path, generation=record.generation)
        expect_one_process()
        try:
            load_distributed(
                content,
                storage_reader=reader,
                process_group=self._control(),
                no_dist=not is_distributed(),
            )
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, DamagedCheckpoint):
                    raise failure from error
            raise CheckpointError(
                f"{self._path}/{record.generation} cannot be loaded: {told(error)}"
            ) from error
        self._state.restore(content, record, self._control())

    def _control(self) -> Group:
        """For what the ranks agree on in the training thread."""
        return self._own_groups()[0]

    def _saving(self) -> Group:
        """For a save, which may be in the background while the training thread agrees on more."""
        return self._own_groups()[1]

    def _own_groups(self) -> tuple[Group, Group]:
        # Not in the constructor: the process group may be initialised after it.
        if self._groups is None:
            self._groups = new_group(), new_group()
        return self._groups

    def _report(self, skipped: list[SkippedGeneration]) -> None:
        if grid_of_process()[0] == 0:
            for one in skipped:
                _log.warning(
                    "checkpoint is not whole",
                    extra={"path": self._path, "generation": one.generation, "reason": one.reason},
                )

    def _note_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._is_terminated = True


def _whole(global_step: int) -> int:
    """The number itself where NumPy or torch counts, whose numbers JSON does not take."""
    try:
        return operator.index(global_step)
    except TypeError as error:
        raise TypeError(f"global_step must be a whole number, got {global_step!r}") from error


@dataclass(frozen=True, slots=True)
class _InFlight:
    save: Save

    extra: dict[str, Any]
    """What its commit record will hold."""

    blocked_seconds: float
