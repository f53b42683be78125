"""Uploads that run while their file is still written: whole parts of the staging file are sent
ahead, so that `close` waits for the last ones only. Used by `staging`.

    advance   parts that are whole -> threads of one `transfer.Workers` -> Upload
    finish    the rest of the file -> the same, then `complete`
    give_up   a thread of its own: what is under way ends, `abort`

Nothing shows at the path before `complete`. The bytes of a part must stay as they are once it is
handed over: whoever changes them gives the upload up, and the file goes whole at `close`. What is
begun is in the journal until it has ended, so that a successor aborts what a dead daemon left,
where the store lets it.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

from trainmount_files.errors import Cancelled, InvalidRequest, LocalError, TooLarge
from trainmount_files.transfer.parts import PartSizes
from trainmount_files.transfer.workers import Workers, raise_first
from trainmount_files.transfer.writer import PART_REFUSALS
from trainmount_files.volume import (
    AbandonsUploads,
    ByteRange,
    FileStat,
    TakesFileParts,
    Upload,
    Volume,
)
from trainmount_fuse.memory import (
    MemoryBudget,
    bound_allocator,
    keep_freed_memory,
    return_free_memory,
)
from trainmount_fuse.writes.journal import BegunUpload, Journal

__all__ = ["CANNOT_STREAM", "StreamedUpload", "Streaming", "StreamingStatistics"]

log = logging.getLogger(__name__)

CANNOT_STREAM: Final = (*PART_REFUSALS, TooLarge)
"""What a store says that takes no parts of this file, or no more of them, or has forgotten the
upload; the file may still go whole.
"""

_PARTS_AT_ONCE: Final = 8
"""Of one file; as the client's own upload of a local file."""

_MAX_STREAMS: Final = 8
"""Files that are sent while they are written: a checkpoint of 8 ranks. Others go at their close."""

_MAX_STREAMS_IN_ORDER: Final = 3
_HELD_PARTS: Final = 4
"""Parts that a store takes in order are held in memory by its client while they are under way."""

_END_SECONDS: Final = 30.0
"""Threads of an upload that was given up end at once; this only bounds the wait for them."""


@dataclass(frozen=True, slots=True)
class StreamingStatistics:
    """Counters since the start."""

    streamed_bytes: int
    """Stored while their files were still written."""

    num_given_up: int
    """Uploads begun early and aborted, because sent bytes were changed or the name went away."""


class Streaming:
    """All uploads in parts of one mount. Any thread may call."""

    def __init__(
        self, volume: Volume, journal: Journal, memory: MemoryBudget, *, from_bytes: int
    ) -> None:
        """`from_bytes` is the size from which files are sent while they are written; 0 for
        never.
        """
        capabilities = volume.capabilities
        self.from_bytes = 0 if capabilities.copies_parts else from_bytes
        self.volume = volume
        self.journal = journal
        self.memory = memory
        self.sizes = PartSizes.of(
            capabilities, part_bytes=capabilities.part_bytes, parallelism=1, size_bytes=None
        )
        self.is_in_order = capabilities.parts_in_order
        self._left = journal.uploads()
        self._held_bytes = _HELD_PARTS * self.sizes.first_bytes if self.is_in_order else 0
        self._limit = _MAX_STREAMS_IN_ORDER if self.is_in_order else _MAX_STREAMS
        # All below is guarded by the condition.
        self._changed = threading.Condition()
        self._num_open = 0
        self._num_ending = 0
        self._streamed_bytes = 0
        self._num_given_up = 0

    def begin(self, path: str, descriptor: int, *, overwrite: bool) -> StreamedUpload | None:
        """An upload for a file that is being written; None where there are enough, or none may
        be. Waits for nothing.
        """
        with self._changed:
            if self._num_open >= self._limit:
                return None
            if self._held_bytes and not self.memory.try_take(self._held_bytes):
                return None
            self._num_open += 1
            if self._num_open == 1:
                keep_freed_memory()
        try:
            return StreamedUpload(self, path, descriptor, overwrite=overwrite)
        except BaseException:
            self._leave()
            raise

    def begin_whole(self, path: str, descriptor: int, *, overwrite: bool) -> StreamedUpload | None:
        """The same for a file that is written already; None where the client's own upload serves as
        well: a death in its midst leaves the same behind.
        """
        if not isinstance(self.volume, AbandonsUploads):
            return None
        return self.begin(path, descriptor, overwrite=overwrite)

    def abandon_left(self) -> None:
        """Abort what a dead daemon had begun. Waits for the store. What the store cannot be told
        now, the next start tells it.
        """
        while self._left:
            self._abandon(self._left.pop())

    def close(self) -> None:
        """Return when nothing that was given up is under way any more, or after some time. No
        upload may be open.
        """
        deadline = monotonic() + _END_SECONDS
        with self._changed:
            while self._num_ending and (left := deadline - monotonic()) > 0:
                self._changed.wait(left)

    def _abandon(self, begun: BegunUpload) -> None:
        volume = self.volume
        if not isinstance(volume, AbandonsUploads) or volume.abandon_upload(
            begun.path, begun.token
        ):
            self.journal.remove_upload(begun.id)

    def statistics(self) -> StreamingStatistics:
        """A snapshot."""
        with self._changed:
            return StreamingStatistics(self._streamed_bytes, self._num_given_up)

    def _count(self, num_bytes: int) -> None:
        with self._changed:
            self._streamed_bytes += num_bytes

    def _ending(self) -> None:
        with self._changed:
            self._num_ending += 1
            self._num_given_up += 1

    def _ended(self) -> None:
        with self._changed:
            self._num_ending -= 1
            self._changed.notify_all()

    def _leave(self) -> None:
        with self._changed:
            self._num_open -= 1
            is_last = not self._num_open
            if is_last:
                bound_allocator()
        if is_last:
            return_free_memory()
        if self._held_bytes:
            self.memory.give_back(self._held_bytes)


