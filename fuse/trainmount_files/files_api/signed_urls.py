"""Signed download URLs, kept until they end. Called by `download.py`.

One thread asks for a path's URL while the others that need it wait: eight readers of one file cost
one request, when the file is opened and each time the URL expires. A refusal is shared as well, so
that nobody waits for the same answer after another.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic, time
from typing import Any, Final

from trainmount_files.cancellation import Either, TimeLimit
from trainmount_files.errors import Cancelled, NotFound, Unavailable, VolumeError
from trainmount_files.files_api.answers import json_object
from trainmount_files.files_api.api import Call, FilesApi
from trainmount_files.retry import Cancellation

__all__ = ["SignedUrl", "SignedUrls", "expire_time", "parse_signed_url"]

_KEPT: Final = 4096
"""URLs kept: about 1 KiB each."""

_MARGIN_SECONDS: Final = 300
"""A URL is not used in its last minutes, since a slow transfer begun then may be refused in the
middle.
"""

_OWN_HEADERS: Final = frozenset(
    {"accept", "accept-encoding", "content-length", "content-type", "host", "range"}
    | {"authorization", "cookie", "if-match", "if-none-match", "if-range"}
    | {"if-modified-since", "if-unmodified-since"}
    | {"connection", "expect", "keep-alive", "proxy-authorization", "proxy-connection", "te"}
    | {"trailer", "transfer-encoding", "upgrade"}
)
"""What we set ourselves, what frames a request, and what makes it another one; a URL's headers may
not change it.
"""

_PATIENCE_SECONDS: Final = 5.0
"""There is another way to the bytes, so asking for a URL does not wait long."""

_SILENCE_SECONDS: Final = 15.0
"""How long a store may be silent when it is asked for one."""

_REFUSED_SECONDS: Final = 5.0
"""How long a refusal is believed. Who waited for the same URL takes it, and so do those who come
while the first of them finds out whether the bytes can be had without.
"""

_POLL_SECONDS: Final = 0.05


@dataclass(frozen=True, slots=True)
class SignedUrl:
    """A URL that authenticates by itself, and the headers to send with it."""

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)

    def secrets(self) -> tuple[str, ...]:
        """What no message may repeat: a store may name the URL, or parts of it, in its errors."""
        _, _, rest = self.url.partition("://")
        target = rest[rest.find("/") :] if "/" in rest else rest
        path, _, query = target.partition("?")
        values = [value.partition("=")[2] for value in query.split("&")]
        parts = (target, query, path.strip("/"), *(value for value in values if len(value) > 7))
        return tuple(part for part in (*parts, *self.headers.values()) if len(part) > 7)


def parse_signed_url(value: Any) -> SignedUrl | None:
    """The URL in an answer's object `{"url", "headers": [{"name", "value"}]}`; None where it is
    something else.
    """
    if not isinstance(value, dict) or not isinstance(value.get("url"), str):
        return None
    url: str = value["url"]
    if not url.startswith(("http://", "https://")):
        return None
    headers: dict[str, str] = {}
    for header in value.get("headers") or ():
        if not isinstance(header, dict):
            return None
        name, content = header.get("name"), header.get("value")
        if not isinstance(name, str) or not isinstance(content, str):
            return None
        if name.lower() not in _OWN_HEADERS:
            headers[name] = content
    return SignedUrl(url, headers)


def expire_time(lifetime_seconds: float) -> str:
    """The instant that many seconds from now, as the API wants it."""
    moment = datetime.fromtimestamp(time(), UTC) + timedelta(seconds=lifetime_seconds)
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(slots=True)
class _Slot:
    """One path's URL; its lock is held while a new one is asked for."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    signed: SignedUrl | None = None
    refusal: VolumeError | None = None
    good_until: float = 0.0
    """Of the URL, or of the refusal."""
    refused_at: float = 0.0


