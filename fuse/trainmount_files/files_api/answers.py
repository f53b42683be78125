"""What an answer means: HTTP statuses and error bodies to errors, headers to sizes, times and
ranges. No I/O.

Bodies are JSON from the Files API (`error_code`, `message`, `details`) and XML from object stores
behind signed URLs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, Final

from trainmount_files.errors import (
    NO_SPACE_BY_CODE,
    AlreadyExists,
    DirectoryNotEmpty,
    InexactRange,
    InvalidRequest,
    NoSpace,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    TooLarge,
    Unauthenticated,
    Unavailable,
    Unsupported,
    VolumeError,
)
from trainmount_files.redaction import one_line
from trainmount_files.retry import RETRYABLE_STATUSES
from trainmount_files.volume import ByteRange, FileStat

__all__ = [
    "Version",
    "content_length",
    "error_of",
    "file_stat",
    "is_expired_url",
    "is_identity",
    "is_passing",
    "json_object",
    "last_modified",
    "parse_object",
    "parse_size",
    "range_problem",
]

_NANOSECONDS: Final = 1_000_000_000

_BY_CODE: Final[dict[str, type[VolumeError]]] = {
    "ALREADY_EXISTS": AlreadyExists,
    "RESOURCE_ALREADY_EXISTS": AlreadyExists,
    "RESOURCE_DOES_NOT_EXIST": NotFound,
    "RESOURCE_EXHAUSTED": Unavailable,
    "REQUEST_LIMIT_EXCEEDED": Unavailable,
}

_BY_STATUS: Final[dict[int, type[VolumeError]]] = {
    400: InvalidRequest,
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    405: Unsupported,
    408: Unavailable,
    409: AlreadyExists,
    410: NotFound,
    412: PreconditionFailed,
    413: TooLarge,
    416: InexactRange,
    425: Unavailable,
    429: Unavailable,
    501: Unsupported,
    507: NoSpace,
}

_MAKING: Final = frozenset({"put", "upload", "make directory", "rename"})
"""Operations that something at the path can stand in the way of."""

_NOT_EMPTY_REASON: Final = "FILES_API_DIRECTORY_IS_NOT_EMPTY"

_PASSING_TEXTS: Final = (
    "ClusterNotReadyException",
    "Please try again later or try a faster operation.",
    "RPC token bucket limit has been exceeded",
    "There is no worker environment with id",
    "Unexpected error",
    "Unknown worker environment",
    "UnknownWorkerEnvironmentException",
    "does not have any associated worker environments",
)
"""Messages of the service that mean "again" whatever the status; the only place where a text
decides. The list is that of databricks-sdk 0.162.0, `_base_client.py`, `_is_retryable`.
"""

_XML_ERROR_BYTES: Final = 8192
"""Where an object store's error document must name its code."""


def error_of(
    operation: str,
    path: str,
    status: int,
    body: bytes,
    *secrets: str,
) -> VolumeError:
    """The error that an answer with a status of 300 or above stands for; its text is the server's,
    redacted.
    """
    fields = json_object(body)
    code = str(fields.get("error_code") or fields.get("code") or _xml_text(body, "Code"))
    message = str(fields.get("message") or fields.get("detail") or _xml_text(body, "Message"))
    details = fields.get("details")
    reasons = (
        {str(detail.get("reason")) for detail in details if isinstance(detail, dict)}
        if isinstance(details, list)
        else set()
    )
    said = " ".join(part for part in (code, message) if part)
    text = one_line(f"HTTP {status} {said}".strip(), *secrets)
    if _NOT_EMPTY_REASON in reasons:
        return DirectoryNotEmpty(operation, path, text)
    by_status = _BY_STATUS.get(status)
    # RESOURCE_EXHAUSTED is said of a full disk (507) as well as of too many requests.
    by_code = None if by_status is NoSpace else _BY_CODE.get(code)
    kind = NO_SPACE_BY_CODE.get(code) or by_code or by_status
    if kind is AlreadyExists and operation not in _MAKING:
        # Where nothing was to be made, the conflict is about the request.
        kind = InvalidRequest
    if kind is None:
        # A redirect is not followed: it would carry the token to another host.
        kind = Unsupported if status < 400 else InvalidRequest if status < 500 else Unavailable
    return kind(operation, path, text)


def is_passing(status: int, body: bytes) -> bool:
    """Whether an error may pass: another try of the same request can succeed."""
    if status in RETRYABLE_STATUSES:
        return True
    # What is at the path, or is not, does not depend on how busy the service is.
    if status < 400 or status in (404, 409, 412):
        return False
    message = str(json_object(body).get("message", ""))
    return any(text in message for text in _PASSING_TEXTS)


