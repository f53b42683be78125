"""Our errors as the operating system's: callers of fsspec catch FileNotFoundError, not NotFound.

The error of the volume stays as the cause.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    DirectoryNotEmpty,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    LocalError,
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

__all__ = ["as_os_errors", "is_about_one_file", "to_os_error"]

# An OSError takes its class from the number: ENOENT makes a FileNotFoundError.
_NUMBERS: Final[dict[type[VolumeError], int]] = {
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
    Unsupported: errno.ENOTSUP,
    InexactRange: errno.EIO,
    Cancelled: errno.ECANCELED,
    # Not EAGAIN: a BlockingIOError means "nothing yet" to the classes of `io`.
    Unavailable: errno.EIO,
    NoSpace: errno.ENOSPC,
    QuotaExceeded: errno.EDQUOT,
}

_OF_THE_STORE: Final = (Unavailable, Unauthenticated, Cancelled)

_OF_THE_MACHINE: Final = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO}
)


def to_os_error(error: VolumeError, path: str) -> OSError:
    """The error with the number of its kind, about `path`; not chained yet."""
    if isinstance(error, LocalError):
        number = error.errno or errno.EIO
    else:
        number = next(
            (_NUMBERS[kind] for kind in type(error).__mro__ if kind in _NUMBERS), errno.EIO
        )
    return OSError(number, f"{error.operation}: {error.reason}", path)


@contextmanager
def as_os_errors(path: str) -> Iterator[None]:
    """What the block raises of ours becomes an OSError about `path`."""
    try:
        yield
    except VolumeError as error:
        raise to_os_error(error, path) from error


def is_about_one_file(error: BaseException) -> bool:
    """Whether other files may still go well: not where the store is out of reach, the identity
    refused or the disk full.
    """
    cause = error.__cause__ if isinstance(error, OSError) else error
    if isinstance(cause, LocalError):
        return cause.errno not in _OF_THE_MACHINE
    return isinstance(cause, VolumeError) and not isinstance(cause, _OF_THE_STORE)
