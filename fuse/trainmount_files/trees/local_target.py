"""A directory of this machine as the destination of a copy.

Names come from a store, so they are strangers': nothing is written outside the directory, through a
link or over something that is no file. A file gets its name in one step when all of it is there, so
that the place holds the old content, none or the whole new one. Nothing is fsynced: after a power
cut a copy has to be made again.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from trainmount_files.directory.io import write_all
from trainmount_files.errors import (
    AlreadyExists,
    InvalidRequest,
    IsADirectory,
    LocalError,
    NotADirectory,
)
from trainmount_files.paths import split
from trainmount_files.transfer.local_files import NewFile
from trainmount_files.trees.directories import DirectoryCache, disk_errors
from trainmount_files.volume import Buffer

__all__ = ["LocalTarget", "told_plainly"]

_LISTINGS: Final = 16
"""Directories whose names are kept, for telling an old file from one that the disk takes for the
same.
"""


class LocalTarget:
    """Files below one directory. Any thread may call; `close` when none does any more."""

    def __init__(self, root: Path) -> None:
        """Makes nothing: the first `make_directory` does."""
        self._root = root
        self._directories = DirectoryCache(root)
        self._names = _Names(self._directories)

    def make_directory(self, path: str) -> None:
        """Make a directory, whose parent must be there; the root with its parents. One that is
        there is fine.

        Raises:
            NotADirectory: a file or a link has the name. AlreadyExists: the disk takes the name for
            that of another directory.
        """
        split("make directory", path)
        with disk_errors("make directory", path):
            if not path:
                try:
                    self._root.mkdir(parents=True, exist_ok=True)
                except FileExistsError:
                    raise NotADirectory("make directory", path, "a file is in the way") from None
                return
            parent, _, name = path.rpartition("/")
            descriptor = self._directories.get(parent)
            try:
                os.mkdir(name, dir_fd=descriptor)
            except FileExistsError:
                found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                if not stat.S_ISDIR(found.st_mode):
                    reason = f"{_kind(found)} is in the way"
                    raise NotADirectory("make directory", path, reason) from None
                self._names.require(path)

    def require_free(self, path: str) -> None:
        """Raises AlreadyExists where something is at `path`."""
        if self._look("write", path) is not None:
            raise _occupied(path)

    def write(self, path: str, data: Buffer, *, overwrite: bool) -> None:
        """Store a small file.

        Raises:
            AlreadyExists: something is there and `overwrite` is False, or the disk takes the name
                for that of another file. IsADirectory: a directory is there. InvalidRequest: a
                link or a device is there. LocalError.
        """
        try:
            self._write(path, data, overwrite=overwrite)
        except AlreadyExists:
            if not overwrite:
                raise
            # It was not there a moment ago. Another file with this name may be replaced, one that
            # only the disk takes for the same may not: the second look knows.
            self._write(path, data, overwrite=True)

    def prepare(self, path: str, *, overwrite: bool) -> tuple[Path, bool]:
        """Where to store a file, and whether there is one that may be replaced; where there is
        none, whoever stores it must not replace any. Raises as `write`.

        The path leads to the directory as it was found, whatever happens to its name, until this
        thread asks for a file of another directory.
        """
        directory, _, name = path.rpartition("/")
        exists = self._look("write", path) is not None
        if exists and not overwrite:
            raise _occupied(path)
        with disk_errors("write", path):
            descriptor = self._directories.get(directory)
        return Path(f"/proc/self/fd/{descriptor}/{name}"), exists

    def close(self) -> None:
        self._directories.close()

    def _look(self, operation: str, path: str) -> os.stat_result | None:
        """What is at a file's path, None where nothing is.

        Raises:
            VolumeError: it is nothing that a file may replace, or a file of another name.
        """
        if not split(operation, path):
            raise IsADirectory(operation, path, "is the root of the copy")
        directory, _, name = path.rpartition("/")
        with disk_errors(operation, path):
            try:
                found = os.stat(
                    name, dir_fd=self._directories.get(directory), follow_symlinks=False
                )
            except FileNotFoundError:
                # The parent is there, or `get` would have failed as well when it is used next.
                return None
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectory(operation, path, "a directory is in the way")
        if not stat.S_ISREG(found.st_mode):
            raise InvalidRequest(operation, path, f"{_kind(found)} is in the way")
        self._names.require(path)
        return found

    def _write(self, path: str, data: Buffer, *, overwrite: bool) -> None:
        destination, exists = self.prepare(path, overwrite=overwrite)
        with told_plainly("write", path), NewFile(destination, path, overwrite=exists) as new:
            with disk_errors("write", path):
                write_all(new.descriptor, data)
            new.publish()


@contextmanager
def told_plainly(operation: str, path: str) -> Iterator[None]:
    """Say an error of a path that `prepare` gave without that path, which no person knows."""
    try:
        yield
    except LocalError as error:
        reason = os.strerror(error.errno).lower() if error.errno else error.reason
        raise LocalError(operation, path, reason, error.errno) from error.__cause__
    except AlreadyExists as error:
        raise _occupied(path) from error.__cause__


class _Names:
    """The exact names in directories, asked for only where a name is taken already.

    A file system that folds case or composition finds `A` where `a` is stored. Whoever writes `A`
    then must not replace `a`, which is another file at the store.
    """

    def __init__(self, directories: DirectoryCache) -> None:
        self._directories = directories
        self._lock = threading.Lock()
        # Directory -> its names when it was listed last. Guarded by the lock.
        self._kept: OrderedDict[str, frozenset[str]] = OrderedDict()

    def require(self, path: str) -> None:
        """Raises AlreadyExists where what the disk finds at `path` has another name."""
        directory, _, name = path.rpartition("/")
        with self._lock:
            names = self._kept.get(directory)
        if names is not None and name in names:
            return
        # New since the last look, by another thread; or really another name.
        names = frozenset(os.listdir(self._directories.get(directory)))  # noqa: PTH208
        with self._lock:
            self._kept[directory] = names
            self._kept.move_to_end(directory)
            while len(self._kept) > _LISTINGS:
                self._kept.popitem(last=False)
        if name not in names:
            raise AlreadyExists(
                "write", path, "the disk takes the name for that of another file, which is there"
            )


def _occupied(path: str) -> AlreadyExists:
    return AlreadyExists("write", path, "something is at the path")


def _kind(found: os.stat_result) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "a symbolic link"
    return "a file" if stat.S_ISREG(found.st_mode) else "neither a file nor a directory"
