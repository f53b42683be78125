"""Pages of a directory's names without reading the whole directory for each. Called by `store`.

A kernel tells names in no order, so a page in order needs all of them. What a page has read and
sorted is kept for the pages after it, for as long as the directory's times say that nothing was
made, removed or renamed in it. Blocking; any thread.
"""

from __future__ import annotations

import bisect
import heapq
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["Snapshots"]

# Of one directory at once, so that a listing holds some 5 MB however large the directory is.
_MAX_NAMES: Final = 50_000

# Listings at the same time that are served without reading anew.
_MAX_SNAPSHOTS: Final = 8

# A change within the tick of a filesystem's clock (2 s for the coarsest) does not show in the times
# of a directory, so only times that are older are trusted.
_SETTLED_NS: Final = 2_100_000_000


@dataclass(frozen=True, slots=True)
class _Snapshot:
    stamp: tuple[int, ...]
    """Which directory, and when it last changed."""
    after: bytes
    """The names begin behind this one; empty is the beginning."""
    names: list[bytes]
    """Sorted."""
    is_whole: bool
    """Whether the directory has no more names behind these."""

    def page(self, after: bytes, size: int) -> tuple[list[bytes], bool] | None:
        """None if this is not in here."""
        if after < self.after:
            return None
        start = bisect.bisect_right(self.names, after)
        if start + size < len(self.names) or self.is_whole:
            return self.names[start : start + size], start + size >= len(self.names)
        return None


class Snapshots:
    """What listings have read ahead."""

    def __init__(
        self, *, max_names: int = _MAX_NAMES, clock_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._max_names = max_names
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        # Guarded by `_lock`; the newest last.
        self._kept: deque[_Snapshot] = deque(maxlen=_MAX_SNAPSHOTS)

    def page(self, directory_fd: int, after: bytes, size: int) -> tuple[list[bytes], bool]:
        """The next `size` names behind `after` in byte order, and whether they are the last.

        Files and directories; a symbolic link is neither, and a name that is not UTF-8 cannot be
        told.
        """
        stamp = _stamp(directory_fd)
        with self._lock:
            kept = [one for one in self._kept if one.stamp == stamp]
        for snapshot in kept:
            if (page := snapshot.page(after, size)) is not None:
                if page[1]:
                    self._drop(snapshot)
                return page
        began_ns = self._clock_ns()
        # Once each: one that is replaced while it is read may be told again by the kernel.
        names = list({name for name in _scan(directory_fd) if name > after})
        if len(names) <= size:
            return sorted(names), True
        is_settled = began_ns - max(stamp[2:]) > _SETTLED_NS and stamp == _stamp(directory_fd)
        if not is_settled:
            return heapq.nsmallest(size, names), False
        names.sort()
        snapshot = _Snapshot(stamp, after, names[: self._max_names], len(names) <= self._max_names)
        with self._lock:
            self._kept.append(snapshot)
        return names[:size], False

    def _drop(self, snapshot: _Snapshot) -> None:
        with self._lock:
            if snapshot in self._kept:
                self._kept.remove(snapshot)


def _stamp(directory_fd: int) -> tuple[int, ...]:
    status = os.fstat(directory_fd)
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def _scan(directory_fd: int) -> Iterator[bytes]:
    with os.scandir(directory_fd) as entries:
        for entry in entries:
            # Bytes that are not UTF-8 come as lone surrogates, which UTF-8 does not have either.
            if not entry.is_symlink() and (entry.name.isascii() or _is_utf8(entry.name)):
                yield entry.name.encode()


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