class SignedUrls:
    """Download URLs by path, of one process. Any thread may call."""

    def __init__(self, api: FilesApi, root: str, lifetime_seconds: float) -> None:
        self._api = api
        self._root = root
        self._lifetime_seconds = lifetime_seconds
        # path -> slot, least recently used first; guarded by the lock, which is never held during a
        # request.
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: str, cancel: Cancellation | None = None) -> SignedUrl:
        """A URL that is good now.

        Raises:
            Cancelled: `cancel` is set, though another thread may still be asking.
            VolumeError: the store gives none; the bytes may still be had without.
        """
        return self._get(path, None, cancel)

    def renewed(
        self, path: str, expired: SignedUrl, cancel: Cancellation | None = None
    ) -> SignedUrl:
        """Another URL than `expired`, which was refused: the one somebody has renewed since, or a
        new one.

        Raises:
            VolumeError: as `get`.
        """
        return self._get(path, expired, cancel)

    def has(self, path: str) -> bool:
        """Whether `get` would answer without a request, as far as can be told."""
        with self._lock:
            slot = self._slots.get(path)
        return slot is not None and slot.signed is not None and monotonic() < slot.good_until

    def drop(self, path: str) -> None:
        """Forget the URL of a path whose file is gone or another one now; a refusal is kept."""
        with self._lock:
            slot = self._slots.get(path)
        if slot is not None:
            slot.signed = None

    def _get(self, path: str, refused: SignedUrl | None, cancel: Cancellation | None) -> SignedUrl:
        with self._lock:
            slot = self._slots.setdefault(path, _Slot())
            self._slots.move_to_end(path)
            while len(self._slots) > _KEPT:
                self._slots.popitem(last=False)
        came = monotonic()
        attempts = self._api.attempts(cancel)
        while not slot.lock.acquire(timeout=_POLL_SECONDS):
            attempts.check_cancelled("read", path)
        try:
            signed, refusal = slot.signed, slot.refusal
            is_good = monotonic() < slot.good_until
            if signed is not None and signed is not refused and is_good:
                return signed
            if refusal is not None and (is_good or came < slot.refused_at):
                raise type(refusal)("read", path, refusal.reason)
            return self._renew(slot, path, cancel)
        finally:
            slot.lock.release()

    def _renew(self, slot: _Slot, path: str, cancel: Cancellation | None) -> SignedUrl:
        """Ask, and keep what is answered. The slot is locked."""
        slot.signed = slot.refusal = None
        began = monotonic()
        try:
            slot.signed = signed = self._ask(path, cancel)
        except Cancelled:
            # This caller's; the next one asks.
            raise
        except VolumeError as refusal:
            # Not the error itself, whose traceback holds this caller's buffers.
            slot.refusal = type(refusal)("read", path, refusal.reason)
            slot.refused_at = monotonic()
            # A file that is not there may come at any time, and its URL with it.
            believed = 0.0 if isinstance(refusal, NotFound) else _REFUSED_SECONDS
            slot.good_until = slot.refused_at + believed
            raise
        margin = min(_MARGIN_SECONDS, self._lifetime_seconds / 10)
        slot.good_until = began + self._lifetime_seconds - margin
        return signed

    def _ask(self, path: str, cancel: Cancellation | None) -> SignedUrl:
        call = Call(
            operation="read",
            path=path,
            method="POST",
            target="/create-download-url",
            expects_json=True,
            query={
                "path": f"{self._root}/{path}",
                "expire_time": expire_time(self._lifetime_seconds),
            },
        )
        silence = TimeLimit(_SILENCE_SECONDS)
        limit = silence if cancel is None else Either(cancel, silence)
        try:
            outcome = self._api.call(call, cancel=limit, within_seconds=_PATIENCE_SECONDS)
        except Cancelled:
            self._api.attempts(cancel).check_cancelled("read", path)
            raise Unavailable("read", path, "the store gave no signed URL in time") from None
        reply = outcome.unwrap()
        signed = parse_signed_url(json_object(reply.body))
        if signed is None:
            failure: VolumeError = Unavailable("read", path, "the store gave no usable signed URL")
            raise failure
        return signed
