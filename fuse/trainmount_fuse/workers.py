"""Where blocking calls run, and the lock of the whole tree. Used by every module with async
methods.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar, TypeVarTuple

import outcome
import trio

__all__ = ["TreeLock", "Workers"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

_IDLE_SECONDS: Final = 10.0
"""After that a thread without work ends."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Callable[[], Any]
    task: trio.lowlevel.Task
    token: trio.lowlevel.TrioToken


class Workers:
    """Threads for calls that wait for the store or the disk.

    They are our own because trio's `to_thread` takes twice the processor time of a call (61 us
    against 32): it copies the context, counts in a limiter and names the thread anew each time.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by the lock: threads there are, and those among them that a call may count on.
        self._num_running = 0
        self._num_free = 0

    async def call(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Run the function in a thread. Cancelling waits for it: what was begun gets finished."""
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        token = trio.lowlevel.current_trio_token()
        self._calls.put(_Call(lambda: function(*args), task, token))
        with self._lock:
            self._num_free -= 1
            is_short = self._num_free < 0 and self._num_running < self._num_threads
            if is_short:
                self._num_running += 1
                self._num_free += 1
        if is_short:
            threading.Thread(target=self._serve, name="worker", daemon=True).start()
        result: _T = await trio.lowlevel.wait_task_rescheduled(_refuse)
        return result

    def _serve(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._num_free <= 0:
                        # A call is on its way that counts on this thread.
                        continue
                    self._num_running -= 1
                    self._num_free -= 1
                return
            result = outcome.capture(call.function)
            with self._lock:
                self._num_free += 1
            with suppress(trio.RunFinishedError):
                call.token.run_sync_soon(trio.lowlevel.reschedule, call.task, result)
            del call, result


def _refuse(_raise_cancel: object) -> trio.lowlevel.Abort:
    return trio.lowlevel.Abort.FAILED


class TreeLock:
    """Many may change single names and files at once, or one may move a whole directory.

    A waiting mover goes before new sharers, so that uploads cannot keep it waiting for ever.
    Whoever holds a share must not ask for another.
    """

    def __init__(self) -> None:
        self._condition = trio.Condition()
        self._num_sharers = 0
        self._is_held = False
        self._num_waiting = 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Names on the way to any file stay as they are inside."""
        async with self._condition:
            while self._is_held or self._num_waiting:
                await self._condition.wait()
            self._num_sharers += 1
        try:
            yield
        finally:
            self._num_sharers -= 1
            await self._wake()

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nobody uploads or changes a name inside."""
        async with self._condition:
            self._num_waiting += 1
            try:
                while self._is_held or self._num_sharers:
                    await self._condition.wait()
                self._is_held = True
            finally:
                self._num_waiting -= 1
        try:
            yield
        finally:
            self._is_held = False
            await self._wake()

    async def _wake(self) -> None:
        # A cancelled task must not leave the others asleep.
        with trio.CancelScope(shield=True):
            async with self._condition:
                self._condition.notify_all()
