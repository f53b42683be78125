"""The one table from a volume's errors to the number a program sees. Called by `adapter` and
`filesystem`.
"""

from __future__ import annotations

import errno
import sqlite3
from typing import Final

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    DirectoryNotEmpty,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NoSpace,
    NotADirectory,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    QuotaExceeded,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VolumeError,
)

__all__ = ["ERRNO_BY_ERROR", "errno_of", "errno_of_transfer"]

ERRNO_BY_ERROR: Final[dict[type[VolumeError], int]] = {
    NotFound: errno.ENOENT,
    AlreadyExists: errno.EEXIST,
    NotADirectory: errno.ENOTDIR,
    IsADirectory: errno.EISDIR,
    DirectoryNotEmpty: errno.ENOTEMPTY,
    PreconditionFailed: errno.ESTALE,
    PermissionDenied: errno.EACCES,
    Unauthenticated: errno.EACCES,
    InvalidRequest: errno.EINVAL,
    TooLarge: errno.EFBIG,
    Unsupported: errno.EOPNOTSUPP,
    InexactRange: errno.EIO,
    Cancelled: errno.EINTR,
    Unavailable: errno.EAGAIN,
    NoSpace: errno.ENOSPC,
    QuotaExceeded: errno.EDQUOT,
}


_DISK_FULL: Final = frozenset({sqlite3.SQLITE_FULL})


def errno_of(error: BaseException) -> int:
    """The errno for an error of an operation on names; EIO for anything that nobody planned."""
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode in _DISK_FULL:
        return errno.ENOSPC
    for kind in type(error).__mro__:
        if kind in ERRNO_BY_ERROR:
            return ERRNO_BY_ERROR[kind]
    return errno.EIO


def errno_of_transfer(error: BaseException) -> int:
    """The same for bytes: a program does not expect EAGAIN from a regular file, so Unavailable is
    EIO there, unless the store only has no room.

    A file that is gone under an open handle is ESTALE: the name it was opened by is not what the
    program asked about.
    """
    if isinstance(error, Unavailable) and not isinstance(error, NoSpace):
        return errno.EIO
    if isinstance(error, NotFound):
        return errno.ESTALE
    return errno_of(error)
