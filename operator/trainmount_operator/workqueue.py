"""A queue of jobs to look at: each at most once at a time, at the latest when it asked to be looked
at again.

Filled by `handlers` from watch events and by the reconciles themselves. It lives in the operator's
event loop; the work happens in a bounded pool of threads, because the requests block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Final

from trainmount_operator.cluster import ClusterError, Unavailable

__all__ = ["Key", "Workqueue"]

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name of a TrainingJob."""

_THREADS: Final = 8
_FIRST_DELAY_SECONDS: Final = 1.0
_LONGEST_DELAY_SECONDS: Final = 60.0


class Workqueue:
    """Runs `reconcile(namespace, name)` for keys that are due.

    All methods belong to the event loop's thread. Between taking a key out of `_due` and marking it
    in `_active` there is no `await`: that is what keeps two reconciles of one job apart.
    """

    def __init__(self, reconcile: Callable[[str, str], datetime | None]) -> None:
        self._reconcile = reconcile
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="reconcile")
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._active: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.last_success: float | None = None
        """Loop time of the last reconcile that did not fail."""

    def add(self, key: Key, delay_seconds: float = 0.0) -> None:
        """Look at a job after a delay, or earlier if something else asks for it."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        due = loop.time() + max(0.0, delay_seconds)
        timer = self._timers.get(key)
        if timer is not None:
            if timer.when() <= due:
                return
            timer.cancel()
        self._timers[key] = loop.call_at(due, self._start, key)

    async def close(self) -> None:
        """Start nothing more and wait for what runs."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._pool.shutdown()

    def statistics(self) -> dict[str, int]:
        """A snapshot for logs and probes."""
        return {"waiting": len(self._timers), "active": len(self._active)}

    def _start(self, key: Key) -> None:
        self._timers.pop(key, None)
        if key in self._active:
            # What it has read may be older than the change that brought us here.
            self._again.add(key)
            return
        self._active.add(key)
        task = asyncio.get_running_loop().create_task(self._run(key))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: Key) -> None:
        loop = asyncio.get_running_loop()
        delay: float | None
        try:
            wake_time = await loop.run_in_executor(self._pool, self._reconcile, *key)
        except Exception as error:  # noqa: BLE001, RUF100 - one bad job must not hold up the others
            delay = self._failed(key, error)
        else:
            self._failures.pop(key, None)
            self.last_success = loop.time()
            delay = None
            if wake_time is not None:
                delay = (wake_time - datetime.now(UTC)).total_seconds()
        self._active.discard(key)
        if key in self._again:
            self._again.discard(key)
            delay = 0.0
        if delay is not None:
            self.add(key, delay)

    def _failed(self, key: Key, error: Exception) -> float:
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        delay = min(_FIRST_DELAY_SECONDS * 2.0 ** min(failures, 10), _LONGEST_DELAY_SECONDS)
        fields = {"namespace": key[0], "job": key[1], "delay_seconds": delay}
        if isinstance(error, Unavailable):
            logger.warning("API server unavailable", extra=fields | {"answer": error.message})
        elif isinstance(error, ClusterError):
            logger.error("API server refused", extra=fields | {"answer": error.message})
        else:
            logger.error("Reconcile failed", extra=fields, exc_info=error)
        return delay
