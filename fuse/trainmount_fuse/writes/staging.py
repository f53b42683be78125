"""Files that are being written: a copy on local disk, in the store when the program has closed or
synced it. Large ones are sent while they are written (`streaming`).

`content` and `namespace` call it. `find` and its kin belong to the event loop's thread; the
methods under "worker threads" wait for disk and store and are called with the inode's lock held.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, cast

from trainmount_files.errors import NotFound
from trainmount_files.volume import FileStat, Volume
from trainmount_fuse.writes.journal import Conflict, Journal, JournalRow, StagedState
from trainmount_fuse.writes.staged_file import StagedFile
from trainmount_fuse.writes.streaming import Streaming
from trainmount_fuse.writes.uploading import Uploading

__all__ = [
    "LATER_VERSION",
    "CopyInto",
    "FilesNotUploaded",
    "Staging",
    "WritingStatistics",
    "remote_stat",
]

log = logging.getLogger(__name__)

CopyInto = Callable[[int], None]
"""Fills an empty file, given its descriptor."""

LATER_VERSION: Final = "the store has another version than the one these bytes follow on"

_UNSYNCED: Final = "unsynced"
"""Base version of bytes that a reboot may have cut; no store has it, so they overwrite nothing."""

_SLOW_SECONDS: Final = 0.02
_NUM_IN_THREADS: Final = 16
"""Where two writes to the staging disk running took longer, those that follow wait in threads until
so many were quick. One alone says more of a busy processor than of the disk.
"""

_MAX_NAMED: Final = 20
"""Paths that one message names."""


class FilesNotUploaded(OSError):
    """A mount ended while the store lacks the last bytes of some files; `str()` is one line that
    names them. They stay in the state directory, and the next mount over it sends them.
    """

    def __init__(self, paths: list[str]) -> None:
        more = [f"and {len(paths) - _MAX_NAMED} more"] if len(paths) > _MAX_NAMED else []
        named = ", ".join([*paths[:_MAX_NAMED], *more])
        super().__init__(errno.EIO, f"not uploaded and kept: {named}")
        self.paths = paths


@dataclass(frozen=True, slots=True)
class WritingStatistics:
    """What is here now, and counters since the start."""

    num_dirty_files: int
    """Files whose last bytes the store does not have, and whose programs have not been told so."""

    dirty_bytes: int
    num_failed_files: int
    """Files whose close reported an error; tried again at the next mount."""

    failed_bytes: int
    num_uploads: int
    num_upload_errors: int
    uploaded_bytes: int
    """Of uploads that ended well."""

    streamed_bytes: int
    """Sent while their files were still being written."""

    num_streams_given_up: int
    """Uploads begun early and aborted, because sent bytes were changed or the name went away."""

    num_conflicts: int
    """Files put beside a later version."""


class Staging:
    """All files of a mount that have local bytes."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        *,
        free_disk_floor_bytes: int,
        free_space: Callable[[int], bool],
        streaming: Streaming,
    ) -> None:
        """Take over what the journal names. `free_space` makes room on the disk by other means.

        Raises OSError where `directory` cannot be used.
        """
        self._directory = directory
        self._journal = journal
        self._floor_bytes = free_disk_floor_bytes
        self._free_space = free_space
        self._streaming = streaming
        self._uploading = Uploading(journal, streaming)
        # Of the last writes, roughly: threads change them without a lock.
        self._num_slow = 0
        self._num_in_threads = 0
        self._by_ino: dict[int, StagedFile] = {}
        self._failed: dict[int, StagedFile] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._take_over()

    def find(self, ino: int) -> StagedFile | None:
        """The local bytes of an inode; None where the store's are all there is."""
        return self._by_ino.get(ino)

    def inos(self) -> list[int]:
        """Every inode with local bytes, at this moment."""
        return list(self._by_ino)

    def failed(self) -> list[StagedFile]:
        """Files whose last upload failed and whose programs have closed them, oldest first."""
        return [self._failed[row_id] for row_id in sorted(self._failed)]

    def unsent(self) -> list[str]:
        """Paths in the volume whose last bytes are only here."""
        dirty = [one for one in self._by_ino.values() if one.state is StagedState.DIRTY]
        return sorted({one.volume_path for one in (*dirty, *self._failed.values())})

    def conflicts(self) -> list[Conflict]:
        """Local bytes that were put beside a later version, by this mount and those before it."""
        return self._journal.conflicts()

    def statistics(self) -> WritingStatistics:
        """A snapshot."""
        dirty = [one for one in list(self._by_ino.values()) if one.state is StagedState.DIRTY]
        failed = list(self._failed.values())
        counts, streaming = self._uploading.counts(), self._streaming.statistics()
        return WritingStatistics(
            num_dirty_files=len(dirty),
            dirty_bytes=sum(_size_on_disk(one.path) for one in dirty),
            num_failed_files=len(failed),
            failed_bytes=sum(_size_on_disk(one.path) for one in failed),
            num_uploads=counts.num_uploads,
            num_upload_errors=counts.num_upload_errors,
            uploaded_bytes=counts.uploaded_bytes,
            streamed_bytes=streaming.streamed_bytes,
            num_streams_given_up=streaming.num_given_up,
            num_conflicts=counts.num_conflicts,
        )

    def write_nowait(
        self, staged: StagedFile, offset: int, data: bytes | bytearray | memoryview
    ) -> int | None:
        """As `write`, where that waits for no disk as far as can be told; else None, and nothing
        is written. Raises OSError.

        For the event loop's thread, where nobody holds the inode's lock: a turn of a thread costs
        as much as the copy of 128 KiB into the page cache.
        """
        if staged.state is not StagedState.DIRTY or staged.error is not None:
            return None
        if self._num_in_threads > 0 or not self._has_room(len(data)):
            return None
        return self._write(staged, offset, data)

    def drop_leftover(self, staged: StagedFile) -> None:
        """Before the first request: bytes of an earlier daemon that nobody needs."""
        self.withdraw(staged)
        self.discard(staged)

    def assign(self, staged: StagedFile, ino: int) -> None:
        """The inode numbers were lost: these bytes belong to another number now."""
        self._by_ino.pop(staged.ino, None)
        self._journal.set_ino(staged.id, ino)
        staged.ino = ino
        self._by_ino[ino] = staged

    def withdraw(self, staged: StagedFile) -> None:
        """Nobody finds these bytes any more; `discard` or `fail` follows."""
        if self._by_ino.get(staged.ino) is staged:
            del self._by_ino[staged.ino]

    # Worker threads from here on.

    def create(
        self,
        ino: int,
        path: str,
        *,
        base_version: str | None,
        exclusive: bool = False,
        is_dirty: bool = True,
        copy_into: CopyInto | None = None,
    ) -> StagedFile:
        """Start local bytes: empty, or as `copy_into` fills them. Raises OSError ENOSPC, and what
        it raises.

        Whoever dies in the middle leaves a file without a row, or a row without a file; neither was
        acknowledged to anybody.
        """
        self.reserve(0)
        state = StagedState.DIRTY if is_dirty else StagedState.CLEAN
        draft = self._directory / f"draft-{ino}"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            if copy_into is not None:
                copy_into(fd)
            row_id = self._journal.add(ino, path, base_version, state, exclusive=exclusive)
            draft.rename(self._directory / str(row_id))
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        row = JournalRow(row_id, ino, path, base_version, exclusive, False, state, "")
        staged = StagedFile(row, self._directory / str(row_id))
        staged.written_end = staged.size_bytes
        self._by_ino[ino] = staged
        return staged

    def reserve(self, num_bytes: int) -> None:
        """Raises OSError ENOSPC where so many more bytes would go below the disk's reserve."""
        if self._has_room(num_bytes):
            return
        # The cache may be on another disk; then nothing is gained.
        self._free_space(num_bytes)
        if not self._has_room(num_bytes):
            raise OSError(errno.ENOSPC, "the staging disk is at its reserve")

    def nameless(self) -> BinaryIO:
        """A file on the staging disk for as long as it is open. Raises OSError."""
        return cast("BinaryIO", tempfile.TemporaryFile(dir=self._directory))

    def read(self, staged: StagedFile, offset: int, size: int) -> bytes:
        """The bytes there are of the range."""
        return os.pread(staged.descriptor(), size, offset)

    def write(self, staged: StagedFile, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Bytes that were taken, fewer than all only where the disk has become full in their
        midst. Raises OSError ENOSPC, EDQUOT; then none was.
        """
        self.reserve(len(data))
        self._mark_dirty(staged)
        return self._write(staged, offset, data)

    def truncate(self, staged: StagedFile, size: int) -> None:
        """Cut or extend by zeros, which take no space. Raises OSError."""
        self._mark_dirty(staged)
        if staged.ahead is not None and size < staged.ahead.sent_end:
            self._uploading.give_up(staged)
        os.ftruncate(staged.descriptor(), size)
        staged.written_end = min(staged.written_end, size)
        staged.may_stream = staged.may_stream or size == 0

    def upload(self, staged: StagedFile, volume: Volume, path: str) -> FileStat:
        """Give the store the whole file. Returns what the store has now.

        Raises:
            VolumeError, OSError: the store has what it had; the bytes stay here.
        """
        stat = self._uploading.upload(staged, volume, path)
        self.mark_uploaded(staged, stat)
        return stat

    def upload_left(self, staged: StagedFile, volume: Volume, path: str) -> FileStat | None:
        """The same for bytes of an earlier daemon; None where the store has another version than
        they follow on, and keeps it.
        """
        found = remote_stat(volume, path)
        version = None if found is None else found.version
        if version == staged.base_version:
            return self.upload(staged, volume, path)
        if found is None or not self._uploading.has_content_of(staged, volume, found):
            return None
        # The predecessor died between its upload and the journal.
        self.mark_uploaded(staged, found)
        return found

    def upload_beside(self, staged: StagedFile, volume: Volume) -> str:
        """Give the store withdrawn bytes under a name of their own, and have them here no more.
        Returns that path.

        Raises:
            VolumeError, OSError: the bytes stay here.
        """
        kept_path = self._uploading.upload_beside(staged, volume)
        self.discard(staged)
        return kept_path

    def mark_uploaded(self, staged: StagedFile, stat: FileStat) -> None:
        """The store has these bytes."""
        self._journal.set_uploaded(staged.id, stat.version)
        staged.base_version, staged.exclusive, staged.is_left = stat.version, False, False
        staged.state, staged.error = StagedState.CLEAN, None
        self._supersede(staged.volume_path)

    def moved(self, staged: StagedFile, path: str, *, base_version: str | None) -> None:
        """The file has another name now, under which the store has `base_version`."""
        self._uploading.give_up(staged)
        self._journal.set_path(staged.id, path, base_version=base_version)
        staged.volume_path, staged.base_version, staged.exclusive = path, base_version, False

    def orphan(self, staged: StagedFile) -> None:
        """The name is gone: keep the bytes for open handles, never upload them."""
        self._uploading.give_up(staged)
        self._journal.set_state(staged.id, StagedState.ORPHAN)
        staged.state = StagedState.ORPHAN

    def discard(self, staged: StagedFile) -> None:
        """Nobody needs the local bytes any more; they were withdrawn before."""
        self._failed.pop(staged.id, None)
        self._uploading.give_up(staged)
        staged.close()
        # The row goes first: a file without a row is removed at the next start.
        self._journal.remove(staged.id)
        staged.path.unlink(missing_ok=True)

    def fail(self, staged: StagedFile, reason: str) -> None:
        """The program was told of the error and has closed: show the store's file, keep the bytes
        aside.
        """
        self._uploading.give_up(staged)
        os.fsync(staged.descriptor())
        self._supersede(staged.volume_path)
        self._journal.set_state(staged.id, StagedState.FAILED, reason)
        staged.state, staged.reason = StagedState.FAILED, reason
        staged.close()
        self._failed[staged.id] = staged

    def adopt_failed(self, staged: StagedFile, ino: int) -> None:
        """Try a failed file again: it is an inode's local bytes once more."""
        self._journal.set_ino(staged.id, ino)
        self._journal.set_state(staged.id, StagedState.DIRTY)
        self._failed.pop(staged.id, None)
        staged.ino, staged.state, staged.is_left = ino, StagedState.DIRTY, True
        self._by_ino[ino] = staged

    def close(self) -> None:
        """Close every file; all bytes stay on disk."""
        for staged in self._by_ino.values():
            self._uploading.give_up(staged)
            staged.close()
        self._streaming.close()
        self._journal.close()

    def abandon_left(self) -> None:
        """Abort the uploads that a dead daemon had begun. Waits for the store."""
        self._streaming.abandon_left()

    def _write(self, staged: StagedFile, offset: int, data: bytes | bytearray | memoryview) -> int:
        self._uploading.before_write(staged, offset)
        fd = staged.descriptor()
        rest = memoryview(data)
        position = offset
        began = time.monotonic()
        try:
            while rest:
                written = os.pwrite(fd, rest, position)
                rest, position = rest[written:], position + written
        except OSError:
            if position == offset:
                raise
        self._note_duration(time.monotonic() - began)
        self._uploading.after_write(staged, offset, position)
        return position - offset

    def _note_duration(self, seconds: float) -> None:
        if seconds <= _SLOW_SECONDS:
            self._num_slow = 0
            self._num_in_threads = max(self._num_in_threads - 1, 0)
            return
        self._num_slow += 1
        if self._num_slow > 1:
            self._num_in_threads = _NUM_IN_THREADS

    def _supersede(self, path: str) -> None:
        """Newer bytes for the path are safe: those that failed before are of no use."""
        for older in [one for one in self.failed() if one.volume_path == path]:
            self.discard(older)

    def _has_room(self, num_bytes: int) -> bool:
        status = os.statvfs(self._directory)
        return status.f_bavail * status.f_frsize - num_bytes >= self._floor_bytes

    def _mark_dirty(self, staged: StagedFile) -> None:
        staged.error = None
        if staged.state is StagedState.CLEAN:
            self._journal.set_state(staged.id, StagedState.DIRTY)
            staged.state = StagedState.DIRTY

    def _take_over(self) -> None:
        known: set[str] = set()
        if self._journal.is_after_reboot():
            self._doubt_unsynced()
        self._journal.accept_boot()
        for row in self._journal.rows():
            staged = StagedFile(row, self._directory / str(row.id))
            if not staged.path.exists():
                # Either nothing of it was acknowledged, or somebody emptied the directory.
                log.warning("Staged file is missing", extra={"path": row.path})
                self._journal.remove(row.id)
            elif row.state is StagedState.FAILED:
                self._failed[row.id] = staged
            else:
                staged.written_end = staged.size_bytes
                self._by_ino[row.ino] = staged
            known.add(str(row.id))
        if not self._journal.is_whole:
            self._set_aside()
        for path in self._directory.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

    def _doubt_unsynced(self) -> None:
        """After a reboot: of bytes that no close had sent, any may be gone. What the store has
        was synced once, and must not be overwritten by them.
        """
        for row in self._journal.rows():
            if row.state is StagedState.DIRTY and row.base_version is not None:
                self._journal.set_path(row.id, row.path, base_version=_UNSYNCED)

    def _set_aside(self) -> None:
        """Files that a damaged journal named may be the only copy of something."""
        found = list(self._directory.iterdir())
        if not found:
            return
        kept = self._directory.with_name(f"{self._directory.name}-kept-{time.time_ns()}")
        kept.mkdir()
        for path in found:
            path.rename(kept / path.name)
        log.error(
            "Files whose names were lost with the journal are kept",
            extra={"directory": str(kept), "num_files": len(found)},
        )


def remote_stat(volume: Volume, path: str) -> FileStat | None:
    """What the store has at the path; None for nothing. Raises VolumeError otherwise."""
    try:
        return volume.stat(path)
    except NotFound:
        return None


def _size_on_disk(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        # Sent and removed by another thread meanwhile.
        return 0
