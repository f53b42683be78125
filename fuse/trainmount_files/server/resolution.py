"""Names to descriptors, one `openat` a name, so that no request leaves the served directory.

A symbolic link is never followed, wherever it stands and whenever it was put there: every step
opens a directory by the descriptor of its parent with `O_NOFOLLOW`. Blocking but for `cached`;
called by `store`.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from trainmount_files.server.cached_open import open_cached

__all__ = ["open_directory", "open_regular", "stat_regular"]

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def open_directory(
    root_fd: int,
    names: Sequence[str],
    *,
    create_from: int | None = None,
    cached: bool = False,
    before: Callable[[int, str], None] | None = None,
    made: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """The descriptor of the directory `names` below `root_fd`, for as long as the block lasts.

    With `create_from`, directories are made from that index of `names` on. With `cached`, it does
    not wait for the disk and raises OSError where it would have to. `before` is called with each
    name and the descriptor of its parent, `made` with the descriptor of each new directory.

    Raises:
        FileNotFoundError: a name is not there.
        NotADirectoryError: a name is a file or a symbolic link.
    """
    open_at = open_cached if cached else os.open
    fd = os.dup(root_fd)
    try:
        for index, name in enumerate(names):
            if before is not None:
                before(fd, name)
            is_new = False
            try:
                next_fd = open_at(name, _DIRECTORY_FLAGS, dir_fd=fd)
            except FileNotFoundError:
                if create_from is None or index < create_from:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o777, dir_fd=fd)
                    is_new = True
                next_fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=fd)
            os.close(fd)
            fd = next_fd
            if is_new and made is not None:
                made(fd)
        yield fd
    finally:
        os.close(fd)


def open_regular(directory_fd: int, name: str, *, cached: bool = False) -> int:
    """Open a regular file for reading; the caller closes the descriptor. `cached` as above.

    Raises:
        FileNotFoundError: nothing there, or a symbolic link, socket, pipe or device.
        IsADirectoryError: it is a directory.
    """
    try:
        # Non-blocking, or opening a named pipe would wait for its writer for ever.
        fd = (open_cached if cached else os.open)(name, _FILE_FLAGS, dir_fd=directory_fd)
    except OSError as error:
        if cached:
            raise
        status = _lstat(directory_fd, name)
        if status is not None and not stat.S_ISREG(status.st_mode):
            raise FileNotFoundError(name) from error
        raise
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode):
        return fd
    os.close(fd)
    raise IsADirectoryError(name) if stat.S_ISDIR(mode) else FileNotFoundError(name)


def stat_regular(directory_fd: int, name: str, *, cached: bool = False) -> os.stat_result:
    """Of a regular file.

    Raises:
        FileNotFoundError: nothing there, or anything else.
    """
    if cached:
        fd = open_cached(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
    else:
        status = os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise FileNotFoundError(name)
    return status


def _lstat(directory_fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return None
