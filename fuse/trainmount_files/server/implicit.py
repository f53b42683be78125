"""Directories that exist only through their children, as in an object store that has none: they
come with the first file below and go with the last. Called by `store`.

A mark on the directory itself, an extended attribute, tells those that a file brought along from
those that somebody made; one without a mark stays. Blocking; any thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

__all__ = ["is_implicit", "mark_explicit", "mark_implicit", "probe_marks"]

_NAME: Final = "user.trainmount.implicit"
_ABSENT: Final = (errno.ENODATA, errno.ENOTSUP, errno.EPERM)


def mark_implicit(directory_fd: int) -> None:
    """A file brought it along."""
    os.setxattr(directory_fd, _NAME, b"1")


def mark_explicit(directory_fd: int) -> None:
    """Somebody asked for it by name."""
    with contextlib.suppress(OSError):
        os.removexattr(directory_fd, _NAME)


def is_implicit(directory_fd: int) -> bool:
    try:
        return bool(os.getxattr(directory_fd, _NAME))
    except OSError as error:
        if error.errno in _ABSENT:
            return False
        raise


def probe_marks(folder: Path) -> None:
    """Raises OSError if the disk of `folder` cannot hold the mark."""
    os.setxattr(folder, _NAME, b"1")
    os.removexattr(folder, _NAME)
