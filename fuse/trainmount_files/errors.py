"""What can go wrong with a volume.

Every error carries the path and the operation, never a signed URL or a token.

VolumeError                    an operation on a volume failed
├── NotFound                   no file or directory at the path
├── AlreadyExists              overwrite=False and something is there
├── NotADirectory              a directory was asked for, the path is a file
├── IsADirectory               a file was asked for, the path is a directory
├── DirectoryNotEmpty          a directory with entries cannot be removed
├── PreconditionFailed         the file is another version than the caller's
├── PermissionDenied           the identity may not do this (HTTP 403)
├── Unauthenticated            the token is missing, wrong or expired (HTTP 401)
├── InvalidRequest             the store refuses the arguments (path, size, name)
├── TooLarge                   above a limit of the store; says which
├── Unsupported                this kind of volume cannot do it
├── InexactRange               a body that is not the range that was asked for
├── Cancelled                  the caller cancelled the transfer, or closed the volume
├── LocalError                 a file of this machine cannot be read or written; says the errno
└── Unavailable                throttled, 5xx, network; retried until the deadline, may succeed
    │                           later
    └── NoSpace                the store is full (HTTP 507)
        └── QuotaExceeded      the bucket, its owner or the directory is at its quota
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = [
    "NO_SPACE_BY_CODE",
    "AlreadyExists",
    "Cancelled",
    "DirectoryNotEmpty",
    "InexactRange",
    "InvalidRequest",
    "IsADirectory",
    "LocalError",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "PermissionDenied",
    "PreconditionFailed",
    "QuotaExceeded",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "VolumeError",
    "local_errors",
]


class VolumeError(Exception):
    """An operation on a volume failed.

    `str()` is one line for a person: operation, path, reason.
    """

    def __init__(self, operation: str, path: str, reason: str) -> None:
        super().__init__(operation, path, reason)
        self.operation = operation
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.operation} {self.path or '/'}: {self.reason}"


class NotFound(VolumeError):
    """No file or directory at the path."""


class AlreadyExists(VolumeError):
    """`overwrite=False` and something is at the path."""


class NotADirectory(VolumeError):
    """The path, or a parent of it, is a file."""


class IsADirectory(VolumeError):
    """The path is a directory where a file was asked for."""


class DirectoryNotEmpty(VolumeError):
    """A directory with entries cannot be removed."""


class PreconditionFailed(VolumeError):
    """The file has another version now than the caller named."""


class PermissionDenied(VolumeError):
    """The identity may not do this."""


class Unauthenticated(VolumeError):
    """The token is missing, wrong or expired."""


class InvalidRequest(VolumeError):
    """The store refuses the arguments."""


class TooLarge(VolumeError):
    """Above a limit of the store; the reason names the limit."""


class Unsupported(VolumeError):
    """This kind of volume cannot do it."""


class InexactRange(VolumeError):
    """The answer is not the range that was asked for; no byte of it is given to the caller."""


class Cancelled(VolumeError):
    """The caller cancelled the transfer, or closed the volume in its midst."""


class LocalError(VolumeError):
    """A file of this machine cannot be read or written: no space, no permission, no directory."""

    def __init__(self, operation: str, path: str, reason: str, errno: int | None = None) -> None:
        super().__init__(operation, path, reason)
        self.errno = errno


class Unavailable(VolumeError):
    """Throttled, a server error or the network, until the deadline had passed."""


class NoSpace(Unavailable):
    """The store is full. What was to be written can be written once there is room."""


class QuotaExceeded(NoSpace):
    """The same of a quota: the store has room, but not for this bucket, owner or directory."""


NO_SPACE_BY_CODE: Final[dict[str, type[NoSpace]]] = {
    "InsufficientStorage": NoSpace,
    "XMinioStorageFull": NoSpace,
    "QuotaExceeded": QuotaExceeded,
    "XMinioAdminBucketQuotaExceeded": QuotaExceeded,
}
"""How object stores say it, behind signed URLs too: Ceph and its kin answer a quota with HTTP 403,
MinIO with 400. The stores of AWS, Google and Azure have no end.
"""


@contextmanager
def local_errors(operation: str, path: str, file: Path | None = None) -> Iterator[None]:
    """Turn an OSError inside into LocalError; `path` is the volume's, `file` this machine's."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or "failed").lower()
        where = f"{file}: " if file is not None else ""
        raise LocalError(operation, path, f"{where}{reason}", error.errno) from error
