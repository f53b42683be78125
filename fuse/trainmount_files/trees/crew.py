"""Threads that carry out small tasks, of which some bring up more: a listing finds files.

Called by everything here that walks a tree. Memory is bounded: whoever brings up tasks faster than
they are done is made to do some itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic, process_time
from typing import Final

from trainmount_files.errors import Cancelled

__all__ = ["Crew", "Task"]

Task = Callable[[], None]
"""Handles the errors that it expects; any other ends the whole run."""

_BACKLOG_PER_THREAD: Final = 64
"""Small tasks that may wait, for each thread: enough that none ever idles behind a listing."""

_FEW_PER_THREAD: Final = 16
"""With fewer waiting, one thread brings up more."""

_LOOK_SECONDS: Final = 0.05
"""How often the caller's event is looked at; the reaction to it that a person sees."""

_FIRST_THREADS: Final = 2
_BUSY: Final = 0.65
"""Share of one core from which on another thread would only wait for the interpreter: measured with
files of 10 kB against a store without latency, where 8 threads are a fifth slower than 2.
"""

_LEAVE_SECONDS: Final = 1.5
"""How long the threads have to put things in order after a cancellation. One that the network holds
for longer is left behind, as a daemon.
"""


class Crew:
    """A run of tasks by a few threads. Used once.

    It begins with two, and takes on more, up to `parallelism`, while this process leaves its core
    idle: the slower the store answers, the more are worth it.
    """

    def __init__(
        self, operation: str, parallelism: int, cancel: threading.Event | None = None
    ) -> None:
        """`operation` is for the message of `Cancelled`."""
        if parallelism < 1:
            raise ValueError(f"parallelism must be at least 1, got {parallelism}")
        self.stop = threading.Event()
        """Set where the run is to end: what tasks pass on to what they call."""
        self._operation = operation
        self._parallelism = parallelism
        self._cancel = cancel
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        # All guarded by `_changed`. Small tasks go first, in order; large ones bring up small ones
        # and go last in, first out, so that few of them wait.
        self._small: deque[Task] = deque()
        self._large: list[Task] = []
        self._num_busy = 0
        self._num_large_busy = 0
        self._num_idle = 0
        self._failure: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether a thread is left, after `run` too: one that the network held for too long."""
        return any(thread.is_alive() for thread in self._threads)

    def add(self, task: Task) -> None:
        """Bring up a task that brings up no other. May carry out one that waits, in this thread."""
        with self._changed:
            self._small.append(task)
            if self._num_idle:
                self._changed.notify()
            if len(self._small) <= _BACKLOG_PER_THREAD * self._parallelism:
                return
            own = self._small.popleft()
        if not self.stop.is_set():
            own()

    def add_large(self, task: Task) -> None:
        """Bring up a task that will bring up others. Never blocks."""
        with self._changed:
            self._large.append(task)
            self._changed.notify()

    def run(self, first: Task) -> None:
        """Carry out `first` and all that comes of it; returns when nothing is left.

        Raises:
            Cancelled: the caller's event was set; no task is running any more.
            BaseException: what a task raised, or a KeyboardInterrupt of this thread. Likewise.
        """
        self._large.append(first)
        threads = self._threads
        try:
            self._take_on(_FIRST_THREADS)
            self._wait(threads)
        finally:
            self.stop.set()
            with self._changed:
                self._changed.notify_all()
            deadline = monotonic() + _LEAVE_SECONDS
            for thread in threads:
                if thread.ident is not None:
                    thread.join(max(0.0, deadline - monotonic()))
        if self._failure is not None:
            raise self._failure
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled(self._operation, "", "cancelled")

    def _take_on(self, num_threads: int) -> None:
        for _ in range(min(num_threads, self._parallelism - len(self._threads))):
            name = f"trainmount-tree-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _wait(self, threads: list[threading.Thread]) -> None:
        looked, used = monotonic(), process_time()
        # The list grows meanwhile, and the loop with it.
        for thread in threads:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
                now, use = monotonic(), process_time()
                if now - looked >= _LOOK_SECONDS:
                    if use - used < _BUSY * (now - looked):
                        self._take_on(len(threads))
                    looked, used = now, use
                if self._cancel is not None and self._cancel.is_set():
                    return
                if self._failure is not None:
                    return

    def _work(self) -> None:
        while True:
            with self._changed:
                found = self._next()
            if found is None:
                return
            task, is_large = found
            try:
                task()
            except BaseException as error:
                self._end(error)
                return
            with self._changed:
                self._num_busy -= 1
                self._num_large_busy -= is_large
                if not self._num_busy and not self._small and not self._large:
                    self._changed.notify_all()

    def _next(self) -> tuple[Task, bool] | None:
        """What to do now, and whether it is large; waits. The lock is held."""
        while not self.stop.is_set():
            is_large = bool(self._large) and self._is_time_for_large()
            if is_large or self._small:
                self._num_busy += 1
                self._num_large_busy += is_large
                return (self._large.pop() if is_large else self._small.popleft()), is_large
            if not self._num_busy:
                return None
            self._num_idle += 1
            self._changed.wait()
            self._num_idle -= 1
        return None

    def _is_time_for_large(self) -> bool:
        # One thread looks ahead before the others run dry: a listing takes a round trip.
        few = _FEW_PER_THREAD * self._parallelism
        return not self._small or (len(self._small) < few and not self._num_large_busy)

    def _end(self, error: BaseException) -> None:
        with self._changed:
            # In this order: what the others raise because of `stop` is not the cause.
            if self._failure is None:
                self._failure = error
            self.stop.set()
            self._num_busy -= 1
            self._changed.notify_all()
