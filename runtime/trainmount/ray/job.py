"""One block of code around a pipeline that is to be resumed. Called by users."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from trainmount.ray.checks import PipelineRefused, check_input, check_plan, check_sink
from trainmount.ray.filesystem import CheckpointHandler, build_checkpoint_filesystem
from trainmount.ray.internals import CheckpointConfig, DataContext, ExecutionCallback, ops
from trainmount.ray.leftovers import sweep
from trainmount.ray.recovery import ExactCheckpointManager
from trainmount.ray.storage import StorageOptions

__all__ = ["checkpointing"]

_log = logging.getLogger(__name__)


@contextmanager
def checkpointing(
    checkpoint_path: str,
    *,
    id_column: str,
    storage_options: StorageOptions | None = None,
    delete_checkpoint_on_success: bool = True,
    allow_repeated_ids: bool = False,
    context: DataContext | None = None,
) -> Iterator[CheckpointConfig]:
    """Inside the block, pipelines of read, row-by-row transforms and write skip rows that an
    earlier attempt with the same `checkpoint_path` has written, and write each other row once.

    Read and write inside. `checkpoint_path` and `storage_options` are as in
    `build_checkpoint_filesystem`; take a fresh path for each job. `id_column` names a column of the
    input whose values are unique and stay with their rows. With `allow_repeated_ids` several output
    rows may have one id, provided that all of them come out of one call of a transform and are
    written by one task, which is for you to know. The settings are those of `context`, by default
    the current DataContext, and are as before at the end of the block.

    Raises:
        PipelineRefused: by a run in the block, before its work: it would lose or repeat rows.
        CheckpointError: by a run in the block: another has taken over, or ids repeat.
        ValueError: see `build_checkpoint_filesystem`.
    """
    context = context or DataContext.get_current()
    filesystem = build_checkpoint_filesystem(checkpoint_path, storage_options)
    filesystem.handler.unique_ids = not allow_repeated_ids
    before = context.checkpoint_config, context.custom_execution_callback_classes
    context.checkpoint_config = CheckpointConfig(
        id_column=id_column,
        checkpoint_path=checkpoint_path,
        delete_checkpoint_on_success=delete_checkpoint_on_success,
        override_filesystem=filesystem,
        checkpoint_manager_cls=ExactCheckpointManager,
    )
    context.custom_execution_callback_classes = [*before[1], _JobCallback]
    _JobCallback.written.discard(filesystem.handler.directory)
    try:
        yield context.checkpoint_config
    finally:
        context.checkpoint_config, context.custom_execution_callback_classes = before
    if filesystem.handler.directory not in _JobCallback.written:
        # A dataset has the settings of when it was made.
        _log.warning(
            "No dataset that was read inside the block was written, so none had a checkpoint",
            extra={"checkpoint_path": checkpoint_path},
        )


class _JobCallback(ExecutionCallback):  # type: ignore[misc, unused-ignore]
    """Checks a run before it starts, and sweeps once more after it has succeeded. Ray makes one for
    each run.
    """

    written: ClassVar[set[str]] = set()
    """Directories of the checkpoints of runs in this process that write."""

    def before_execution_starts(self, executor: Any) -> None:
        config = executor._data_context.checkpoint_config
        handler = _handler(config)
        if handler is None:
            return
        operators = _logical_operators(executor)
        write = next((op for op in operators if isinstance(op, ops.Write)), None)
        if write is None:
            if any(isinstance(op, ops.Read | ops.ReadFiles) for op in operators):
                raise PipelineRefused(
                    "this run writes nothing, so that nothing of it would be kept, and rows that "
                    "are written already may be missing: end it with write_parquet() or another "
                    "write, or let it run outside of `with checkpointing(...)`"
                )
            return
        self.written.add(handler.directory)
        check_plan(write, config.id_column)
        check_sink(write.datasink_or_legacy_datasource, handler)
        check_input(write, config.id_column, handler)

    def after_execution_succeeds(self, executor: Any) -> None:
        handler = _handler(executor._data_context.checkpoint_config)
        for op in _logical_operators(executor):
            if handler is not None and isinstance(op, ops.Write):
                sink = op.datasink_or_legacy_datasource
                sweep(handler, sink.path, sink.filesystem)


def _handler(config: Any) -> CheckpointHandler | None:
    handler = getattr(getattr(config, "filesystem", None), "handler", None)
    return handler if isinstance(handler, CheckpointHandler) else None


def _logical_operators(executor: Any) -> list[Any]:
    return [op for physical in executor._topology for op in physical._logical_operators]
