"""How loader workers live and end, and what they tell their rank of errors. Called by `loader`."""

from __future__ import annotations

import multiprocessing
import multiprocessing.queues
import os
import pickle
import select
import sys
import threading
import traceback
from collections.abc import Callable

from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

__all__ = ["OwnGroup", "break_cycle", "crossing_errors"]


class OwnGroup:
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
        _end_with_lost_batch()
        if self._worker_init_fn is not None:
            self._worker_init_fn(worker_id)


class crossing_errors:  # noqa: N801 - used as a function; a generator would hide StopIteration
    """Errors of its block leave a loader worker as such that its rank gets.

    torch takes a StopIteration for the end of the data, and loses an error whose class cannot be
    pickled, a local one say; the rest of the epoch would be missing without a word.
    """

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, Exception) or get_worker_info() is None:
            return
        if isinstance(error, StopIteration) or not _is_known_by_name(type(error)):
            raise RuntimeError(f"{type(error).__qualname__}: {error}") from error


def break_cycle(error: BaseException) -> None:
    """Let go of what a worker's error holds in the rank besides its traceback.

    torch raises it in a frame that has it as a variable. In such a cycle the loader would be freed
    by the garbage collector, which closes the queues to the workers before torch can tell them to
    end; torch then waits five seconds for each.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None and trace.tb_frame.f_code is ExceptionWrapper.reraise.__code__:
        trace.tb_frame.clear()


def _is_known_by_name(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def _end_with_lost_batch() -> None:
    """Let this process, a loader worker, end where it cannot hand a batch over, after it has told
    why: the rank would wait for the batch for ever.
    """

    def end(error: Exception, _batch: object) -> None:
        traceback.print_exception(error)
        os._exit(1)

    # Where a queue goes with what it cannot pickle; in the library it only prints.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(end)  # type: ignore[attr-defined]


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
