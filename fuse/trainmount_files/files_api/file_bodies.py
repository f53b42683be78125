"""Bodies of requests that are read from a local file while they are sent. Used by `upload.py` and
`multipart.py`.
"""

from __future__ import annotations

from trainmount_files.errors import Cancelled, InvalidRequest, LocalError, VolumeError
from trainmount_files.files_api.api import BodySource
from trainmount_files.files_api.file_slice import FileSlice
from trainmount_files.retry import Cancellation
from trainmount_files.volume import ByteRange

__all__ = ["SourceTooShort", "body_of", "too_short", "unreadable"]


class SourceTooShort(InvalidRequest):
    """The file that is being stored has become shorter; nothing that the store said."""


def body_of(
    path: str,
    descriptor: int,
    byte_range: ByteRange,
    cancel: Cancellation | None,
    *,
    size_bytes: int,
) -> BodySource:
    """That range of an open file, read anew for each try. `size_bytes` is what the whole file
    should have, for the message.
    """
    return lambda: FileSlice(
        descriptor,
        byte_range.start,
        len(byte_range),
        on_short=too_short(path, size_bytes),
        on_cancel=Cancelled("upload", path, "cancelled"),
        on_failure=lambda error: unreadable(path, error),
        cancel=cancel,
    )


def unreadable(path: str, error: OSError) -> VolumeError:
    reason = f"the source cannot be read: {(error.strerror or 'failed').lower()}"
    return LocalError("upload", path, reason, error.errno)


def too_short(path: str, size_bytes: int) -> VolumeError:
    return SourceTooShort("upload", path, f"the source has fewer than {size_bytes} bytes")
