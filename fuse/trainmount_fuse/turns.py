"""Which of pyfuse3's tasks reads the kernel's next request, how it waits for it, and how the tasks
end. Called by `adapter`.

pyfuse3 has a few tasks that read requests in turn, under a lock: the one that has read a request
lets the next one wait for another while it works on its own. With trio's lock each request
therefore wakes two tasks. Most requests are answered without waiting for anything, though, so here
the task that has read one keeps the turn until it first has to wait: it mostly comes back for the
next request itself.

A program that opens, reads and closes one file after the other asks again within some 30 us. A
processor that has gone to sleep meanwhile takes longer than that to wake up. So who has answered a
request looks out for the next one for a moment, as long as that keeps being worth it.

A request that is answered half is lost to its program. So no task is cancelled: once they have to
end, each ends where it would read the next request.
"""

from __future__ import annotations

import os
import select
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import trio
from trio.abc import Instrument
from trio.lowlevel import Abort, RaiseCancelT, Task

__all__ = ["Library", "Turn"]

_LOOK_OUT_NS: Final = 100_000
_MAX_IN_VAIN: Final = 8
"""Looks in a row that saw nothing, after which nobody looks out until a request comes as soon."""

_MAX_IN_A_ROW: Final = 16
"""Requests that are read before the other tasks of the event loop have their turn."""


class Turn(Instrument):
    """The lock of pyfuse3's readers. It is handed on when a task that has let it go waits or ends:
    not at once.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: OrderedDict[Task, None] = OrderedDict()

    async def __aenter__(self) -> None:
        # No checkpoint: the holder waits for the kernel next.
        if not self._is_taken:
            self._is_taken = True
            return
        task = trio.lowlevel.current_task()
        self._waiting[task] = None

        def abort(_raise_cancel: RaiseCancelT) -> Abort:
            del self._waiting[task]
            return Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    async def __aexit__(self, *_error: object) -> None:
        self._is_taken = False

    def after_task_step(self, _task: Task) -> None:
        """Called by trio whenever a task waits or has ended."""
        if self._waiting and not self._is_taken:
            task, _ = self._waiting.popitem(last=False)
            self._is_taken = True
            trio.lowlevel.reschedule(task)


class _LowLevel:
    """`trio.lowlevel`, with another way to wait for the kernel's descriptor."""

    def __init__(self) -> None:
        self._fd = -1
        self._poll: select.poll | None = None
        self._is_ending = False
        self._num_in_a_row = 0
        self._num_in_vain = 0
        self._is_shared = len(os.sched_getaffinity(0)) == 1

    async def wait_readable(self, fd: int) -> None:
        """Until there is a request. A checkpoint only where none is there.

        Raises trio.ClosedResourceError, at which pyfuse3's task ends, after `end`.
        """
        if self._is_ending:
            raise trio.ClosedResourceError
        if self._poll is None:
            # It knows the number only: another file may be put there.
            self._fd = fd
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        began = time.perf_counter_ns()
        if self._num_in_a_row < _MAX_IN_A_ROW and self._sees_one(self._poll, began):
            self._num_in_a_row += 1
            return
        self._num_in_a_row = 0
        await trio.lowlevel.wait_readable(fd)
        # Waking up took most of it.
        if time.perf_counter_ns() - began < 2 * _LOOK_OUT_NS:
            self._num_in_vain = 0

    def begin(self) -> None:
        """Requests are read from now on."""
        self._is_ending = False

    def end(self) -> None:
        """No further request is read."""
        self._is_ending = True
        trio.lowlevel.notify_closing(self._fd)

    def _sees_one(self, poll: select.poll, began: int) -> bool:
        is_patient = self._num_in_vain < _MAX_IN_VAIN and not self._is_shared
        while not poll.poll(0):
            if not is_patient:
                return False
            if time.perf_counter_ns() - began > _LOOK_OUT_NS:
                self._num_in_vain += 1
                return False
        self._num_in_vain = 0
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)


class _Readers:
    """pyfuse3's nursery: its tasks are not cancelled, they end before the next request."""

    def __init__(self, nursery: trio.Nursery, lowlevel: _LowLevel) -> None:
        self._nursery = nursery
        self._lowlevel = lowlevel
        self._num_running = 0

    def start_soon(
        self, function: Callable[..., Awaitable[None]], *args: object, name: object = None
    ) -> None:
        """As a nursery's own."""
        self._num_running += 1
        self._nursery.start_soon(self._run, function, args, name=name)

    async def _run(
        self, function: Callable[..., Awaitable[None]], args: tuple[object, ...]
    ) -> None:
        # One for all requests of the task: one for each would cost a tenth of a request.
        with trio.CancelScope(shield=True):
            await function(*args)
        self._num_running -= 1
        if not self._num_running:
            self._nursery.cancel_scope.cancel()

    async def end_when_cancelled(self) -> None:
        """Runs beside the tasks. Whoever cancels them, or an error of one, comes to this one."""
        try:
            await trio.sleep_forever()
        finally:
            self._lowlevel.end()


class Library:
    """trio as pyfuse3 sees it. pyfuse3 takes all that it needs of it from one name, under which
    another library may stand.
    """

    def __init__(self, turn: Turn) -> None:
        self.lowlevel = _LowLevel()
        self._turn = turn

    def Lock(self) -> Turn:  # noqa: N802 - what pyfuse3 asks for, once in a process
        return self._turn

    @asynccontextmanager
    async def open_nursery(self) -> AsyncIterator[_Readers]:
        """Where pyfuse3's tasks run. Cancel it to end them; what they have begun is answered."""
        self.lowlevel.begin()
        async with trio.open_nursery() as nursery:
            readers = _Readers(nursery, self.lowlevel)
            nursery.start_soon(readers.end_when_cancelled)
            yield readers

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)
