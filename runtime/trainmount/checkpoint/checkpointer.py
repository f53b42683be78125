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

Every method is called by all ranks together. `save` -> `writer` -> the commit record; `resume` ->
`generations` (which one) -> `reader`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed
from torch.distributed.checkpoint.stateful import Stateful

from trainmount.checkpoint import randomness
from trainmount.checkpoint.generations import SkippedGeneration, inspect_generations
from trainmount.checkpoint.layout import CommitRecord
from trainmount.checkpoint.reader import UCVolumeReader
from trainmount.checkpoint.stores import open_store
from trainmount.checkpoint.writer import UCVolumeWriter
from trainmount.data.loader import DataLoader
from trainmount.distributed import (
    any_rank,
    from_first_rank,
    gather,
    grid_of_process,
    is_distributed,
)
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint, RanksDisagree

__all__ = ["EXIT_CODE_ON_SIGTERM", "Checkpointer", "Resumed"]

_log = logging.getLogger(__name__)

EXIT_CODE_ON_SIGTERM: Final = 143
"""What a process exits with after it saved because of SIGTERM: 128 + 15, what a shell reports of a
process that SIGTERM killed. So whoever started the job counts the attempt as interrupted, not as
failed or finished.
"""

_STEP: Final = "step"
_LOADER: Final = "loader"
_OBJECT: Final = "object."
_RANDOMNESS: Final = "randomness."


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
    """Saves every N steps and at SIGTERM, keeps the newest few, resumes from the newest whole."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        state: Mapping[str, Any],
        loader: DataLoader | None = None,
        every_steps: int | None = None,
        keep_last: int = 2,
        on_sigterm: bool = True,
        before_commit: Callable[[int], None] | None = None,
        thread_count: int = 1,
    ) -> None:
        """Nothing is read or written yet; with `on_sigterm` the process's handler is set.

        Args:
            path: directory of the checkpoints: on a mount, anywhere, or `/Volumes/...` that is not
            mounted.
            state: what is saved, by name: models, optimizers of these models, and anything with
                `state_dict` and `load_state_dict` that is the same on all ranks (a learning rate
                schedule, a step counter). Models are saved by their parameters' names, without the
                prefixes of DDP or FSDP, so that another number of ranks, or one process without
                DDP, can resume. Where replicas differ (batch norm's statistics), rank 0's count.
            loader: a `trainmount.data.DataLoader`, whose position is saved too.
            every_steps: `step` saves at the multiples of it; None saves only at SIGTERM and when
            `save` is called.
            keep_last: how many checkpoints stay, at least 1.
            on_sigterm: at SIGTERM to any rank, the next `step` saves on all ranks and exits with
                EXIT_CODE_ON_SIGTERM. It costs one all-reduce of four bytes a step.
            before_commit: called on each rank with the step, when its part is written and before
                the checkpoint counts: the place to write files that belong to it. What it raises
                fails the save on all ranks. A save can still fail on another rank afterwards, and a
                crash repeats steps: after `resume`, files of later steps than the resumed one
                belong to no checkpoint and should be removed.
            thread_count: files that each rank writes at a time.
        """
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, got {every_steps}")
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if loader is not None and not isinstance(loader, DataLoader):
            raise TypeError(
                f"loader must be a trainmount.data.DataLoader, got {type(loader).__name__}"
            )
        self._path = os.fspath(path)
        self._models = {name: one for name, one in state.items() if isinstance(one, nn.Module)}
        self._optimizers = {
            name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)
        }
        self._objects: dict[str, Stateful] = {}
        for name, one in state.items():
            if name in self._models or name in self._optimizers:
                continue
            if not isinstance(one, Stateful):
                raise TypeError(
                    f"state[{name!r}] must have state_dict and load_state_dict, "
                    f"got {type(one).__name__}"
                )
            self._objects[name] = one
        self._model_of = {name: self._owner(name, one) for name, one in self._optimizers.items()}
        self._loader = loader
        self._every_steps = every_steps
        self._keep_last = keep_last
        self._thread_count = thread_count
        self._before_commit = before_commit
        self._on_sigterm = on_sigterm
        self._is_terminated = False
        self._previous_handler: Any = None
        if on_sigterm:
            self._previous_handler = signal.signal(signal.SIGTERM, self._note_sigterm)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the SIGTERM handler back. May be called again."""
        if self._on_sigterm:
            signal.signal(signal.SIGTERM, self._previous_handler or signal.SIG_DFL)
            self._on_sigterm = False

    def step(self, global_step: int) -> bool:
        """Call after each step, on all ranks: saves when one is due, and tells whether it did.

        Raises:
            SystemExit: with EXIT_CODE_ON_SIGTERM, after a save, if any rank got SIGTERM.
            CheckpointError: the save failed; the checkpoints before it stand.
        """
        is_terminated = self._on_sigterm and any_rank(self._is_terminated)
        is_due = self._every_steps is not None and global_step % self._every_steps == 0
        if is_due or is_terminated:
            self.save(global_step)
        if is_terminated:
            _log.warning("SIGTERM: checkpoint saved, exiting", extra={"step": global_step})
            raise SystemExit(EXIT_CODE_ON_SIGTERM)
        return is_due

    def save(self, global_step: int) -> str:
        """Save now, on all ranks; returns the name of the generation once it is committed.

        Raises:
            RanksDisagree: ranks are at different steps or positions.
            CheckpointError: any thread of any rank failed; nothing was committed.
        """
        loader_state = self._agreed_loader_state(global_step)
        writer = UCVolumeWriter(
            self._path,
            thread_count=self._thread_count,
            keep_last=self._keep_last,
            extra={_STEP: global_step},
            before_commit=partial(self._before_commit, global_step)
            if self._before_commit
            else None,
        )
        rank, _ = grid_of_process()
        content = self._described()
        for name, one in self._objects.items():
            content[_OBJECT + name] = pickle.dumps(one.state_dict())
        if loader_state is not None:
            content[_LOADER] = loader_state
        content[f"{_RANDOMNESS}{rank}"] = randomness.capture()
        try:
            with _quiet_alone():
                save_distributed(
                    content,
                    storage_writer=writer,
                    planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                    no_dist=not is_distributed(),
                )
        except CheckpointException as error:
            raise CheckpointError(
                f"{self._path}: save at step {global_step} failed: {_told(error)}"
            ) from error
        generation = from_first_rank(lambda: writer.generation)
        if rank == 0:
            _log.info("checkpoint committed", extra={"step": global_step, "generation": generation})
        return generation

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
        # Looked at on the first rank, one after the other, until one is whole.
        found = inspect_generations(open_store(self._path))
        skipped: list[SkippedGeneration] = []
        while (one := from_first_rank(lambda: next(found, None))) is not None:
            if isinstance(one, SkippedGeneration):
                skipped.append(one)
                continue
            try:
                self._load(one)
            except DamagedCheckpoint as error:
                skipped.append(SkippedGeneration(one.generation, str(error), is_committed=True))
                continue
            self._report(skipped)
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

    def _owner(self, name: str, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The model whose parameters the optimizer steps."""
        stepped = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for model in self._models.values():
            if stepped <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise ValueError(f"state[{name!r}] has parameters of no model in state: add the model")

    def _described(self) -> dict[str, Any]:
        """Models and optimizers by parameters' names, in the memory they live in: what DCP saves,
        and loads into.
        """
        content: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        for name, optimizer in self._optimizers.items():
            content[name] = get_optimizer_state_dict(self._model_of[name], optimizer)
        return content

    def _agreed_loader_state(self, global_step: int) -> bytes | None:
        """Rank 0's loader state, when all ranks are at the same place."""
        loader = self._loader

        def place() -> tuple[int, int, int]:
            if loader is None:
                return global_step, 0, 0
            return global_step, loader.position.epoch, loader.position.delivered

        places = gather(place)
        for rank, other in enumerate(places):
            if other != places[0]:
                raise RanksDisagree(
                    f"{self._path}: rank 0 saves at step {places[0][0]}, epoch {places[0][1]}, "
                    f"sample {places[0][2]}; rank {rank} at step {other[0]}, epoch {other[1]}, "
                    f"sample {other[2]}. Save on all ranks after the same step (a last batch with "
                    "fewer samples than ranks needs drop_last=True)"
                )
        return json.dumps(loader.state_dict()).encode() if loader is not None else None

    def _load(self, record: CommitRecord) -> None:
        rank, _ = grid_of_process()
        randomness_of = rank if rank < record.world_size else 0
        content = self._described()
        for name in self._objects:
            content[_OBJECT + name] = b""
        if self._loader is not None:
            content[_LOADER] = b""
        content[f"{_RANDOMNESS}{randomness_of}"] = b""
        reader = UCVolumeReader(self._path, generation=record.generation)
        try:
            with _quiet_alone():
                load_distributed(content, storage_reader=reader, no_dist=not is_distributed())
        except CheckpointException as error:
            for failure, _ in error.failures.values():
                if isinstance(failure, DamagedCheckpoint):
                    raise failure from error
            raise CheckpointError(
                f"{self._path}/{record.generation} cannot be loaded: {_told(error)}"
            ) from error
        if self._loader is not None:
            self._loader.load_state_dict(json.loads(content[_LOADER]))
        for name, model in self._models.items():
            set_model_state_dict(model, content[name])
        for name, optimizer in self._optimizers.items():
            set_optimizer_state_dict(self._model_of[name], optimizer, content[name])
        for name, one in self._objects.items():
            one.load_state_dict(pickle.loads(content[_OBJECT + name]))  # noqa: S301 - a checkpoint of the job itself
        captured = content[f"{_RANDOMNESS}{randomness_of}"]
        if randomness_of == rank:
            randomness.restore(captured)
        else:
            randomness.restore_derived(captured, rank)

    def _report(self, skipped: list[SkippedGeneration]) -> None:
        if grid_of_process()[0] == 0:
            for one in skipped:
                _log.warning(
                    "checkpoint is not whole",
                    extra={"path": self._path, "generation": one.generation, "reason": one.reason},
                )

    def _note_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        self._is_terminated = True


def _told(error: CheckpointException) -> str:
    """The first failed rank and its error, in one line."""
    rank = min(error.failures)
    failure, _ = error.failures[rank]
    return f"rank {rank}: {type(failure).__name__}: {failure}"


@contextlib.contextmanager
def _quiet_alone() -> Iterator[None]:
    """Without DCP's warning that there is one process only, which is fine."""
    if is_distributed():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        yield
