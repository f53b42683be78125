"""Exactly one range of one file, whatever happens on the way. Called by `volume.py`.

There are two ways to the bytes: a signed URL of the object store, and the Files API itself. A try
on one of them has one of a few ends (`_Next`); only this module decides what follows.

    read -> _try -> bytes in place      done
                 -> part of them        the rest, with one Range header at the first missing byte
                 -> RETRY               the same way again, when the policy says (throttled, broken)
                 -> AGAIN               at once with new credentials, where the old ones had ended
                 -> RENEW               a new URL, asked for by one thread (the URL expired)
                 -> INEXACT             at once, a few times (the answer was another range)
                 -> OTHER_WAY           the Files API itself (the URL was refused)
                 -> RAISE

What arrived is kept only while both answers are told to be of one version of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from time import monotonic
from typing import Final, Protocol

from trainmount_files.errors import (
    InexactRange,
    PreconditionFailed,
    Unavailable,
    VolumeError,
)
from trainmount_files.files_api.answers import (
    Version,
    error_of,
    is_expired_url,
    is_passing,
    last_modified,
    range_problem,
)
from trainmount_files.files_api.api import FilesApi, encode_path, failure_of
from trainmount_files.files_api.signed_urls import SignedUrl, SignedUrls
from trainmount_files.files_api.transport import Answer, Transport, TransportError
from trainmount_files.retry import Cancellation
from trainmount_files.volume import ByteRange, Progress

__all__ = ["Downloads", "FileTarget", "MemoryTarget", "Target"]

_RENEWALS: Final = 3
"""URLs asked for in a row without a byte in between: then the refusal is about something else."""

_INEXACT_TRIES: Final = 3
"""Answers that are another range than asked for: a proxy may do that once, a store that does it
always is refused.
"""

_SIGNED_TRIES: Final = 4
"""Passing failures of the object store in a row before the Files API is asked instead."""

_WITHOUT_SIGNED_SECONDS: Final = 60.0
"""How long signed URLs are left alone after they were refused where the Files API then gave the
bytes.
"""

_NOTHING_KNOWN: Final = Version()


class _Next(Enum):
    DONE = auto()
    RETRY = auto()
    AGAIN = auto()
    RENEW = auto()
    OTHER_WAY = auto()
    INEXACT = auto()
    RAISE = auto()


@dataclass(frozen=True, slots=True)
class _Result:
    """The end of one try."""

    next: _Next
    error: VolumeError | None = None
    """None only with DONE."""
    received: int = 0
    """Bytes in place from the start of what was asked for."""
    seen: Version = _NOTHING_KNOWN
    """What the answer told about the file."""
    retry_after: str | None = None


@dataclass(slots=True)
class _Progress:
    """Where one call of `read` stands."""

    done: int
    pinned: Version
    """What the file must be: the caller's version, then what the first answer told as well."""
    direct: bool
    """Past the signed URL: the Files API itself is asked."""
    was_refused: bool = False
    renewals: int = 0
    failures: int = 0
    inexact: int = 0
    expired: SignedUrl | None = None
    reauthenticated: bool = False
    """The credentials were refused once, and others were there."""


class Target(Protocol):
    """Where the bytes of a range go."""

    def receive(
        self, answer: Answer, offset: int, size_bytes: int, cancel: Cancellation | None
    ) -> int:
        """Take in up to `size_bytes` bytes of a body as those from `offset` of the range on; how
        many came.
        """
        ...


