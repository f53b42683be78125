"""Files of this machine as the ends of a transfer: a new file that appears whole. Used by
`download.py`.
"""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Final

from trainmount_files.directory.io import link_or_rename_exclusively
from trainmount_files.errors import AlreadyExists, local_errors

__all__ = ["NewFile", "write_at"]

_NO_NAMELESS_FILES: Final = frozenset(
    {errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, errno.ENOSYS}
)
"""What file systems and kernels without O_TMPFILE answer."""

_NO_EXCLUSIVE_RENAME: Final = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`. Raises OSError."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data = data[written:]
        offset += written


class NewFile:
    """A file in the making at `destination`, of which nothing is seen before `publish`."""

    def __init__(self, destination: Path, path: str, *, overwrite: bool) -> None:
        """`path` is for messages: the file in the volume."""
        self._destination = destination
        self._path = path
        self._overwrite = overwrite
        # Of the directory, so that a rename of one of its parents does not matter.
        self._directory = -1
        self.descriptor = -1
        # Where the file has a name of its own already.
        self._temporary: str | None = None

    def __enter__(self) -> NewFile:
        """Raises LocalError, AlreadyExists."""
        try:
            with local_errors("download", self._path, self._destination):
                flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
                self._directory = os.open(self._destination.parent, flags)
                self._check_free()
                self._open()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
        self._close()

    def publish(self) -> None:
        """Give the file its name in one step."""
        name = self._destination.name
        with local_errors("download", self._path, self._destination):
            if not self._overwrite:
                try:
                    self._link(name)
                except FileExistsError:
                    raise self._occupied() from None
                return
            if self._temporary is None:
                # A nameless file can be linked to a free name only, and renamed from there.
                temporary = _unused_name()
                self._link(temporary)
                self._temporary = temporary
            os.rename(self._temporary, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
            self._temporary = None

    def _link(self, name: str) -> None:
        if self._temporary is not None:
            directory = self._directory
            try:
                link_or_rename_exclusively(self._temporary, directory, name, directory)
            except OSError as error:
                if error.errno not in _NO_EXCLUSIVE_RENAME:
                    raise
                # Neither links nor exclusive renames (exFAT, some FUSE): a look and a rename is
                # all that can be had.
                with suppress(FileNotFoundError):
                    os.stat(name, dir_fd=directory, follow_symlinks=False)
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
                os.rename(self._temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
            return
        os.link(f"/proc/self/fd/{self.descriptor}", name, dst_dir_fd=self._directory)

    def _check_free(self) -> None:
        """Refuse early what `publish` would: a directory, a device."""
        try:
            mode = os.stat(
                self._destination.name, dir_fd=self._directory, follow_symlinks=False
            ).st_mode
        except FileNotFoundError:
            return
        if not self._overwrite:
            raise self._occupied()
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            # A rename would put the file in the place of a device.
            raise OSError(errno.EINVAL, "is no regular file")

    def _occupied(self) -> AlreadyExists:
        return AlreadyExists("download", self._path, f"something is at {self._destination}")

    def _open(self) -> None:
        access = os.O_RDWR | os.O_CLOEXEC
        try:
            self.descriptor = os.open(".", access | os.O_TMPFILE, 0o666, dir_fd=self._directory)
            return
        except OSError as error:
            if error.errno not in _NO_NAMELESS_FILES:
                raise
        temporary = _unused_name()
        self.descriptor = os.open(
            temporary, access | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=self._directory
        )
        self._temporary = temporary

    def _close(self) -> None:
        for descriptor in (self.descriptor, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self.descriptor = self._directory = -1


def _unused_name() -> str:
    # Not made from the destination's name, which may be as long as names can be.
    return f".trainmount-{uuid.uuid4().hex}"