def is_expired_url(status: int, body: bytes) -> bool:
    """Whether an object store refused a signed URL only because its time is over."""
    if status not in (400, 401, 403):
        return False
    code = _xml_text(body, "Code")
    if code in ("ExpiredToken", "RequestExpired"):
        return True
    if code == "AuthenticationFailed":
        detail = _xml_text(body, "AuthenticationErrorDetail")
        return "not valid in the specified time frame" in detail
    return code == "AccessDenied" and "Request has expired" in _xml_text(body, "Message")


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; empty where it is none."""
    return parse_object(body) or {}


def parse_object(body: bytes) -> dict[str, Any] | None:
    """The JSON object in `body`; None where it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def content_length(headers: Mapping[str, str]) -> int | None:
    """The size of a file from the answer to HEAD; None where it is not told.

    What was compressed on its way has another length than the file.
    """
    return parse_size(headers.get("Content-Length", "")) if is_identity(headers) else None


def parse_size(text: str) -> int | None:
    """A number of bytes; None for anything but up to 19 digits."""
    return int(text) if _SIZE.fullmatch(text.strip()) else None


def is_identity(headers: Mapping[str, str]) -> bool:
    """Whether a body's bytes are the file's, not compressed."""
    return headers.get("Content-Encoding", "identity").strip().lower() in ("", "identity")


def last_modified(headers: Mapping[str, str]) -> int | None:
    """Seconds since the epoch of `Last-Modified`; None where it is missing or no date."""
    value = headers.get("Last-Modified")
    if value is None:
        return None
    try:
        return int(parsedate_to_datetime(value).timestamp())
    except (ValueError, TypeError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class Version:
    """Size and modification time as far as they are known; what `FileStat.version` holds."""

    size_bytes: int | None = None
    mtime_seconds: int | None = None
    """0 stands for a store that does not tell, as in `FileStat.mtime_ns`."""

    @classmethod
    def parse(cls, text: str | None) -> Version | None:
        """None where `text` is None or no version of a Files API file: then it matches nothing."""
        if text is None:
            return cls()
        size, _, seconds = text.partition("-")
        size_bytes, mtime_seconds = parse_size(size), parse_size(seconds)
        if size_bytes is None or mtime_seconds is None:
            return None
        return cls(size_bytes, mtime_seconds or None)

    def to_header(self) -> dict[str, str]:
        """The `If-Unmodified-Since` header for it; none where the time is unknown."""
        if self.mtime_seconds is None:
            return {}
        return {"If-Unmodified-Since": formatdate(self.mtime_seconds, usegmt=True)}

    def contradicts(self, other: Version) -> bool:
        """Whether both know something that differs."""
        return any(
            ours is not None and theirs is not None and ours != theirs
            for ours, theirs in (
                (self.size_bytes, other.size_bytes),
                (self.mtime_seconds, other.mtime_seconds),
            )
        )

    def merged(self, other: Version) -> Version:
        """What is known from both; ours counts where both know."""
        return Version(
            self.size_bytes if self.size_bytes is not None else other.size_bytes,
            self.mtime_seconds if self.mtime_seconds is not None else other.mtime_seconds,
        )

    @property
    def is_whole(self) -> bool:
        """Whether size and time are known, so that two answers can be told to be of one file."""
        return self.size_bytes is not None and self.mtime_seconds is not None


def file_stat(path: str, size_bytes: int, mtime_ns: int) -> FileStat:
    """A file of the Files API: HEAD tells seconds, a listing milliseconds, so the version holds
    seconds.
    """
    return FileStat(
        path,
        is_directory=False,
        size_bytes=size_bytes,
        mtime_ns=mtime_ns,
        version=f"{size_bytes}-{mtime_ns // _NANOSECONDS}",
    )


_SIZE: Final = re.compile(r"[0-9]{1,19}")

_CONTENT_RANGE: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


def range_problem(
    status: int, headers: Mapping[str, str], wanted: ByteRange
) -> tuple[str, int | None]:
    """Why a successful answer is not `wanted` ("" where it is), and the whole file's size where it
    is told.
    """
    if not is_identity(headers):
        return "the body was compressed on its way", None
    if status == 200 and wanted.start == 0 and content_length(headers) == wanted.end:
        # A server may ignore the header; then the whole file is the range.
        return "", wanted.end
    if status != 206:
        return f"asked for a range, the answer was HTTP {status} with something else", None
    match = _CONTENT_RANGE.fullmatch(headers.get("Content-Range", "").strip())
    if match is None:
        return "the answer does not say which range it is", None
    total = None if match[3] == "*" else int(match[3])
    if (int(match[1]), int(match[2]) + 1) != (wanted.start, wanted.end):
        if total is not None and wanted.end > total:
            return "the range reaches past the end of the file", total
        return "the answer is another range than asked for", total
    length = headers.get("Content-Length")
    if length is not None and length.strip() != str(len(wanted)):
        return "the answer announces another length than the range has", total
    return "", total


def _xml_text(body: bytes, name: str) -> str:
    """Text of the first element `name`. No XML parser: it would fetch entities and the document is
    a stranger's.
    """
    start = body[:_XML_ERROR_BYTES].decode(errors="replace")
    if not start.lstrip("\ufeff \r\n\t").startswith("<"):
        return ""
    match = re.search(rf"<{name}>([^<]*)</{name}>", start)
    return match[1].strip() if match else ""
