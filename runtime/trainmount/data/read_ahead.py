"""The next files of a process, loaded by a few threads while it uses one. Called by `dataset`.

The process says in which order it is going to want files (`expect`) and takes them (`take`). What
was loaded and not taken is bounded in bytes; one file is loaded ahead whatever its size.

A thread that hands a file over costs 50 us and more, several times what reading one costs that the
page cache has; and where only a path is wanted, reading the file before its consumer does opens it
twice, which a mount feels. So where files come fast, each is loaded by who takes it, now and then
one is read to see how long that takes, and the threads begin when it took long.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from trainmount_files.transfer.workers import Workers

__all__ = ["ReadAhead"]

T = TypeVar("T")

# With several loader workers on each of several ranks this is already hundreds of requests.
_THREADS: Final = 4

# A request to an object store; a daemon that is merely busy gains nothing from more requests.
_SLOW_SECONDS: Final = 0.01
_FAST_SECONDS: Final = 0.0003
_PROBE_EVERY: Final = 16
# Reading one ahead costs as much as its consumer's reading: where several in a row came fast, it is
# done less often.
_PROBE_SELDOM: Final = 128
_NUM_SURE: Final = 8
# So many in a row that came fast, and the threads are let go.
_NUM_FAST: Final = 64


class ReadAhead(Generic[T]):
    """Of one process, and for one thread of it."""

    def __init__(
        self,
        load: Callable[[int, bool], T],
        size_of: Callable[[int], int],
        discard: Callable[[T], object],
        *,
        limit_bytes: int,
        is_always_slow: bool,
    ) -> None:
        """`load` gets a file by its number, in any thread, and whether its bytes shall be read even
        where the caller only wants a path; `discard` takes what was loaded in vain.
        """
        self._load = load
        self._size_of = size_of
        self._discard = discard
        self._limit_bytes = limit_bytes
        self._is_always_slow = is_always_slow
        self._is_slow = is_always_slow
        self._num_fast = 0
        self._num_alone = 0
        self._expected: deque[int] = deque()
        self._coming: dict[int, Future[tuple[T, float]]] = {}
        self._coming_bytes = 0
        self._workers: Workers | None = None
        self._process = os.getpid()

    @property
    def is_of_this_process(self) -> bool:
        """False in a forked child, which has none of the threads."""
        return self._process == os.getpid()

    def expect(self, numbers: Iterable[int]) -> None:
        """These are wanted next, after those that were expected before."""
        self._expected.extend(numbers)
        self._fill()

    def take(self, number: int) -> T:
        """The file, loaded ahead or now. Raises what its loading raised."""
        future = self._coming.pop(number, None) if self._coming else None
        if future is None:
            if self._expected and self._expected[0] == number:
                self._expected.popleft()
            elif self._expected or self._coming:
                # It goes another way than was expected.
                self.forget()
            loaded = self._load_now(number)
            if self._is_slow:
                self._fill()
            return loaded
        self._coming_bytes -= self._size_of(number)
        self._fill()
        loaded, seconds = future.result()
        self._notice(seconds)
        return loaded

    def forget(self) -> None:
        """Nothing of what was expected is going to be taken."""
        self._expected.clear()
        for future in self._coming.values():
            if not future.cancel():
                future.add_done_callback(self._drop)
        self._coming.clear()
        self._coming_bytes = 0

    def _fill(self) -> None:
        while self._is_slow and self._expected:
            number = self._expected[0]
            size_bytes = self._size_of(number)
            if self._coming and self._coming_bytes + size_bytes > self._limit_bytes:
                return
            self._expected.popleft()
            if number in self._coming:
                continue
            self._coming[number] = self._threads().submit(lambda number=number: self._timed(number))  # type: ignore[misc]
            self._coming_bytes += size_bytes

    def _load_now(self, number: int) -> T:
        self._num_alone += 1
        every = _PROBE_EVERY if self._num_fast < _NUM_SURE else _PROBE_SELDOM
        if self._num_alone % every != 1:
            return self._load(number, False)
        loaded, seconds = self._timed(number)
        self._notice(seconds)
        return loaded

    def _timed(self, number: int) -> tuple[T, float]:
        began = time.perf_counter()
        loaded = self._load(number, True)
        return loaded, time.perf_counter() - began

    def _notice(self, seconds: float) -> None:
        if self._is_always_slow:
            return
        self._num_fast = self._num_fast + 1 if seconds < _FAST_SECONDS else 0
        if seconds > _SLOW_SECONDS:
            self._is_slow = self._limit_bytes > 0
        elif self._num_fast >= _NUM_FAST:
            self._is_slow = False

    def _drop(self, future: Future[tuple[T, float]]) -> None:
        if future.exception() is None:
            self._discard(future.result()[0])

    def _threads(self) -> Workers:
        from trainmount_files.transfer.workers import Workers

        if self._workers is None:
            self._workers = Workers(_THREADS, "trainmount-read-ahead")
        return self._workers
