"""A directory of this machine as the source of a copy: listed and opened by descriptors, so that
what is swapped for a link meanwhile leads nowhere.

A volume of its own (`directory/`) hides what it does not hold; here a link and a pipe are named,
since whoever copies a tree must learn what was left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from trainmount_files.errors import InvalidRequest
from trainmount_files.paths import join, split
from trainmount_files.trees.directories import DirectoryCache, disk_errors
from trainmount_files.trees.entries import Entry

__all__ = ["LocalSource"]

_FILE_FLAGS: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""A pipe that took a file's place must not block."""


class LocalSource:
    """Files below one directory. Any thread may call; `close` when none does any more."""

    def __init__(self, root: Path, *, follow_links: bool = False) -> None:
        self._root = root
        self._follow = follow_links
        self._directories = DirectoryCache(root, follow_links=follow_links)

    def entries(self, path: str) -> Iterator[Entry]:
        """The names in one directory, in no order, without a call for each.

        Raises:
            VolumeError: it cannot be read; NotFound where it is gone.
        """
        split("list", path)
        # A descriptor of its own: the cached one may be closed while the listing goes on.
        with disk_errors("list", path):
            descriptor = os.dup(self._directories.get(path))
            try:
                if self._follow and self._is_loop(path, os.fstat(descriptor)):
                    yield Entry(
                        path, is_directory=True, skip_reason="a link to a directory that it is in"
                    )
                    return
                with os.scandir(descriptor) as names:
                    for name in names:
                        yield self._to_entry(join(path, name.name), name)
            finally:
                os.close(descriptor)

    def open(self, path: str) -> tuple[BinaryIO, os.stat_result]:
        """A regular file, and what it was when it was opened; the caller closes it."""
        directory, _, name = path.rpartition("/")
        flags = _FILE_FLAGS if self._follow else _FILE_FLAGS | os.O_NOFOLLOW
        with disk_errors("read", path):
            descriptor = os.open(name, flags, dir_fd=self._directories.get(directory))
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                os.close(descriptor)
                raise InvalidRequest("read", path, "is not a regular file any more")
            return os.fdopen(descriptor, "rb", buffering=0), found

    def close(self) -> None:
        self._directories.close()

    def _to_entry(self, path: str, entry: os.DirEntry[str]) -> Entry:
        follow = self._follow
        if entry.is_symlink():
            if not follow:
                return Entry(path, is_directory=False, skip_reason="a symbolic link")
            try:
                # Asks for the target once, and keeps the answer for the two questions below.
                entry.stat()
            except OSError:
                return Entry(
                    path, is_directory=False, skip_reason="a symbolic link that leads nowhere"
                )
        if entry.is_dir(follow_symlinks=follow):
            return Entry(path, is_directory=True)
        if entry.is_file(follow_symlinks=follow):
            return Entry(path, is_directory=False)
        return Entry(path, is_directory=False, skip_reason="neither a file nor a directory")

    def _is_loop(self, path: str, found: os.stat_result) -> bool:
        while path:
            path = path.rpartition("/")[0]
            above = (self._root / path).stat()
            if (above.st_dev, above.st_ino) == (found.st_dev, found.st_ino):
                return True
        return False
