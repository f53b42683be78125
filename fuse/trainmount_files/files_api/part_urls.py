"""Signed URLs of an upload's parts, asked for several at a time. Made by `multipart.py`.

Each URL is used once and soon: one that was asked for ahead and not used within a tenth of its
lifetime is thrown away, so that a slow upload does not find them expired.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Final

from trainmount_files.errors import InvalidRequest, Unavailable
from trainmount_files.files_api.answers import json_object
from trainmount_files.files_api.api import Call, FilesApi
from trainmount_files.files_api.signed_urls import SignedUrl, expire_time, parse_signed_url
from trainmount_files.retry import Cancellation

__all__ = ["PartUrls"]

_AT_ONCE: Final = 8
"""URLs asked for by one request at most: as many as parts are sent at once by default, so that all
are used within the time of one part or two.
"""

_POLL_SECONDS: Final = 0.05


class PartUrls:
    """The URLs of one upload. Any thread may call."""

    def __init__(
        self,
        api: FilesApi,
        *,
        path: str,
        remote_path: str,
        session_token: str,
        max_parts: int,
        num_parts: int | None,
        lifetime_seconds: float,
        cancel: Cancellation | None,
    ) -> None:
        """`num_parts` is None where nobody knows yet how many parts there will be."""
        self._api = api
        self._path = path
        self._remote_path = remote_path
        self._session_token = session_token
        self._last_part = num_parts or max_parts
        self._is_sized = num_parts is not None
        self._lifetime_seconds = lifetime_seconds
        self._cancel = cancel
        # Part number -> URL and when it was asked for; and the numbers that are being asked for.
        # Guarded by the lock, as is the size of the next question.
        self._held: dict[int, tuple[SignedUrl, float]] = {}
        self._coming: set[int] = set()
        self._at_once = _AT_ONCE
        self._changed = threading.Condition()

    def take(self, part_number: int, *, anew: bool = False) -> SignedUrl:
        """A URL that nobody else has; one asked for now where `anew`, since the last one failed.

        Raises:
            Cancelled: the upload's `cancel` is set.
            VolumeError: the store gives none.
        """
        attempts = self._api.attempts(self._cancel)
        with self._changed:
            while part_number in self._coming and not anew:
                attempts.check_cancelled("upload", self._path)
                self._changed.wait(_POLL_SECONDS)
            held, asked_at = self._held.pop(part_number, (None, 0.0))
            if held is not None and not anew and self._is_fresh(asked_at):
                return held
            numbers = range(part_number, part_number + (1 if anew else self._count(part_number)))
            self._coming.update(numbers)
        try:
            return self._ask(numbers)
        finally:
            with self._changed:
                self._coming.difference_update(numbers)
                self._changed.notify_all()

    def _count(self, part_number: int) -> int:
        """How many URLs the question for this part is about: those that will be needed next."""
        count = min(self._at_once, self._last_part - part_number + 1)
        if not self._is_sized:
            # A stream that has come this far will probably go on for a quarter of it.
            count = min(count, part_number // 4)
        for ahead in range(1, count):
            if part_number + ahead in self._coming or part_number + ahead in self._held:
                return ahead
        return max(count, 1)

    def _is_fresh(self, asked_at: float) -> bool:
        return monotonic() < asked_at + self._lifetime_seconds / 10

    def _ask(self, numbers: range) -> SignedUrl:
        began = monotonic()
        try:
            urls = self._request(numbers)
        except InvalidRequest:
            if len(numbers) == 1:
                raise
            # A store that gives one at a time, perhaps.
            urls = self._request(numbers[:1])
            with self._changed:
                self._at_once = 1
        with self._changed:
            for number in numbers[1:]:
                if number in urls:
                    self._held[number] = (urls[number], began)
        return urls[numbers[0]]

    def _request(self, numbers: range) -> dict[int, SignedUrl]:
        """URLs by part: the first one's, and those of the others that the store gives."""
        call = Call(
            operation="upload",
            path=self._path,
            method="POST",
            target="/create-upload-part-urls",
            expects_json=True,
            secret=self._session_token,
        )
        question = {
            "path": self._remote_path,
            "session_token": self._session_token,
            "start_part_number": numbers[0],
            "count": len(numbers),
            "expire_time": expire_time(self._lifetime_seconds),
        }
        reply = self._api.call_json(call, question, cancel=self._cancel).unwrap()
        listed = json_object(reply.body).get("upload_part_urls")
        urls: dict[int, SignedUrl] = {}
        for number, value in zip(numbers, listed if isinstance(listed, list) else (), strict=False):
            signed = parse_signed_url(value)
            if signed is not None and value.get("part_number", number) in numbers:
                urls[value.get("part_number", number)] = signed
        if numbers[0] not in urls:
            raise Unavailable("upload", self._path, "the store gave no usable URL for a part")
        return urls
