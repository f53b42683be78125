"""Pages of a directory and of Unity Catalog's lists, with opaque tokens.

The token is the last name of the page before, so a page is right whatever was made or removed in
between: no entry that stays is left out or told twice. Pure but for the store that is handed in.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import json
from typing import Any, Final

from trainmount_files.server.errors import invalid
from trainmount_files.server.paths import VolumePath
from trainmount_files.server.store import DirectoryStore, Entry

__all__ = ["MAX_PAGE_SIZE", "list_directory_page", "name_page", "parse_page_size"]

MAX_PAGE_SIZE: Final = 1000

_NANOSECONDS_PER_MILLISECOND: Final = 1_000_000


def parse_page_size(
    text: str | None, *, name: str = "page_size", maximum: int = MAX_PAGE_SIZE
) -> int:
    """Absent or 0 is the maximum, and so is anything larger. Raises ApiError for what is not a
    number.
    """
    if not text:
        return maximum
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise invalid(f"{name} must be a number of at least 0, got {text}")
    return min(value or maximum, maximum)


def name_page(names: list[bytes], token: str | None, size: int) -> tuple[list[bytes], str | None]:
    """The next `size` names after `token` in byte order, and the token of the page after, if there
    is one.
    """
    after = _decode_token(token)
    candidates = names if after is None else [name for name in names if name > after]
    page = heapq.nsmallest(size, candidates)
    if len(page) < len(candidates):
        return page, _encode_token(page[-1])
    return page, None


def list_directory_page(
    store: DirectoryStore, path: VolumePath, token: str | None, size: int
) -> str:
    """The JSON of one page, as text: to write it takes a while too. Blocking."""
    entries, next_after = store.list_page(path, _decode_token(token) or b"", size)
    answer: dict[str, Any] = {"contents": [_describe(path, entry) for entry in entries]}
    if next_after:
        answer["next_page_token"] = _encode_token(next_after)
    return json.dumps(answer)


def _describe(path: VolumePath, entry: Entry) -> dict[str, Any]:
    described: dict[str, Any] = {
        "path": f"{path}/{entry.name}",
        "name": entry.name,
        "is_directory": entry.file is None,
    }
    if entry.file is not None:
        described["file_size"] = entry.file.size_bytes
        described["last_modified"] = entry.file.mtime_ns // _NANOSECONDS_PER_MILLISECOND
    return described


def _encode_token(name: bytes) -> str:
    return base64.urlsafe_b64encode(name).decode()


def _decode_token(token: str | None) -> bytes | None:
    if not token:
        return None
    try:
        return base64.b64decode(token, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise invalid("page_token is not one of this server's.") from None
