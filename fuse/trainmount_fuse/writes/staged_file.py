"""One file with local bytes. Made by `staging`, changed by it and `uploading`."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from trainmount_fuse.writes.journal import JournalRow
from trainmount_fuse.writes.streaming import StreamedUpload

__all__ = ["StagedFile"]


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
        self.written_end = 0
        """Every byte before it was written, so that nobody is likely to come back to it."""

        self.ahead: StreamedUpload | None = None
        """The upload that has been begun while the file is written."""

        self.may_stream = True
        """No upload was given up because its bytes were changed."""

        self.is_left = False
        """Nobody had it open when this daemon began: what the store has may have come later."""

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
