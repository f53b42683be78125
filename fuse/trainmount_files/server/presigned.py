"""Signed URLs: the holder may do one thing to one file until the URL expires, with no token.

Made by `file_routes` and `upload_routes`, checked by `service`. The signature covers everything,
the key is the directory's own (`Staging.read_secret`), so that a URL outlives a restart of the
server.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from trainmount_files.server.errors import StorageError, expired_url, invalid

__all__ = ["PREFIX", "Claims", "Signer", "parse_expire_time"]

PREFIX: Final = "/presigned/"
"""Not below `/api/`, as an object store has another host."""

_DEFAULT_LIFETIME_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Claims:
    """What a URL allows."""

    action: str
    """`get`, `put`, `resume` or `abort`."""

    target: str
    """The path of a file to get, or the token of an upload."""

    part_number: int = 0
    """For `put`."""


class Signer:
    """Signs and checks with one key. Any thread."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def sign_text(self, text: str) -> str:
        """64 hexadecimal digits."""
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def verify_text(self, text: str, signature: str) -> bool:
        return hmac.compare_digest(
            self.sign_text(text).encode(), signature.encode("utf-8", "replace")
        )

    def sign(self, claims: Claims, expires_at: float) -> str:
        """The path of a signed URL. `expires_at` is in seconds since the epoch."""
        document = [claims.action, claims.target, claims.part_number, expires_at]
        payload = base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")
        return f"{PREFIX}{payload}.{self.sign_text(payload)}"

    def verify(self, url_path: str) -> Claims:
        """Raises StorageError 403 for a URL that is not ours or has expired."""
        payload, _, signature = url_path.removeprefix(PREFIX).partition(".")
        if not self.verify_text(payload, signature):
            raise StorageError(
                403, "SignatureDoesNotMatch", "The signature of the URL does not match."
            )
        action, target, part_number, expires_at = _decode(payload)
        if time.time() > expires_at:
            raise expired_url()
        return Claims(action, target, part_number)


def parse_expire_time(text: object, max_lifetime_seconds: float) -> float:
    """Seconds since the epoch from an RFC 3339 time; an hour from now without one, and never later
    than the longest lifetime.
    """
    now = time.time()
    if text is None or text == "":
        return now + min(_DEFAULT_LIFETIME_SECONDS, max_lifetime_seconds)
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        raise invalid(f"expire_time must be an RFC 3339 time, got {text}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return min(moment.timestamp(), now + max_lifetime_seconds)


def _decode(payload: str) -> tuple[str, str, int, float]:
    try:
        document: Any = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        action, target, part_number, expires_at = document
    except (binascii.Error, ValueError, TypeError):
        raise StorageError(400, "InvalidArgument", "The URL is malformed.") from None
    return str(action), str(target), int(part_number), float(expires_at)
