"""From staging files to the store: whole, ahead of the close that waits for it, or beside a later
version. Called by `staging` with the inode's lock held.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from trainmount_files.errors import AlreadyExists, NotFound, TooLarge
from trainmount_files.volume import ByteRange, FileStat, Volume
from trainmount_fuse.writes.journal import Conflict, Journal, StagedState
from trainmount_fuse.writes.staged_file import StagedFile
from trainmount_fuse.writes.streaming import CANNOT_STREAM, StreamedUpload, Streaming

__all__ = ["UploadCounts", "Uploading"]

log = logging.getLogger(__name__)

_PUT_BYTES: Final = 4 << 20
"""Files up to this size go in one request from memory."""

_COMPARE_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class UploadCounts:
    """Counters since the start."""

    num_uploads: int
    num_upload_errors: int
    uploaded_bytes: int
    """Of uploads that ended well."""

    num_conflicts: int
    """Files put beside a later version."""


class Uploading:
    """The uploads of one mount's staging files. Worker threads, but for `note_written`, `give_up`
    and `counts`, which wait for nothing.
    """

    def __init__(self, journal: Journal, streaming: Streaming) -> None:
        self._journal = journal
        self._streaming = streaming
        self._lock = threading.Lock()
        self._num_uploads = self._num_upload_errors = self._uploaded_bytes = 0
        self._num_conflicts = 0

    def counts(self) -> UploadCounts:
        """A snapshot."""
        with self._lock:
            return UploadCounts(
                self._num_uploads,
                self._num_upload_errors,
                self._uploaded_bytes,
                self._num_conflicts,
            )

    def before_write(self, staged: StagedFile, offset: int) -> None:
        """Bytes from `offset` on are about to change."""
        if staged.ahead is not None and offset < staged.ahead.sent_end:
            staged.may_stream = False
            self.give_up(staged)

    def after_write(self, staged: StagedFile, offset: int, end: int) -> None:
        """Those bytes were written; what is whole now goes ahead."""
        if not offset <= staged.written_end < end:
            return
        staged.written_end = end
        from_bytes = self._streaming.from_bytes
        if not from_bytes or end < from_bytes:
            return
        if staged.ahead is None and staged.may_stream and staged.state is StagedState.DIRTY:
            staged.ahead = self._streaming.begin(
                staged.volume_path, staged.descriptor(), overwrite=not staged.exclusive
            )
        if staged.ahead is not None:
            staged.ahead.advance(end)

    def give_up(self, staged: StagedFile) -> None:
        """What was sent ahead is of no use."""
        ahead, staged.ahead = staged.ahead, None
        if ahead is not None:
            ahead.give_up()

    def upload(self, staged: StagedFile, volume: Volume, path: str) -> FileStat:
        """Give the store the whole file. Returns what the store has now.

        Raises:
            VolumeError, OSError: the store has what it had.
        """
        was_attempted = staged.attempted
        if staged.exclusive and not staged.attempted:
            self._journal.set_attempted(staged.id)
            staged.attempted = True
        try:
            stat = self._send_as_made(staged, volume, path)
        except AlreadyExists:
            # A predecessor may have died between its upload and the journal.
            found = volume.stat(path) if was_attempted else None
            if found is None or not self.has_content_of(staged, volume, found):
                self._count_error()
                raise
            stat = found
        except Exception:
            self._count_error()
            raise
        with self._lock:
            self._num_uploads += 1
            self._uploaded_bytes += stat.size_bytes
        return stat

    def upload_beside(self, staged: StagedFile, volume: Volume) -> str:
        """Give the store local bytes under a name of their own, for a later version has theirs.
        Returns the path, which is written down.

        Raises:
            VolumeError, OSError: the bytes stay here.
        """
        made_ns = time.time_ns()
        date = datetime.fromtimestamp(made_ns / 1e9, UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        kept_path = f"{staged.volume_path}.conflict-{date}"
        with staged.path.open("rb") as source:
            volume.upload(kept_path, source, staged.size_bytes, overwrite=False)
        self._journal.add_conflict(Conflict(staged.volume_path, kept_path, made_ns))
        with self._lock:
            self._num_conflicts += 1
        return kept_path

    def has_content_of(self, staged: StagedFile, volume: Volume, stat: FileStat) -> bool:
        """Whether the store's file has exactly the local bytes. Raises VolumeError."""
        if stat.is_directory or stat.size_bytes != staged.size_bytes:
            return False
        fd = staged.descriptor()
        for start in range(0, stat.size_bytes, _COMPARE_BYTES):
            end = min(start + _COMPARE_BYTES, stat.size_bytes)
            buffer = bytearray(end - start)
            volume.read_into(stat.path, ByteRange(start, end), buffer, version=stat.version)
            if os.pread(fd, end - start, start) != buffer:
                return False
        return True

    def _send_as_made(self, staged: StagedFile, volume: Volume, path: str) -> FileStat:
        """With O_EXCL the store refuses to overwrite. Above the size up to which it can (5 GiB on
        S3) it is asked for the name just before.
        """
        try:
            return self._send(staged, volume, path, overwrite=not staged.exclusive)
        except TooLarge:
            if not staged.exclusive:
                raise
        try:
            volume.stat(path)
        except NotFound:
            return self._send(staged, volume, path, overwrite=True)
        raise AlreadyExists("upload", path, "the name has another file now")

    def _send(self, staged: StagedFile, volume: Volume, path: str, *, overwrite: bool) -> FileStat:
        size = staged.size_bytes
        largest = volume.capabilities.max_put_bytes
        streamed = self._take_stream(staged, path, size, overwrite=overwrite)
        if streamed is not None:
            try:
                return streamed.finish(size)
            except CANNOT_STREAM as error:
                fields = {"path": path, "reason": str(error)}
                log.info("A file goes whole, as it cannot go in parts", extra=fields)
        if size <= _PUT_BYTES and (largest is None or size <= largest):
            data = os.pread(staged.descriptor(), size, 0)
            return volume.put(path, data, overwrite=overwrite)
        with staged.path.open("rb") as source:
            return volume.upload(path, source, size, overwrite=overwrite)

    def _take_stream(
        self, staged: StagedFile, path: str, size: int, *, overwrite: bool
    ) -> StreamedUpload | None:
        """The upload that goes on with this file; None where it is to go whole."""
        ahead = staged.ahead
        if ahead is not None and (ahead.has_failed or ahead.path != path):
            self.give_up(staged)
        elif ahead is not None:
            staged.ahead = None
            return ahead
        from_bytes = self._streaming.from_bytes
        if not from_bytes or size < from_bytes:
            return None
        return self._streaming.begin_whole(path, staged.descriptor(), overwrite=overwrite)

    def _count_error(self) -> None:
        with self._lock:
            self._num_upload_errors += 1
