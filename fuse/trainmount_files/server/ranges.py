"""The two conditional headers of a read: `Range` and `If-Unmodified-Since`. Pure; used by
`file_routes`.
"""

from __future__ import annotations

import re
from email.utils import parsedate_to_datetime
from typing import Final

from trainmount_files.server.errors import ApiError
from trainmount_files.server.store import FileInfo
from trainmount_files.volume import ByteRange

__all__ = ["parse_range", "require_unmodified"]

_RANGE: Final = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)


def parse_range(header: str | None, size_bytes: int) -> ByteRange | None:
    """The part of the file that was asked for, cut at its end; None for all of it.

    As RFC 9110 wants it, a header that is malformed or names several ranges is ignored.

    Raises:
        ApiError: 416, the range begins past the end.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or not any(match.groups()):
        return None
    first, last = match.groups()
    if not first:
        length = int(last)
        start, end = max(0, size_bytes - length), size_bytes
        satisfiable = length > 0 and size_bytes > 0
    else:
        start = int(first)
        end = min(int(last) + 1, size_bytes) if last else size_bytes
        if last and int(last) < start:
            return None
        satisfiable = start < size_bytes
    if not satisfiable:
        headers = {"Content-Range": f"bytes */{size_bytes}"}
        message = f"The range begins past the end of the file of {size_bytes} bytes."
        raise ApiError(416, "INVALID_PARAMETER_VALUE", message, headers=headers)
    return ByteRange(start, end)


def require_unmodified(header: str | None, info: FileInfo, path: str) -> None:
    """Raises ApiError 412 if the file changed after the moment in the header, to the second."""
    if not header:
        return
    try:
        moment = parsedate_to_datetime(header)
    except (TypeError, ValueError):
        return
    if info.mtime_seconds > moment.timestamp():
        raise ApiError(412, "PRECONDITION_FAILED", f"The file has changed since {header}: {path}")
