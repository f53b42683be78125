"""Local copies of files of a volume that is not mounted, bounded in bytes. Called by `sources` and
`loader`.

The process that made the cache owns it: it says which files are still to be used (`hold`) and which
were used (`release`), and only it deletes, only what was released, the longest unused first. Loader
workers only add files. So a file that was read ahead cannot be deleted before it was used; what is
held may exceed the bound.

The directory lives as long as its owner. The lock file in it tells a later process that the owner
is gone, however it died, and that the directory may be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from trainmount.data.manifest import Entry

__all__ = ["FileCache"]

_PREFIX: Final = "files-"
_LOCK_NAME: Final = ".owner"


class FileCache:
    """A directory of whole files, named after their paths. Not for use by several threads."""

    def __init__(self, limit_bytes: int, root: Path | None = None) -> None:
        """Nothing is made before `open`. `root` holds the directories of all owners on this
        machine.
        """
        self.limit_bytes = limit_bytes
        self._root = root or Path(tempfile.gettempdir()) / f"trainmount-cache-{os.getuid()}"
        self._directory: Path | None = None
        self._held: Counter[Entry] = Counter()
        self._released: OrderedDict[Entry, None] = OrderedDict()
        self._released_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        return {"limit_bytes": self.limit_bytes, "root": self._root, "directory": self._directory}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["limit_bytes"], state["root"])  # type: ignore[misc]
        self._directory = state["directory"]

    @property
    def is_open(self) -> bool:
        return self._directory is not None

    def open(self) -> None:
        """Make the directory and remove those whose owners are gone. May be called again."""
        if self._directory is not None:
            return
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(self._root)
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._root))
        lock = os.open(directory / _LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        self._directory = directory
        weakref.finalize(self, _close, directory, lock, os.getpid())

    def path(self, entry: Entry, read: Callable[[Entry], bytes]) -> str:
        """The local path of the file, which is read if it is not there. May be called in any
        process.
        """
        assert self._directory is not None, "the owner opens the cache before it hands it on"
        path = self._path(entry)
        if not path.exists():
            data = read(entry)
            temporary = path.with_name(f".{os.getpid()}-{path.name}")
            temporary.write_bytes(data)
            temporary.replace(path)
        return str(path)

    def hold(self, entries: Iterable[Entry]) -> None:
        """These files are going to be used; each call is undone by one `release`. Nothing for a
        cache not open.
        """
        if self._directory is None:
            return
        for entry in entries:
            self._held[entry] += 1
            if entry in self._released:
                del self._released[entry]
                self._released_bytes -= entry.size_bytes

    def release(self, entries: Iterable[Entry]) -> None:
        """These files were used. Deletes what exceeds the bound, except what is held."""
        if self._directory is None:
            return
        for entry in entries:
            self._held[entry] -= 1
            if self._held[entry] <= 0:
                del self._held[entry]
                self._released[entry] = None
                self._released_bytes += entry.size_bytes
        while self._released and self._released_bytes > self.limit_bytes:
            entry, _ = self._released.popitem(last=False)
            self._released_bytes -= entry.size_bytes
            with contextlib.suppress(FileNotFoundError):
                self._path(entry).unlink()

    def held(self) -> list[Entry]:
        """What is held now, each as often as it was held."""
        return list(self._held.elements())

    def _path(self, entry: Entry) -> Path:
        assert self._directory is not None
        digest = hashlib.sha256(
            f"{entry.path}\0{entry.size_bytes}".encode("utf-8", "surrogateescape")
        ).hexdigest()
        # The name's end keeps the suffix, by which image and audio readers choose their format.
        return self._directory / f"{digest[:24]}-{entry.path.rpartition('/')[2][-64:]}"


def _remove_abandoned(root: Path) -> None:
    for directory in root.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made or removed by somebody else
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


def _close(directory: Path, lock: int, owner: int) -> None:
    # A forked child inherits the finalizer, but the directory is its parent's.
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
