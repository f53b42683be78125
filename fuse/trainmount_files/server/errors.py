"""What the server answers when it refuses. Raised anywhere below `service`, which turns it into a
response.

ServerError
├── ApiError         a call of the Files API or Unity Catalog: JSON with `error_code`, `message` and
a reason
└── StorageError     a presigned URL: XML, as an object store answers
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Final
from xml.sax.saxutils import escape

__all__ = [
    "ApiError",
    "ServerError",
    "StorageError",
    "already_exists",
    "directory_not_found",
    "disk_refusal",
    "expired_url",
    "file_not_found",
    "invalid",
]

_ERROR_INFO: Final = "type.googleapis.com/google.rpc.ErrorInfo"
_DOMAIN: Final = "filesystem.databricks.com"


class ServerError(Exception):
    """The request is refused with `status`."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, code, message)
        self.status = status
        self.code = code
        self.message = message


class ApiError(ServerError):
    """Refusal of an API call. `code` is what SDKs choose their exception by, `reason` what they
    look at within one.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        reason: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, code, message)
        self.reason = reason
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        details = []
        if self.reason is not None:
            info = {"@type": _ERROR_INFO, "reason": self.reason, "domain": _DOMAIN, "metadata": {}}
            details.append(info)
        return {"error_code": self.code, "message": self.message, "details": details}


class StorageError(ServerError):
    """Refusal of a presigned request, in the words of an object store."""

    def __init__(self, status: int, code: str, message: str, *, detail: str | None = None) -> None:
        super().__init__(status, code, message)
        self.detail = detail

    @classmethod
    def of(cls, error: ServerError) -> StorageError:
        return error if isinstance(error, cls) else cls(error.status, error.code, error.message)

    def to_xml(self) -> str:
        elements = {"Code": self.code, "Message": self.message}
        if self.detail is not None:
            elements["AuthenticationErrorDetail"] = self.detail
        inner = "".join(f"<{name}>{escape(text)}</{name}>" for name, text in elements.items())
        return f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'


def expired_url(code: str = "AccessDenied") -> StorageError:
    """A signed URL whose time is over, as S3, Azure (`AuthenticationFailed`) or temporary
    credentials (`ExpiredToken`) say it.
    """
    if code == "AuthenticationFailed":
        message = "Server failed to authenticate the request. Check the value of the signature."
        detail = "Signature not valid in the specified time frame: it has expired."
        return StorageError(403, code, message, detail=detail)
    if code == "ExpiredToken":
        return StorageError(400, code, "The provided token has expired.")
    return StorageError(403, code, "Request has expired")


def invalid(message: str, *, reason: str | None = None) -> ApiError:
    return ApiError(400, "INVALID_PARAMETER_VALUE", message, reason=reason)


def file_not_found(path: str) -> ApiError:
    message = f"The file being accessed is not found: {path}"
    return ApiError(404, "NOT_FOUND", message, reason="FILES_API_FILE_NOT_FOUND")


def directory_not_found(path: str) -> ApiError:
    message = f"The directory being accessed is not found: {path}"
    return ApiError(404, "NOT_FOUND", message, reason="FILES_API_DIRECTORY_IS_NOT_FOUND")


def already_exists(path: str) -> ApiError:
    message = f"Something exists at the path already: {path}"
    return ApiError(409, "ALREADY_EXISTS", message, reason="FILES_API_FILE_ALREADY_EXISTS")


def disk_refusal(error: OSError, path: str = "") -> ApiError | None:
    """What a client is told of an error of the server's disk; None for one that nobody planned."""
    where = f": {path}" if path else "."
    if error.errno in (errno.ENAMETOOLONG, errno.EILSEQ, errno.EINVAL) and path:
        return invalid(f"The disk of the server cannot hold this name{where}")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ApiError(507, "RESOURCE_EXHAUSTED", "The disk of the server is full.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        # A mistake in how the server was set up, which no repetition mends: not a 5xx.
        message = f"The server's own user may not do this on its disk{where}"
        return ApiError(403, "PERMISSION_DENIED", message)
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN):
        message = "The server has too much to do just now."
        return ApiError(503, "TEMPORARILY_UNAVAILABLE", message, headers={"Retry-After": "1"})
    return None
