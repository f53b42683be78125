"""Where blocking calls run, and the lock of the whole tree. Used by every module with async
methods.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, TypeVarTuple

import trio

__all__ = ["TreeLock", "Workers"]

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class Workers:
    """Threads for calls that wait for the store or the disk."""

    def __init__(self, num_threads: int) -> None:
        self._limiter = trio.CapacityLimiter(num_threads)

    async def call(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        """Run the function in a thread. Cancelling waits for it: what was begun gets finished."""
        return await trio.to_thread.run_sync(function, *args, limiter=self._limiter)


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
