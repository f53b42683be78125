"""One upload of the Files API in numbered parts: initiate, signed URLs, parts, complete, abort.
Made by `upload.py`.

Nothing shows at the path before `complete`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from time import time
from typing import Final

from trainmount_files.cancellation import TimeLimit
from trainmount_files.errors import (
    AlreadyExists,
    NotFound,
    TooLarge,
    Unavailable,
    Unsupported,
    VolumeError,
)
from trainmount_files.files_api.answers import error_of, is_expired_url, json_object
from trainmount_files.files_api.api import BodySource, Call, FilesApi, encode_path, failure_of
from trainmount_files.files_api.file_bodies import body_of
from trainmount_files.files_api.part_urls import PartUrls
from trainmount_files.files_api.signed_urls import SignedUrl
from trainmount_files.files_api.transport import Reply, Transport, TransportError
from trainmount_files.retry import RETRYABLE_STATUSES, Cancellation
from trainmount_files.volume import Buffer, ByteRange, FileStat

__all__ = ["ABORT_SECONDS", "MultipartUpload", "abort_upload"]

_LOG: Final = logging.getLogger(__name__)

_RENEWALS: Final = 3
"""URLs asked for in a row for one part: then the refusal is about something else than time."""

ABORT_SECONDS: Final = 15.0
"""An abort that does not get through is left to the service's own expiry of uploads."""

_HURRIED_ABORT_SECONDS: Final = 1.5
"""Where a person waits for it."""

_POLL_SECONDS: Final = 0.05

_CLOCK_SLACK_SECONDS: Final = 1
"""Modification times are cut to the second."""


