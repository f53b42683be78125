"""Whether a path is free for a file: what a file system would refuse and a bucket would take.
Called by `volume.py` before it writes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Final

from trainmount_files.bucket.keys import Opened
from trainmount_files.bucket.location import Location
from trainmount_files.errors import AlreadyExists, IsADirectory, NotADirectory, VolumeError
from trainmount_files.paths import parent_of

__all__ = ["Places"]

_KNOWN_SECONDS: Final = 60.0
"""How long a path that was seen to be no file is not asked for again."""

_MAX_KNOWN: Final = 10_000


class Places:
    """Looks at the names around a path. One a volume and process; any thread may call."""

    def __init__(self, opened: Opened, location: Location) -> None:
        self._opened = opened
        self._location = location
        # path -> until when it counts as no file; guarded by the lock.
        self._no_file: dict[str, float] = {}
        self._lock = threading.Lock()

    async def check(self, operation: str, path: str, *, overwrite: bool) -> None:
        """Return where a file may be at `path`.

        Raises:
            NotADirectory: a parent is a file. IsADirectory, with `overwrite`, or AlreadyExists: a
            directory has the name.
        """
        parents = [parent for parent in _parents(path) if not self._is_known(parent)]
        # Both are waited for: of two errors the listing's says more.
        is_directory, *is_file = await asyncio.gather(
            self._opened.has_below(self._location.key(path)),
            *(self._opened.is_there(self._location.key(parent)) for parent in parents),
            return_exceptions=True,
        )
        for outcome in (is_directory, *is_file):
            if isinstance(outcome, BaseException):
                raise outcome
        for parent, found in zip(parents, is_file, strict=True):
            if found:
                raise NotADirectory(operation, path, f"{parent} is a file")
            self._remember(parent)
        with self._lock:
            self._no_file.pop(path, None)
        if is_directory:
            kind: type[VolumeError] = IsADirectory if overwrite else AlreadyExists
            raise kind(operation, path, "is a directory")

    def _is_known(self, path: str) -> bool:
        with self._lock:
            return self._no_file.get(path, 0.0) > time.monotonic()

    def _remember(self, path: str) -> None:
        with self._lock:
            if len(self._no_file) >= _MAX_KNOWN:
                self._no_file.clear()
            self._no_file[path] = time.monotonic() + _KNOWN_SECONDS


def _parents(path: str) -> list[str]:
    found = []
    while parent := parent_of(path):
        found.append(parent)
        path = parent
    return found
