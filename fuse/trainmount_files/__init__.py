"""Trees of files behind a URL: Unity Catalog volumes and directories, through one protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from trainmount_files.open import open_volume
from trainmount_files.volume import (
    ByteRange,
    Capabilities,
    FileStat,
    Page,
    Progress,
    Upload,
    Volume,
    list_directory,
)

if TYPE_CHECKING:
    from trainmount_files.trees import fetch, publish

__all__ = [
    "AlreadyExists",
    "ByteRange",
    "Cancelled",
    "Capabilities",
    "DirectoryNotEmpty",
    "FileStat",
    "InexactRange",
    "InvalidRequest",
    "IsADirectory",
    "LocalError",
    "NoSpace",
    "NotADirectory",
    "NotFound",
    "Page",
    "PermissionDenied",
    "PreconditionFailed",
    "Progress",
    "QuotaExceeded",
    "TooLarge",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Upload",
    "Volume",
    "VolumeError",
    "fetch",
    "list_directory",
    "open_volume",
    "publish",
]


def __getattr__(name: str) -> object:
    """`fetch` and `publish` are loaded when they are asked for: few programs copy trees."""
    if name in ("fetch", "publish"):
        from trainmount_files import trees

        return getattr(trees, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
