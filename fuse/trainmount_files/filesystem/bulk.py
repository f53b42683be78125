"""Many files at once: in threads, with what failed named at the end; and where each one goes.

Called by the verbs of `volumes.py` that take several paths.
"""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from fsspec.implementations.local import trailing_sep
from fsspec.utils import other_paths

from trainmount_files.filesystem.os_errors import is_about_one_file
from trainmount_files.transfer.workers import Workers

__all__ = ["LockedCallback", "destinations", "for_each", "raise_failures", "try_each"]

T = TypeVar("T")
R = TypeVar("R")

_NAMED: Final = 100
"""Failures that a message names; the rest is counted, and all are in the cause."""

_END_SECONDS: Final = 30.0
"""Threads that were told to stop do; this only bounds the wait for them."""


def try_each(
    items: Sequence[T], work: Callable[[T, threading.Event], R], *, parallelism: int
) -> list[R | Exception]:
    """Do `work` for each item, several at once; the result or the exception of each, in order.

    The event is set when everything shall end: by an interrupt, or by the first failure that is
    not about one file alone.

    Raises:
        Exception: such a failure.
    """
    outcomes: list[Any] = [None] * len(items)
    numbers = itertools.count()
    stop = threading.Event()
    grave: list[Exception] = []

    def work_on() -> None:
        # `next` of a count is one step, whichever thread takes it.
        while not stop.is_set() and (number := next(numbers)) < len(items):
            try:
                outcomes[number] = work(items[number], stop)
            except Exception as error:
                outcomes[number] = error
                if not is_about_one_file(error):
                    # The first of them only: the others may be its consequence.
                    grave.append(error)
                    stop.set()

    num_threads = min(parallelism, len(items))
    if num_threads <= 1:
        work_on()
    else:
        workers = Workers(num_threads, "volumes-bulk")
        try:
            for future in [workers.submit(work_on) for _ in range(num_threads)]:
                future.result()
        finally:
            stop.set()
            workers.close(_END_SECONDS)
    if grave:
        raise grave[0]
    return outcomes


def for_each(
    items: Sequence[T],
    work: Callable[[T, threading.Event], R],
    *,
    parallelism: int,
    action: str,
) -> list[R]:
    """The results of `work`; every item is tried.

    Raises:
        OSError: see `raise_failures`.
    """
    outcomes = try_each(items, work, parallelism=parallelism)
    raise_failures(outcomes, action)
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def raise_failures(outcomes: Sequence[object], action: str) -> None:
    """Raise what failed, if anything did: one failure as it is, several as one that names them."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if not failures:
        return
    if len(failures) == 1:
        raise failures[0]
    numbers = {error.errno if isinstance(error, OSError) else None for error in failures}
    number = numbers.pop() if len(numbers) == 1 else None
    named = "; ".join(_reason(error) for error in failures[:_NAMED])
    more = f"; and {len(failures) - _NAMED} more" if len(failures) > _NAMED else ""
    summary = f"{len(failures)} of {len(outcomes)} could not be {action}: {named}{more}"
    raise OSError(number or errno.EIO, summary) from ExceptionGroup(summary, failures)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def destinations(
    source: str | Sequence[str], found: list[str], target: str, *, is_pattern: bool, into: bool
) -> list[str]:
    """Where each of the paths `found` for `source` goes, as fsspec's documents on copying say.

    `is_pattern` tells whether `source` was expanded by matching (a name with `*` in it that is
    there was not), `into` whether `target` is a directory or written like one.
    """
    is_one = isinstance(source, str)
    as_child = is_one and (len(found) == 1 if is_pattern else into and not trailing_sep(source))
    places: list[str] = other_paths(found, target, exists=as_child, flatten=not is_one)
    return places


class LockedCallback:
    """One of fsspec's callbacks, told of by several threads; its own count is not safe for that."""

    def __init__(self, callback: Any, lock: threading.Lock) -> None:
        self._callback = callback
        self._lock = lock

    @contextmanager
    def branch(self, path1: str, path2: str) -> Iterator[LockedCallback]:
        """The callback of one file's copy."""
        with self._lock:
            child = self._callback.branched(path1, path2)
        try:
            yield LockedCallback(child, self._lock)
        finally:
            with self._lock:
                child.close()

    def set_size(self, size: int) -> None:
        with self._lock:
            self._callback.set_size(size)

    def relative_update(self, num: int = 1) -> None:
        with self._lock:
            self._callback.relative_update(num)
