"""What can go wrong in a call of the driver; each kind is one gRPC code that the kubelet
understands.

CsiError
├── InvalidArgument      a field of the request is missing or wrong; the message names it
├── NotFound             no such volume, or nothing published at the path
├── AlreadyExists        there, but not as the request wants it
├── FailedPrecondition   this machine cannot do it (no /dev/fuse); says what is missing
├── Busy                 somebody still uses the mount
├── Pending              another call on the same volume has not ended (ABORTED)
├── Unauthenticated      the token is missing, wrong or expired
├── PermissionDenied     the identity may not use the volume
├── Unsupported          this driver or this kind of volume does not do it
└── Unavailable          store, API server or daemon did not answer in time; try again

Messages end as events of the pod: one line, which names the key or path, never a secret.
"""

from __future__ import annotations

from typing import ClassVar

from trainmount_files import errors as volume_errors

__all__ = [
    "AlreadyExists",
    "Busy",
    "CsiError",
    "FailedPrecondition",
    "InvalidArgument",
    "NotFound",
    "Pending",
    "PermissionDenied",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "from_volume_error",
]


class CsiError(Exception):
    """A call failed in a way that the caller is told; `str()` is the one line it gets."""

    grpc_code: ClassVar[str] = "INTERNAL"
    """Name of the gRPC status code; a name, so that checking a path does not load gRPC."""


class InvalidArgument(CsiError):
    """A field of the request is missing or wrong."""

    grpc_code = "INVALID_ARGUMENT"


class NotFound(CsiError):
    """No such volume, or nothing published at the path."""

    grpc_code = "NOT_FOUND"


class AlreadyExists(CsiError):
    """It is there, but not as the request wants it."""

    grpc_code = "ALREADY_EXISTS"


class FailedPrecondition(CsiError):
    """This machine lacks something."""

    grpc_code = "FAILED_PRECONDITION"


class Busy(FailedPrecondition):
    """Somebody still uses the mount."""


class Pending(CsiError):
    """Another call on the same volume has not ended."""

    grpc_code = "ABORTED"


class Unauthenticated(CsiError):
    """The token is missing, wrong or expired."""

    grpc_code = "UNAUTHENTICATED"


class PermissionDenied(CsiError):
    """The identity may not use the volume."""

    grpc_code = "PERMISSION_DENIED"


class Unsupported(CsiError):
    """This driver or this kind of volume does not do it."""

    grpc_code = "UNIMPLEMENTED"


class Unavailable(CsiError):
    """Store, API server or daemon did not answer in time."""

    grpc_code = "UNAVAILABLE"


# The first match counts; VolumeError itself is the last. The words are for a pod's event, where the
# store's own reason is often no more than a status code.
_KINDS: tuple[tuple[type[volume_errors.VolumeError], type[CsiError], str], ...] = (
    (volume_errors.NotFound, NotFound, "does not exist, or this identity may not see it"),
    (volume_errors.Unauthenticated, Unauthenticated, "the host does not take the token"),
    (volume_errors.PermissionDenied, PermissionDenied, "this identity may not use it"),
    (volume_errors.InvalidRequest, InvalidArgument, "refused"),
    (volume_errors.NotADirectory, InvalidArgument, "not a directory"),
    (volume_errors.AlreadyExists, AlreadyExists, "exists already"),
    (volume_errors.Unsupported, Unsupported, "not supported"),
    (volume_errors.VolumeError, Unavailable, "not available now"),
)


def from_volume_error(
    error: volume_errors.VolumeError, source: str, host: str | None = None
) -> CsiError:
    """The same failure as a caller of the driver sees it: which volume, where, what, why."""
    where = f" at {host}" if host else ""
    for volume_error, csi_error, words in _KINDS:
        if isinstance(error, volume_error):
            return csi_error(f"{source}{where}: {words} ({error.reason})")
    raise AssertionError("every VolumeError matches the last kind")
