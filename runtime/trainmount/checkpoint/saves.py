"""One save of a checkpoint, waited for or in the background, and what it cost. Called by
`checkpointer`.
"""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_and_wait

from trainmount.checkpoint.writer import UCVolumeWriter
from trainmount.distributed import Group, is_distributed
from trainmount.errors import CheckpointError

__all__ = ["Save", "SaveMetrics", "expect_one_process", "told"]

# torch's is no Exception.
_FAILURES: Final = (Exception, CheckpointException)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMetrics:
    """What one save cost; the same on all ranks, but for `blocked_seconds`."""

    step: int
    """The global step after which it was saved."""

    generation: str
    """Name of its directory."""

    num_bytes: int
    """Of all files of all ranks."""

    seconds: float
    """From taking the values to the commit, on the first rank."""

    blocked_seconds: float
    """How long training stood still on this rank: all of it, or with an asynchronous save for the
    copy of the values, and for the save before it.
    """

    number: int
    """How many checkpoints this `Checkpointer` has committed, this one included."""


class Save:
    """A save that was begun. Its values are those of the moment in which it was."""

    def __init__(
        self,
        step: int,
        content: dict[str, Any],
        writer: UCVolumeWriter,
        group: Group,
        *,
        is_asynchronous: bool,
    ) -> None:
        """Returns when the save has ended, or with `is_asynchronous` when the values are copied.
        What goes wrong after that is told by `result`.
        """
        self.step = step
        self._writer = writer
        self._began = self._ended = time.monotonic()
        self._future: Future[Any] = Future()
        expect_one_process()
        options: dict[str, Any] = {
            "storage_writer": writer,
            "planner": DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            "process_group": group,
            "no_dist": not is_distributed(),
        }
        if is_asynchronous:
            future = async_save(content, **options)
            assert isinstance(future, Future), "what torch returns with its own stager"
            self._future = future
            future.add_done_callback(self._note_end)
            return
        try:
            save_and_wait(content, **options)
        except _FAILURES as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(None)
        self._note_end(self._future)

    @property
    def is_running(self) -> bool:
        return not self._future.done()

    def result(self, path: str) -> tuple[str, int, float]:
        """Wait for the end. The generation, the bytes of all ranks' files, and the seconds that it
        took; the first rank knows.

        Raises:
            CheckpointError: naming `path`, any thread of any rank failed; nothing was committed.
        """
        try:
            self._future.result()
        except _FAILURES as error:
            raise CheckpointError(
                f"{path}: save at step {self.step} failed: {told(error)}"
            ) from error
        record = self._writer.record
        if record is None:  # not the first rank
            return "", 0, 0.0
        num_bytes = sum(file.size_bytes for file in record.files)
        return record.generation, num_bytes, self._ended - self._began

    def _note_end(self, _future: Future[Any]) -> None:
        self._ended = time.monotonic()


def told(error: BaseException) -> str:
    """An error in one line; of one that torch gathered from the ranks, the first failed rank's."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank = min(error.failures)
    failure, _ = error.failures[rank]
    return f"rank {rank}: {type(failure).__name__}: {failure}"


def expect_one_process() -> None:
    """Without DCP's warning that there is one process only, which is fine.

    For good: it comes from a thread too, and what is ignored there for a while is ignored, or not,
    in all others.
    """
    if not is_distributed():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
