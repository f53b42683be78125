"""Open directories of this machine, one for each thread: the files of a directory come one after
the other, and each would otherwise be looked up from the root.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trainmount_files.directory.io import os_errors
from trainmount_files.errors import LocalError, Unavailable

__all__ = ["DirectoryCache", "disk_errors"]

_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def disk_errors(operation: str, path: str) -> Iterator[None]:
    """Turn an OSError inside into an error with the path; LocalError where it has no kind of its
    own: a full disk.
    """
    try:
        with os_errors(operation, path):
            yield
    except Unavailable as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        raise LocalError(operation, path, error.reason, cause.errno) from cause


class DirectoryCache:
    """The directory that each thread used last. Any thread may call; `close` when none does."""

    def __init__(self, root: Path, *, follow_links: bool = False) -> None:
        """`root` itself may be a link: whoever named it meant where it leads. Below it none is
        followed, unless `follow_links`.
        """
        self._root = root
        self._flags = _FLAGS if follow_links else _FLAGS | os.O_NOFOLLOW
        self._lock = threading.Lock()
        # Thread -> path and descriptor of its directory. Guarded by the lock where it changes size;
        # a thread replaces only its own.
        self._open: dict[int, tuple[str, int]] = {}

    def get(self, path: str) -> int:
        """Descriptor of `path` below the root, until this thread asks for another.

        Raises:
            OSError: it is missing, or something on the way is no directory.
        """
        thread = threading.get_ident()
        kept = self._open.get(thread)
        if kept is not None:
            if kept[0] == path:
                return kept[1]
            with self._lock:
                del self._open[thread]
            os.close(kept[1])
        descriptor = self._walk(path)
        with self._lock:
            self._open[thread] = (path, descriptor)
        return descriptor

    def close(self) -> None:
        with self._lock:
            for _, descriptor in self._open.values():
                os.close(descriptor)
            self._open.clear()

    def _walk(self, path: str) -> int:
        current = os.open(self._root, _FLAGS)
        for name in path.split("/") if path else ():
            try:
                following = os.open(name, self._flags, dir_fd=current)
            finally:
                os.close(current)
            current = following
        return current
