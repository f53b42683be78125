"""obstore's blocking functions for requests that are short, each in a thread that its caller need
not wait for. Called by `library.py`.

A coroutine of obstore passes through four threads, and a request for some bytes twice: three times
the processor time of the blocking function (0.6 ms against 0.2). That one cannot be cancelled, so a
caller who gives up leaves it to its thread, and what it still brings is thrown away.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

from trainmount_files.errors import Cancelled
from trainmount_files.retry import Cancellation
from trainmount_files.waiting import may_wait

__all__ = ["BlockingCalls"]

T = TypeVar("T")

_LOOK_SECONDS: Final = 0.05
"""How often a waiting caller looks at its cancel event."""

_IDLE_SECONDS: Final = 10.0
"""After that a thread without work ends."""


class _Call:
    """One function that runs, and who waits for it."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.ended = threading.Lock()
        self.ended.acquire()
        self.result: Any = None
        self.error: BaseException | None = None
        self.was_closed = False


class BlockingCalls:
    """The threads of one volume and process. Any thread may call."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._is_open = True
        self._running: set[_Call] = set()
        self._threads: set[threading.Thread] = set()
        self._num_free = 0

    def run(
        self,
        operation: str,
        path: str,
        function: Callable[[], T],
        cancel: Cancellation | None,
    ) -> T:
        """What the function returns or raises.

        Raises:
            Cancelled: `cancel` is set, or `close` was called; the function goes on to its end.
        """
        if cancel is None and may_wait():
            return function()
        call = _Call(function)
        with self._lock:
            if not self._is_open:
                raise Cancelled(operation, path, "the volume was closed")
            self._running.add(call)
            self._num_free -= 1
            if self._num_free < 0:
                self._num_free += 1
                self._start()
        self._calls.put(call)
        if cancel is None:
            call.ended.acquire()
        else:
            while not call.ended.acquire(timeout=_LOOK_SECONDS):
                if cancel.is_set():
                    raise Cancelled(operation, path, "cancelled")
        if call.was_closed:
            raise Cancelled(operation, path, "the volume was closed")
        if call.error is not None:
            try:
                raise call.error
            finally:
                # The error's traceback has this frame, which has the call.
                del call
        result: T = call.result
        return result

    def close(self) -> None:
        """Give up what runs; safe to repeat. Threads end with what they are doing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            for call in self._running:
                call.was_closed = True
                call.ended.release()
            self._running.clear()
            for _thread in self._threads:
                self._calls.put(None)

    def join(self, seconds: float) -> None:
        """After `close`: wait until the threads have ended, that long at most."""
        deadline = time.monotonic() + seconds
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._serve, name="trainmount-bucket-call", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        try:
            while (call := self._next()) is not None:
                self._run(call)
                # Neither result nor error may live on while the thread waits.
                del call
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self) -> _Call | None:
        while True:
            try:
                return self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    if self._num_free > 0:
                        self._num_free -= 1
                        return None
                    # A call is on its way that counts on this thread.

    def _run(self, call: _Call) -> None:
        result, failure = None, None
        try:
            result = call.function()
        except BaseException as error:
            failure = error
        with self._lock:
            self._num_free += 1
            if call in self._running:
                self._running.discard(call)
                call.result, call.error = result, failure
                call.ended.release()
