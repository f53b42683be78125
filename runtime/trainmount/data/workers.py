"""How loader workers live and end. Called by `loader`."""

from __future__ import annotations

import multiprocessing
import os
import select
import sys
import threading
from collections.abc import Callable

__all__ = ["OwnGroup"]


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
