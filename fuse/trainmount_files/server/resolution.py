"""Names to descriptors, one `openat` a name, so that no request leaves the served directory.

A symbolic link is never followed, wherever it stands and whenever it was put there: every step
opens a directory by the descriptor of its parent with `O_NOFOLLOW`. Blocking; called by `store` in
worker threads.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from typing import Final

__all__ = ["open_directory", "open_regular"]

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def open_directory(
    root_fd: int, names: Sequence[str], *, create_from: int | None = None
) -> Iterator[int]:
    """The descriptor of the directory `names` below `root_fd`, for as long as the block lasts.

    With `create_from`, directories are made from that index of `names` on.

    Raises:
        FileNotFoundError: a name is not there.
        NotADirectoryError: a name is a file or a symbolic link.
    """
    fd = os.dup(root_fd)
    try:
        for index, name in enumerate(names):
            if create_from is not None and index >= create_from:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o777, dir_fd=fd)
            next_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = next_fd
        yield fd
    finally:
        os.close(fd)


def open_regular(directory_fd: int, name: str) -> int:
    """Open a regular file for reading; the caller closes the descriptor.

    Raises:
        FileNotFoundError: nothing there, or a symbolic link, socket, pipe or device.
        IsADirectoryError: it is a directory.
    """
    try:
        # Non-blocking, or opening a named pipe would wait for its writer for ever.
        fd = os.open(name, _FILE_FLAGS, dir_fd=directory_fd)
    except OSError as error:
        status = _lstat(directory_fd, name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(name) from error
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise IsADirectoryError(name) if stat.S_ISDIR(mode) else FileNotFoundError(name)


def _lstat(directory_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return None
