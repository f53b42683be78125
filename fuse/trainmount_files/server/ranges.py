"""The header `Range` of a read. Pure; used by `bodies`."""

from __future__ import annotations

import re
from typing import Final

from trainmount_files.server.errors import ApiError
from trainmount_files.volume import ByteRange

__all__ = ["parse_range"]

_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)


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