class MemoryTarget:
    """A buffer as long as the range."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer

    def receive(
        self, answer: Answer, offset: int, size_bytes: int, cancel: Cancellation | None
    ) -> int:
        return answer.receive_into(self._buffer[offset : offset + size_bytes], cancel)


class FileTarget:
    """A local file, from a position on."""

    def __init__(self, descriptor: int, start: int, progress: Progress | None) -> None:
        self._descriptor = descriptor
        self._start = start
        self._progress = progress
        self._told = 0

    def receive(
        self, answer: Answer, offset: int, size_bytes: int, cancel: Cancellation | None
    ) -> int:
        """Raises OSError where the file cannot be written."""
        count = answer.receive_to_file(self._descriptor, self._start + offset, size_bytes, cancel)
        if self._progress is not None and offset + count > self._told:
            self._progress(offset + count - self._told)
            self._told = offset + count
        return count


class Downloads:
    """Reads ranges of the files of one volume, in one process. Any thread may call."""

    def __init__(
        self,
        api: FilesApi,
        transport: Transport,
        urls: SignedUrls,
        root: str,
        *,
        direct_read_max_bytes: int,
    ) -> None:
        self._api = api
        self._transport = transport
        self._urls = urls
        self._root = root
        self._direct_read_max_bytes = direct_read_max_bytes
        # A float is read and written whole, so it needs no lock.
        self._without_signed_until = 0.0

    def read(
        self,
        path: str,
        byte_range: ByteRange,
        target: Target,
        *,
        version: str | None,
        cancel: Cancellation | None,
    ) -> None:
        """Fill `target` with the range, as `Volume.read_into` says."""
        guard = Version.parse(version)
        if guard is None:
            raise PreconditionFailed("read", path, "the version named is none of this store")
        if guard.size_bytes is not None and byte_range.end > guard.size_bytes:
            raise InexactRange("read", path, "the range reaches past the end of the file")
        progress = _Progress(0, guard, self._prefers_direct(path, byte_range))
        attempts = self._api.attempts(cancel)
        while True:
            attempts.check_cancelled("read", path)
            rest = ByteRange(byte_range.start + progress.done, byte_range.end)
            result = self._try(path, rest, target, progress, cancel)
            if result.received and self._keep(progress, result):
                attempts.progressed()
            if result.next is _Next.DONE:
                self._remember(progress)
                return
            assert result.error is not None
            # A request that was cut off for it looks like a broken connection.
            attempts.check_cancelled("read", path)
            was_direct = progress.direct
            if not self._decide(path, result.error, result.next, progress):
                if progress.direct and not was_direct:
                    # What asking for a URL took is not of the Files API's time.
                    attempts = self._api.attempts(cancel)
                continue
            try:
                attempts.wait_or_raise(result.error, result.retry_after)
            except Unavailable:
                if progress.direct:
                    raise
                # The store does not recover in time, or says when it will; the Files API may do.
                self._go_direct(path, progress)
                attempts = self._api.attempts(cancel)

    def _prefers_direct(self, path: str, byte_range: ByteRange) -> bool:
        """A small read of a file whose URL is not at hand is one request without it and two with
        it.
        """
        if monotonic() < self._without_signed_until:
            return True
        return len(byte_range) <= self._direct_read_max_bytes and not self._urls.has(path)

    def _keep(self, progress: _Progress, result: _Result) -> bool:
        """Count what arrived, where the next answer can be told to be of the same file."""
        pinned = progress.pinned.merged(result.seen)
        if result.next is not _Next.DONE and not pinned.is_whole:
            # The rest could be of another version; begin again, and pin nothing.
            progress.done = 0
            return False
        progress.pinned = pinned
        progress.done += result.received
        progress.renewals = progress.failures = progress.inexact = 0
        progress.reauthenticated = False
        return True

    def _decide(self, path: str, error: VolumeError, following: _Next, progress: _Progress) -> bool:
        """Prepare the next try; whether to wait before it. Raises `error` where there is none."""
        progress.failures += following is _Next.RETRY
        if following is _Next.RETRY and (progress.direct or progress.failures < _SIGNED_TRIES):
            return True
        if following is _Next.AGAIN:
            return False
        if following is _Next.RENEW and progress.renewals < _RENEWALS:
            progress.renewals += 1
            return False
        if following is _Next.INEXACT and progress.inexact + 1 < _INEXACT_TRIES:
            progress.inexact += 1
            return False
        if following is _Next.RAISE or progress.direct:
            raise error
        self._go_direct(path, progress)
        return False

    def _go_direct(self, path: str, progress: _Progress) -> None:
        progress.direct = True
        progress.was_refused = True
        progress.inexact = 0
        self._urls.drop(path)

    def _remember(self, progress: _Progress) -> None:
        """Where the Files API gave what a signed URL refused, the refusal was about signed URLs."""
        if progress.was_refused:
            self._without_signed_until = monotonic() + _WITHOUT_SIGNED_SECONDS

    def _try(
        self,
        path: str,
        wanted: ByteRange,
        target: Target,
        progress: _Progress,
        cancel: Cancellation | None,
    ) -> _Result:
        """One request for `wanted`."""
        headers = {
            "Accept": "application/octet-stream",
            "Range": wanted.to_header(),
            **progress.pinned.to_header(),
        }
        authentication: Mapping[str, str] = {}
        if progress.direct:
            url = self._api.url(f"/files{encode_path('read', f'{self._root}/{path}')}")
            authentication = self._api.credentials.headers()
            headers.update(authentication)
        else:
            try:
                signed = self._signed(path, progress, cancel)
            except VolumeError as error:
                return _Result(_Next.OTHER_WAY, error)
            url = signed.url
            headers.update(signed.headers)
        try:
            with self._transport.open("GET", url, headers=headers, cancel=cancel) as answer:
                if answer.status >= 300:
                    return self._refusal(path, answer, progress, authentication)
                return self._receive(path, answer, wanted, target, progress, cancel)
        except TransportError as error:
            failure = failure_of("read", path, error)
            if error.was_closed or (progress.direct and not isinstance(failure, Unavailable)):
                return _Result(_Next.RAISE, failure)
            # A store that cannot even be connected to is behind a firewall; the workspace may not
            # be.
            walled = not progress.direct and not error.was_sent
            return _Result(_Next.OTHER_WAY if walled else _Next.RETRY, failure)

    def _signed(self, path: str, progress: _Progress, cancel: Cancellation | None) -> SignedUrl:
        if progress.renewals and progress.expired is not None:
            signed = self._urls.renewed(path, progress.expired, cancel)
        else:
            signed = self._urls.get(path, cancel)
        progress.expired = signed
        return signed

    def _receive(
        self,
        path: str,
        answer: Answer,
        wanted: ByteRange,
        target: Target,
        progress: _Progress,
        cancel: Cancellation | None,
    ) -> _Result:
        """Take the body in where the headers say that it is what was asked for."""
        problem, total = range_problem(answer.status, answer.headers, wanted)
        seen = Version(total, last_modified(answer.headers))
        if progress.pinned.contradicts(seen):
            return _Result(_Next.RAISE, _changed(path))
        if problem:
            past_end = total is not None and wanted.end > total
            following = _Next.RAISE if past_end else _Next.INEXACT
            return _Result(following, InexactRange("read", path, problem))
        received = target.receive(answer, progress.done, len(wanted), cancel)
        if received < len(wanted):
            failure = Unavailable(
                "read", path, f"the body broke off after {received} of {len(wanted)} bytes"
            )
            return _Result(_Next.RETRY, failure, received, seen)
        if not answer.is_at_end():
            failure_of_length = InexactRange("read", path, "the body is longer than the range")
            return _Result(_Next.INEXACT, failure_of_length)
        return _Result(_Next.DONE, None, received, seen)

    def _refusal(
        self,
        path: str,
        answer: Answer,
        progress: _Progress,
        authentication: Mapping[str, str],
    ) -> _Result:
        """What an answer that is no success leads to. `authentication` is empty for signed URLs."""
        status = answer.status
        body = answer.read_error()
        secret = authentication.get("Authorization", "").rpartition(" ")[2]
        if not progress.direct and is_expired_url(status, body):
            return _Result(_Next.RENEW, Unavailable("read", path, "the signed URL has expired"))
        error = error_of("read", path, status, body, secret)
        if status == 401 and progress.direct and not progress.reauthenticated:
            # A token may have ended between two requests; its source then has a new one.
            progress.reauthenticated = True
            if self._api.has_other_credentials(authentication):
                return _Result(_Next.AGAIN, error)
        if status == 412:
            return _Result(_Next.RAISE, _changed(path))
        if status == 416:
            if progress.pinned.size_bytes is not None:
                # The range lies within the size that is known.
                return _Result(_Next.RAISE, _changed(path))
            reason = "the range reaches past the end of the file"
            return _Result(_Next.RAISE, InexactRange("read", path, reason))
        if is_passing(status, body):
            failure = Unavailable("read", path, error.reason)
            return _Result(_Next.RETRY, failure, retry_after=answer.headers.get("Retry-After"))
        return _Result(_Next.RAISE if progress.direct else _Next.OTHER_WAY, error)


def _changed(path: str) -> PreconditionFailed:
    return PreconditionFailed("read", path, "the file has changed")
