"""Conditional headers: which requests go through for which version of a file. Pure.

`file_routes` and `bodies` ask for reads, `store` for writes, under its lock. Version 2.0 of the API
knows `If-Unmodified-Since` on reads alone; 3.0 has all of them. `If-Range` goes with any `Range`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final

from trainmount_files.server.errors import ApiError

__all__ = ["UNCONDITIONAL", "Conditions", "FileInfo", "file_info"]


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A regular file at one moment."""

    size_bytes: int
    mtime_ns: int
    inode: int = 0

    @property
    def mtime_seconds(self) -> int:
        """Cut, not rounded: what `Last-Modified` can say."""
        return self.mtime_ns // 1_000_000_000

    @property
    def etag(self) -> str:
        """Of these bytes, quotes included. Each publishing makes a new inode and a new time."""
        return f'"{self.mtime_ns:x}-{self.inode:x}-{self.size_bytes:x}"'

    @property
    def last_modified(self) -> str:
        """As an HTTP date."""
        return formatdate(self.mtime_seconds, usegmt=True)


def file_info(status: os.stat_result) -> FileInfo:
    return FileInfo(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The headers of one request as they came; None was not sent."""

    if_match: str | None = None
    if_none_match: str | None = None
    if_modified_since: str | None = None
    if_unmodified_since: str | None = None
    if_range: str | None = None

    @classmethod
    def of_headers(cls, headers: Mapping[str, str], *, version: str) -> Conditions:
        since, ranged = headers.get("If-Unmodified-Since"), headers.get("If-Range")
        if version == "2.0":
            return cls(if_unmodified_since=since, if_range=ranged)
        return cls(
            headers.get("If-Match"),
            headers.get("If-None-Match"),
            headers.get("If-Modified-Since"),
            since,
            ranged,
        )

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Conditions:
        return cls(**record)

    def to_record(self) -> dict[str, str | None]:
        return asdict(self)

    def require_read(self, info: FileInfo, path: str) -> None:
        """In the order of RFC 9110, 13.2.2.

        Raises:
            ApiError: 412 for a version that must not be read, 304 for one that the client has.
        """
        if self.if_match is not None:
            if not _names(self.if_match, info):
                raise _failed(path)
        elif _is_after(info, self.if_unmodified_since):
            raise _failed(path)
        if self.if_none_match is not None:
            if _names(self.if_none_match, info):
                raise _not_modified(info)
        elif self.if_modified_since and _is_after(info, self.if_modified_since) is False:
            raise _not_modified(info)

    def allow_range(self, info: FileInfo) -> bool:
        """Whether a part of the file may go to a client that has the rest of the version that it
        names; all of the file goes to others.
        """
        return self.if_range is None or self.if_range.strip() in (info.etag, info.last_modified)

    def require_write(self, current: FileInfo | None, path: str) -> None:
        """`current` is what is at the path, None for nothing. Times count for reads alone.

        Raises:
            ApiError: 412, the write is for another version.
        """
        if self.if_match is not None and (current is None or not _names(self.if_match, current)):
            raise _failed(path)
        if (
            self.if_none_match is not None
            and current is not None
            and _names(self.if_none_match, current)
        ):
            raise _failed(path)

    @property
    def are_of_writes(self) -> bool:
        """Whether a write has to look at what is there."""
        return self.if_match is not None or self.if_none_match is not None


UNCONDITIONAL: Final = Conditions()


def _names(header: str, info: FileInfo) -> bool:
    """Whether a list of tags, or `*`, has the tag of this file."""
    tags = [tag.strip().removeprefix("W/") for tag in header.split(",")]
    return "*" in tags or info.etag in tags


def _is_after(info: FileInfo, date: str | None) -> bool | None:
    """Whether the file changed after the moment, to the second; None for no date or nonsense."""
    if not date:
        return None
    try:
        moment = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return None
    return info.mtime_seconds > moment.timestamp()


def _failed(path: str) -> ApiError:
    message = f"The file is not the version that the request is for: {path}"
    return ApiError(412, "PRECONDITION_FAILED", message)


def _not_modified(info: FileInfo) -> ApiError:
    headers = {"ETag": info.etag, "Last-Modified": info.last_modified}
    return ApiError(304, "NOT_MODIFIED", "", headers=headers)
