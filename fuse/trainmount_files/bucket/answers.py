"""From obstore's errors to ours. obstore tells HTTP status and the store's code only in an error's
text, so this is the one place that reads such texts. They hold URLs, and a signature where the
store repeats it: nothing of them but the status, the code and the system's words is passed on.
"""

from __future__ import annotations

import re
from typing import Final

from trainmount_files.errors import (
    NO_SPACE_BY_CODE,
    AlreadyExists,
    InexactRange,
    InvalidRequest,
    IsADirectory,
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
from trainmount_files.redaction import one_line

__all__ = ["CREDENTIALS_HINT", "error_of_answer", "refused_key", "to_volume_error"]

_STATUS: Final = re.compile(r"\bstatus(?: code)?: (\d{3})\b")
_CODE: Final = re.compile(r"<Code>(\w{1,80})</Code>")
_SYSTEM: Final = re.compile(r'kind: \w+,\s*message: "([^"]{1,120})"')
_NO_CREDENTIALS: Final = re.compile(r"//(169\.254\.|metadata\.google\.internal|\[fd00:ec2)")
_NOT_THE_RANGE: Final = re.compile(
    r"\b(NotPartial|UnexpectedRange|NoContentRange|ParseRange|StartTooLarge|Inconsistent)\b"
)
_REFUSED_KEY: Final = re.compile(
    r'[Pp]ath "(.*?)"(?: contained empty|: Encountered illegal)', re.DOTALL
)

_BY_CLASS: Final[dict[str, type[VolumeError]]] = {
    "FileNotFoundError": NotFound,
    "AlreadyExistsError": AlreadyExists,
    "PreconditionError": PreconditionFailed,
    "PermissionDeniedError": PermissionDenied,
    "UnauthenticatedError": Unauthenticated,
    "NotSupportedError": Unsupported,
    "InvalidPathError": InvalidRequest,
    "UnknownConfigurationKeyError": InvalidRequest,
}

_BY_STATUS: Final[dict[int, type[VolumeError]]] = {
    401: Unauthenticated,
    403: PermissionDenied,
    404: NotFound,
    408: Unavailable,
    409: AlreadyExists,
    412: PreconditionFailed,
    413: TooLarge,
    416: InexactRange,
    429: Unavailable,
    507: NoSpace,
}

_BY_CODE: Final[dict[str, type[VolumeError]]] = {
    **NO_SPACE_BY_CODE,
    "InvalidAccessKeyId": Unauthenticated,
    "SignatureDoesNotMatch": Unauthenticated,
    "ExpiredToken": Unauthenticated,
    "InvalidToken": Unauthenticated,
    "TokenRefreshRequired": Unauthenticated,
    "AuthenticationFailed": Unauthenticated,
    "InvalidAuthenticationInfo": Unauthenticated,
    "NoAuthenticationInformation": Unauthenticated,
    "EntityTooLarge": TooLarge,
    "RequestBodyTooLarge": TooLarge,
    # Gateways over a file system.
    "ObjectParentIsFile": NotADirectory,
    "ExistingObjectIsDirectory": IsADirectory,
    "SlowDown": Unavailable,
    "ServerBusy": Unavailable,
    "OperationTimedOut": Unavailable,
    # Removed by the store's rule for unfinished uploads, or by somebody: another try may succeed.
    "NoSuchUpload": Unavailable,
    "InvalidBlockList": Unavailable,
    # Somebody else writes the same key at this moment.
    "ConditionalRequestConflict": Unavailable,
}

_REASON_BY_CODE: Final = {
    "NoSuchBucket": "no such bucket",
    "ContainerNotFound": "no such bucket",
    "NoSuchUpload": "the store does not know the upload any more",
    "InvalidBlockList": "the store does not know the upload any more",
}

_REASONS: Final[dict[type[VolumeError], str]] = {
    NotFound: "nothing is there",
    AlreadyExists: "something is at the path",
    PreconditionFailed: "the file has changed",
    PermissionDenied: "the identity may not do this",
    Unauthenticated: "the store does not accept the credentials",
    InexactRange: "the store did not answer with the range that was asked for",
    IsADirectory: "is a directory",
    NotADirectory: "a parent of it is a file",
    TooLarge: "above a limit of the store",
    Unsupported: "the store cannot do this",
    InvalidRequest: "the store refuses the request",
    NoSpace: "the store is full",
    QuotaExceeded: "the bucket is at its quota",
    Unavailable: "the store cannot be reached",
}

CREDENTIALS_HINT: Final = (
    "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, or AZURE_STORAGE_ACCOUNT_NAME and "
    "AZURE_STORAGE_ACCOUNT_KEY, or give storage options"
)


def to_volume_error(error: Exception, operation: str, path: str) -> VolumeError:
    """What an error of obstore means for the caller. Never holds the error or its text."""
    text = str(error)
    key = refused_key(error)
    if key is not None:
        return InvalidRequest(operation, path, f"no path can name the key {key}")
    if isinstance(error, UnicodeError):
        return InvalidRequest(operation, ascii(path)[1:-1], "the name is no Unicode text")
    if _NO_CREDENTIALS.search(text):
        # It had nothing else to try than the metadata service of a machine in a cloud.
        return Unauthenticated(operation, path, CREDENTIALS_HINT)
    found_status = _STATUS.search(text)
    status = int(found_status[1]) if found_status else 0
    code = _code_in(text)
    kind = _kind(error, text, status, code)
    system = _SYSTEM.findall(text) if not status and kind is Unavailable else []
    return _told(
        kind, operation, path, status, code, one_line(system[-1]).lower() if system else ""
    )


def error_of_answer(operation: str, path: str, status: int, body: str) -> VolumeError:
    """As `to_volume_error`, of an answer of S3 with a status of 300 or above."""
    code = _code_in(body)
    kind = _BY_CODE.get(code) or _of_status(status) or Unavailable
    return _told(kind, operation, path, status, code)


def _told(
    kind: type[VolumeError], operation: str, path: str, status: int, code: str, more: str = ""
) -> VolumeError:
    reason = _REASON_BY_CODE.get(code, _REASONS[kind])
    words = (f"HTTP {status}" if status else "", code, more)
    details = " ".join(word for word in words if word)
    return kind(operation, path, f"{reason} ({details})" if details else reason)


def _code_in(text: str) -> str:
    found = _CODE.search(text)
    return found[1] if found else ""


def _of_status(status: int) -> type[VolumeError] | None:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return InvalidRequest if 300 <= status < 500 else None


def _kind(error: Exception, text: str, status: int, code: str) -> type[VolumeError]:
    if code in _BY_CODE:
        return _BY_CODE[code]
    by_class = _BY_CLASS.get(type(error).__name__)
    if by_class is not None:
        return by_class
    by_status = _of_status(status)
    if by_status is not None:
        return by_status
    if _NOT_THE_RANGE.search(text):
        return InexactRange
    if isinstance(error, ValueError | TypeError):
        return InvalidRequest
    if isinstance(error, RuntimeError):
        # obstore's word for what a store has no call for.
        return Unsupported
    return Unavailable


def refused_key(error: Exception) -> str | None:
    """The key that obstore met and takes for no path, escaped; None for any other error."""
    found = _REFUSED_KEY.search(str(error))
    if found is None:
        return None
    return one_line(ascii(found[1]))