class MultipartUpload:
    """A file in the making; implements `Upload`. Parts from any thread; `complete` and `abort` from
    one.
    """

    def __init__(
        self,
        api: FilesApi,
        transport: Transport,
        *,
        path: str,
        remote_path: str,
        overwrite: bool,
        max_parts: int,
        max_part_bytes: int,
        num_parts: int | None,
        url_lifetime_seconds: float,
        stat: Callable[[str], FileStat],
        stored: Callable[[], FileStat],
        put_empty: Callable[[], FileStat],
        cancel: Cancellation | None = None,
    ) -> None:
        """Begins the upload at the store. `remote_path` is the whole path, `/Volumes/...`;
        `num_parts` None where it is not known yet.

        Raises:
            AlreadyExists: `overwrite=False` and something is at the path.
            VolumeError: the store refuses, in general (no multipart behind a firewall) or for this
                path.
        """
        self._api = api
        self._transport = transport
        self._path = path
        self._overwrite = overwrite
        self._max_parts = max_parts
        self._max_part_bytes = max_part_bytes
        self._stat = stat
        self._stored = stored
        self._put_empty = put_empty
        self._cancel = cancel
        self._remote_path = remote_path
        self._target = _target_of(remote_path)
        # part number -> (etag, size); guarded by the lock, as is `_is_open`.
        self._parts: dict[int, tuple[str, int]] = {}
        self._is_open = True
        # Nothing is to be sent any more.
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._began_seconds, self._session_token = self._initiate()
        self._urls = PartUrls(
            api,
            path=path,
            remote_path=remote_path,
            session_token=self._session_token,
            max_parts=max_parts,
            num_parts=num_parts,
            lifetime_seconds=url_lifetime_seconds,
            cancel=cancel,
        )

    def __repr__(self) -> str:
        return f"MultipartUpload({self._path!r})"

    @property
    def token(self) -> str:
        """What the store knows this upload by. Secret."""
        return self._session_token

    def put_part(self, part_number: int, data: Buffer) -> None:
        self.send_part(part_number, memoryview(data).nbytes, lambda: data)

    def put_file_part(self, part_number: int, descriptor: int, byte_range: ByteRange) -> None:
        """As `TakesFileParts` says."""
        body = body_of(self._path, descriptor, byte_range, self._cancel, size_bytes=byte_range.end)
        self.send_part(part_number, len(byte_range), body)

    def send_part(self, part_number: int, size_bytes: int, body: BodySource) -> None:
        """Store a part whose body is made anew for each try.

        Raises:
            TooLarge: more parts, or a larger one, than the store takes.
            VolumeError: the part is not stored; what `body` raises.
        """
        if not 1 <= part_number <= self._max_parts:
            reason = f"part {part_number} is not among the 1 to {self._max_parts} parts of a file"
            raise TooLarge("upload", self._path, reason)
        if size_bytes > self._max_part_bytes:
            reason = f"a part may have {self._max_part_bytes} bytes, this one has {size_bytes}"
            raise TooLarge("upload", self._path, reason)
        with self._lock:
            self._check_open()
        etag = self._send(part_number, body)
        with self._lock:
            self._parts[part_number] = (etag, size_bytes)

    def complete(self) -> FileStat:
        with self._lock:
            self._check_open()
            parts = sorted(self._parts.items())
        if not parts:
            self.abort()
            return self._put_empty()
        size_bytes = sum(size for _, (_, size) in parts)
        call = Call(
            operation="upload",
            path=self._path,
            method="POST",
            target=self._target,
            query={
                "action": "complete-upload",
                "upload_type": "multipart",
                "session_token": self._session_token,
            },
            secret=self._session_token,
        )
        listed = [{"part_number": number, "etag": etag} for number, (etag, _) in parts]
        outcome = self._api.call_json(call, {"parts": listed}, cancel=self._cancel)
        found = None
        if outcome.error is not None:
            found = self._settle(outcome.error, size_bytes, was_uncertain=outcome.was_uncertain)
        with self._lock:
            self._is_open = False
        self._is_over.set()
        return found if found is not None else self._stored()

    def abort(self, *, in_hurry: bool | None = None) -> None:
        """As `Upload.abort`; takes two seconds at most `in_hurry`, which a caller is who has
        cancelled or closed the volume.
        """
        if in_hurry is None:
            in_hurry = self._api.attempts(self._cancel).is_cancelled
        self.abort_within(TimeLimit(_HURRIED_ABORT_SECONDS if in_hurry else ABORT_SECONDS))

    def abort_within(self, limit: Cancellation) -> None:
        """As `abort`, until `limit` is set; where another thread is at it, when that is done."""
        with self._lock:
            is_ours, self._is_open = self._is_open, False
        if not is_ours:
            while not self._is_over.wait(_POLL_SECONDS) and not limit.is_set():
                pass
            return
        try:
            abort_upload(self._api, self._path, self._remote_path, self._session_token, limit)
        finally:
            self._is_over.set()

    def _initiate(self) -> tuple[float, str]:
        """When the upload began by the store's clock, and its token."""
        call = Call(
            operation="upload",
            path=self._path,
            method="POST",
            target=self._target,
            query={
                "action": "initiate-upload",
                "overwrite": "true" if self._overwrite else "false",
            },
            expects_json=True,
        )
        # Repeating it may leave an upload without parts behind, which costs nothing and expires.
        reply = self._api.call(call, cancel=self._cancel).unwrap()
        upload = json_object(reply.body).get("multipart_upload")
        token = upload.get("session_token") if isinstance(upload, dict) else None
        if not isinstance(token, str) or not token:
            raise Unsupported("upload", self._path, "the store offers no upload in parts")
        return _date_of(reply), token

    def _send(self, part_number: int, body: BodySource) -> str:
        """Store one part, again as the policy says; its etag."""
        attempts = self._api.attempts(self._cancel)
        renewals = 0
        is_first = True
        while True:
            attempts.check_cancelled("upload", self._path)
            signed = self._urls.take(part_number, anew=not is_first)
            is_first = False
            error: VolumeError
            retry_after = None
            try:
                reply = self._transport.exchange(
                    "PUT",
                    signed.url,
                    headers={"Content-Type": "application/octet-stream", **signed.headers},
                    body=body(),
                    cancel=self._cancel,
                )
            except TransportError as broken:
                error = failure_of("upload", self._path, broken, f"part {part_number}: ")
            else:
                if reply.status < 300:
                    return reply.headers.get("ETag", "")
                if is_expired_url(reply.status, reply.body) and renewals < _RENEWALS:
                    renewals += 1
                    continue
                error = self._refusal(part_number, reply, signed)
                if reply.status not in RETRYABLE_STATUSES:
                    raise error
                retry_after = reply.headers.get("Retry-After")
            if not isinstance(error, Unavailable):
                raise error
            attempts.wait_or_raise(error, retry_after)

    def _refusal(self, part_number: int, reply: Reply, signed: SignedUrl) -> VolumeError:
        secrets = (*signed.secrets(), self._session_token)
        error = error_of("upload", self._path, reply.status, reply.body, *secrets)
        kind = Unavailable if reply.status in RETRYABLE_STATUSES else type(error)
        return kind("upload", self._path, f"part {part_number}: {error.reason}")

    def _settle(self, error: VolumeError, size_bytes: int, *, was_uncertain: bool) -> FileStat:
        """The file after a failed `complete`, where only the answer was lost: that is settled by
        looking at the path.
        """
        if isinstance(error, AlreadyExists) and was_uncertain:
            reason = "the answer was lost, and something is at the path: this file or another"
            raise Unavailable("upload", self._path, reason)
        if not was_uncertain or not isinstance(error, NotFound | Unavailable):
            raise error
        try:
            found = self._stat(self._path)
        except VolumeError:
            found = None
        if found is not None and not found.is_directory and found.size_bytes == size_bytes:
            mtime_seconds = found.mtime_ns / 1e9
            if mtime_seconds >= self._began_seconds - _CLOCK_SLACK_SECONDS:
                return found
        raise error

    def _check_open(self) -> None:
        if not self._is_open:
            # Where it was aborted because the volume was closed, that is what to say.
            self._api.attempts(self._cancel).check_cancelled("upload", self._path)
            raise Unsupported("upload", self._path, "the upload is complete or aborted")


def abort_upload(
    api: FilesApi, path: str, remote_path: str, token: str, limit: Cancellation
) -> bool:
    """Free what the store has of an upload, of this process or another. Whether nothing is left;
    never raises.
    """
    call = Call(
        operation="abort upload",
        path=path,
        method="POST",
        target=_target_of(remote_path),
        query={
            "action": "abort-upload",
            "upload_type": "multipart",
            "session_token": token,
        },
        secret=token,
        is_farewell=True,
    )
    try:
        error = api.call(call, cancel=limit).error
    except VolumeError as failure:
        error = failure
    if error is None or isinstance(error, NotFound):
        return True
    _LOG.warning(
        "An upload could not be aborted; the store frees its parts when it expires",
        extra={"path": path, "reason": error.reason},
    )
    return False


def _target_of(remote_path: str) -> str:
    return f"/files{encode_path('upload', remote_path)}"


def _date_of(reply: Reply) -> float:
    """The store's time of an answer, so that its modification times can be compared; ours where it
    has none.
    """
    try:
        return parsedate_to_datetime(reply.headers.get("Date", "")).timestamp()
    except (ValueError, TypeError, OverflowError):
        return time()
