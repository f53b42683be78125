"""Files that are being written: a copy on local disk, uploaded whole when the program closes or
syncs it.

`content` and `namespace` call it. `find` and its kin belong to the event loop's thread; the
methods under "worker threads" wait for disk and store and are called with the inode's lock held.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from trainmount_files.errors import AlreadyExists, NotFound
from trainmount_files.volume import ByteRange, FileStat, Volume
from trainmount_fuse.journal import Journal, JournalRow, StagedState

__all__ = ["CopyInto", "FilesNotUploaded", "StagedFile", "Staging", "remote_stat"]

log = logging.getLogger(__name__)

CopyInto = Callable[[int], None]
"""Fills an empty file, given its descriptor."""

_PUT_BYTES: Final = 4 << 20
"""Files up to this size go in one request from memory."""

_COMPARE_BYTES: Final = 8 << 20

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


class StagedFile:
    """One file with local bytes. Its fields change under the inode's lock only."""

    def __init__(self, row: JournalRow, path: Path) -> None:
        self.id = row.id
        self.ino = row.ino
        self.base_version = row.base_version
        self.exclusive = row.exclusive
        self.attempted = row.attempted
        self.state = row.state
        self.volume_path = row.path
        self.reason = row.error
        self.error: Exception | None = None
        """Why the last upload failed, while nothing was written since."""

        self.path = path
        self._fd: int | None = None
        self._lock = threading.Lock()

    def descriptor(self) -> int:
        """The open local file. Raises OSError."""
        with self._lock:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            return self._fd

    def close(self) -> None:
        """Free the descriptor."""
        with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    @property
    def size_bytes(self) -> int:
        return os.fstat(self.descriptor()).st_size

    @property
    def mtime_ns(self) -> int:
        return os.fstat(self.descriptor()).st_mtime_ns


class Staging:
    """All files of a mount that have local bytes."""

    def __init__(
        self,
        directory: Path,
        journal: Journal,
        *,
        free_disk_floor_bytes: int,
        free_space: Callable[[int], bool],
    ) -> None:
        """Take over what the journal names. `free_space` makes room on the disk by other means.

        Raises OSError where `directory` cannot be used.
        """
        self._directory = directory
        self._journal = journal
        self._floor_bytes = free_disk_floor_bytes
        self._free_space = free_space
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

    def read(self, staged: StagedFile, offset: int, size: int) -> bytes:
        """The bytes there are of the range."""
        return os.pread(staged.descriptor(), size, offset)

    def write(self, staged: StagedFile, offset: int, data: bytes | bytearray | memoryview) -> None:
        """All of `data`, or OSError and the rest is as it was not written. Raises
        OSError ENOSPC.
        """
        self.reserve(len(data))
        self._mark_dirty(staged)
        fd = staged.descriptor()
        rest = memoryview(data)
        while rest:
            written = os.pwrite(fd, rest, offset)
            rest, offset = rest[written:], offset + written

    def truncate(self, staged: StagedFile, size: int) -> None:
        """Cut or extend by zeros, which take no space. Raises OSError."""
        self._mark_dirty(staged)
        os.ftruncate(staged.descriptor(), size)

    def upload(self, staged: StagedFile, volume: Volume, path: str) -> FileStat:
        """Give the store the whole file. Returns what the store has now.

        Raises:
            VolumeError, OSError: the store has what it had; the bytes stay here.
        """
        overwrite = not staged.exclusive
        was_attempted = staged.attempted
        if staged.exclusive and not staged.attempted:
            self._journal.set_attempted(staged.id)
            staged.attempted = True
        try:
            stat = self._send(staged, volume, path, overwrite=overwrite)
        except AlreadyExists:
            # A predecessor may have died between its upload and the journal.
            found = volume.stat(path) if was_attempted else None
            if found is None or not self.has_content_of(staged, volume, found):
                raise
            stat = found
        self.mark_uploaded(staged, stat)
        return stat

    def mark_uploaded(self, staged: StagedFile, stat: FileStat) -> None:
        """The store has these bytes."""
        self._journal.set_uploaded(staged.id, stat.version)
        staged.base_version, staged.exclusive = stat.version, False
        staged.state, staged.error = StagedState.CLEAN, None
        self._supersede(staged.volume_path)

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

    def moved(self, staged: StagedFile, path: str, *, base_version: str | None) -> None:
        """The file has another name now, under which the store has `base_version`."""
        self._journal.set_path(staged.id, path, base_version=base_version)
        staged.volume_path, staged.base_version, staged.exclusive = path, base_version, False

    def orphan(self, staged: StagedFile) -> None:
        """The name is gone: keep the bytes for open handles, never upload them."""
        self._journal.set_state(staged.id, StagedState.ORPHAN)
        staged.state = StagedState.ORPHAN

    def discard(self, staged: StagedFile) -> None:
        """Nobody needs the local bytes any more; they were withdrawn before."""
        self._failed.pop(staged.id, None)
        staged.close()
        # The row goes first: a file without a row is removed at the next start.
        self._journal.remove(staged.id)
        staged.path.unlink(missing_ok=True)

    def fail(self, staged: StagedFile, reason: str) -> None:
        """The program was told of the error and has closed: show the store's file, keep the bytes
        aside.
        """
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
        staged.ino, staged.state = ino, StagedState.DIRTY
        self._by_ino[ino] = staged

    def close(self) -> None:
        """Close every file; all bytes stay on disk."""
        for staged in self._by_ino.values():
            staged.close()
        self._journal.close()

    def _send(self, staged: StagedFile, volume: Volume, path: str, *, overwrite: bool) -> FileStat:
        size = staged.size_bytes
        largest = volume.capabilities.max_put_bytes
        if size <= _PUT_BYTES and (largest is None or size <= largest):
            data = os.pread(staged.descriptor(), size, 0)
            return volume.put(path, data, overwrite=overwrite)
        with staged.path.open("rb") as source:
            return volume.upload(path, source, size, overwrite=overwrite)

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
        for row in self._journal.rows():
            staged = StagedFile(row, self._directory / str(row.id))
            if not staged.path.exists():
                # Either nothing of it was acknowledged, or somebody emptied the directory.
                log.warning("Staged file is missing", extra={"path": row.path})
                self._journal.remove(row.id)
            elif row.state is StagedState.FAILED:
                self._failed[row.id] = staged
            else:
                self._by_ino[row.ino] = staged
            known.add(str(row.id))
        if not self._journal.is_whole:
            self._set_aside()
        for path in self._directory.iterdir():
            if path.name not in known:
                path.unlink(missing_ok=True)

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