class StreamedUpload:
    """One file on its way. `advance`, `finish` and `give_up` by one thread at a time."""

    def __init__(
        self, streaming: Streaming, path: str, descriptor: int, *, overwrite: bool
    ) -> None:
        self.path = path
        self.sent_end = 0
        """Bytes before are sent, or handed over to be."""

        self._streaming = streaming
        self._overwrite = overwrite
        # Our own: the file may be closed and removed while a thread still reads.
        self._descriptor = os.dup(descriptor)
        self._workers = Workers(1 if streaming.is_in_order else _PARTS_AT_ONCE, "trainmount-ahead")
        self._sending: list[Future[None]] = []
        self._stop = threading.Event()
        self._is_begun = threading.Event()
        self._upload: Upload | None = None
        self._begun: BegunUpload | None = None
        self._is_closing = False

    @property
    def has_failed(self) -> bool:
        """A part could not be stored: the upload can only be given up."""
        return self._stop.is_set()

    def advance(self, end: int) -> None:
        """The file's bytes before `end` are there: hand over the parts that are whole."""
        sizes = self._streaming.sizes
        while not self.has_failed and len(self._sending) < sizes.max_parts:
            size = sizes.size_of(len(self._sending) + 1)
            if self.sent_end + size > end:
                return
            self._hand_over(size)

    def finish(self, size_bytes: int) -> FileStat:
        """Store the rest of the file, of that size, and show it at the path. In a worker thread.

        Raises:
            VolumeError: nothing is at the path, and everything is freed. Of `CANNOT_STREAM`, the
                file may still go whole.
        """
        self._is_closing = True
        try:
            self.advance(size_bytes)
            if self.sent_end < size_bytes or not self._sending:
                self._hand_over(size_bytes - self.sent_end)
            wait(self._sending)
            raise_first(self._sending)
            if self._upload is None or self._stop.is_set():
                raise Cancelled("upload", self.path, "the upload was given up")
            stat = self._upload.complete()
        except BaseException:
            self._end(is_complete=False)
            raise
        self._end(is_complete=True)
        return stat

    def give_up(self) -> None:
        """Abort, in a thread of its own: waits for nothing."""
        self._stop.set()
        self._streaming._ending()
        threading.Thread(target=self._end_given_up, name="trainmount-abort", daemon=True).start()

    def _end_given_up(self) -> None:
        try:
            self._end(is_complete=False)
        except Exception:
            log.exception("An upload could not be given up; the next start tries again")
        finally:
            self._streaming._ended()

    def _hand_over(self, size_bytes: int) -> None:
        number = len(self._sending) + 1
        byte_range = ByteRange(self.sent_end, self.sent_end + size_bytes)
        self._sending.append(self._workers.submit(lambda: self._send(number, byte_range)))
        self.sent_end = byte_range.end

    def _send(self, number: int, byte_range: ByteRange) -> None:
        """In a thread of the upload's."""
        is_ahead = not self._is_closing
        try:
            if number == 1:
                self._begin()
            else:
                # Whether the store takes parts shows with the first one.
                self._is_begun.wait()
            if self._stop.is_set() or self._upload is None:
                raise Cancelled("upload", self.path, "the upload was given up")
            self._put(self._upload, number, byte_range)
        except BaseException as error:
            if not self._stop.is_set():
                log.info(
                    "A part could not be sent ahead; the file goes whole when it is closed",
                    extra={"path": self.path, "reason": str(error)},
                )
            self._stop.set()
            raise
        finally:
            if number == 1:
                self._is_begun.set()
        if is_ahead:
            self._streaming._count(len(byte_range))

    def _begin(self) -> None:
        if self._stop.is_set():
            return
        streaming = self._streaming
        upload = streaming.volume.start_upload(
            self.path, overwrite=self._overwrite, cancel=self._stop
        )
        self._upload = upload
        if isinstance(streaming.volume, AbandonsUploads):
            token = streaming.volume.token_of(upload)
            row_id = streaming.journal.add_upload(self.path, token)
            self._begun = BegunUpload(row_id, self.path, token)

    def _put(self, upload: Upload, number: int, byte_range: ByteRange) -> None:
        if isinstance(upload, TakesFileParts):
            upload.put_file_part(number, self._descriptor, byte_range)
            return
        memory = self._streaming.memory
        memory.take(len(byte_range), self._stop)
        try:
            upload.put_part(number, self._read(byte_range))
        finally:
            memory.give_back(len(byte_range))

    def _read(self, byte_range: ByteRange) -> bytes:
        try:
            data = os.pread(self._descriptor, len(byte_range), byte_range.start)
        except OSError as error:
            reason = f"the staging file: {error.strerror}"
            raise LocalError("upload", self.path, reason, error.errno) from error
        if len(data) != len(byte_range):
            raise InvalidRequest("upload", self.path, "the staging file became shorter")
        return data

    def _end(self, *, is_complete: bool) -> None:
        """Free everything. Waits for what is under way, and for `abort`."""
        if not is_complete:
            self._stop.set()
        try:
            self._workers.close(_END_SECONDS)
            if self._upload is not None and not is_complete:
                self._upload.abort()
            if self._begun is not None and is_complete:
                # A row that stays costs one more request at the next start.
                with suppress(sqlite3.Error):
                    self._streaming.journal.remove_upload(self._begun.id)
            elif self._begun is not None:
                # `abort` does not say whether it got through.
                self._streaming._abandon(self._begun)
        finally:
            os.close(self._descriptor)
            self._streaming._leave()
