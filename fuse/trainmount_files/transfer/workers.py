"""A few threads for the requests of one transfer. Used by the other modules of this package.

Threads are daemons: an interpreter that exits does not wait for a store that is silent. They belong
to one transfer and end with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar

from trainmount_files.errors import Cancelled

__all__ = ["Workers", "raise_first"]

T = TypeVar("T")

_END: Final = None

_Task = tuple[Future[Any], Callable[[], Any]]


class Workers:
    """At most `limit` threads, made as there is work. Used by one thread at a time."""

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._pending: list[Future[Any]] = []

    def __del__(self) -> None:
        # Threads hold the queue, not us: who is forgotten in the middle leaves none behind.
        self.close(wait_seconds=0)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` in one of the threads."""
        future: Future[T] = Future()
        self._pending = [each for each in self._pending if not each.done()]
        self._pending.append(future)
        self._tasks.put((future, function))
        if len(self._threads) < min(self._limit, len(self._pending)):
            thread = threading.Thread(
                target=_work, args=(self._tasks,), name=self._name, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return future

    def close(self, wait_seconds: float) -> bool:
        """Begin nothing more; whether the threads have ended within that time."""
        for future in self._pending:
            future.cancel()
        for _ in self._threads:
            self._tasks.put(_END)
        deadline = monotonic() + wait_seconds
        for thread in self._threads:
            if thread is threading.current_thread():
                continue
            # An interrupt may have come while it was started: it finds nothing to do then.
            with suppress(RuntimeError):
                thread.join(max(0.0, deadline - monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not _END:
        future, function = task
        if not future.set_running_or_notify_cancel():
            continue
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        # Results may be large, and the next task may be long in coming.
        del task, future, function


def raise_first(futures: Sequence[Future[None]]) -> None:
    """Raise the cause where any of those that have ended failed, not what gave up because of it."""
    failures = [
        error
        for future in futures
        if future.done() and not future.cancelled() and (error := future.exception()) is not None
    ]
    failures.sort(key=lambda error: isinstance(error, Cancelled))
    if failures:
        raise failures[0]
