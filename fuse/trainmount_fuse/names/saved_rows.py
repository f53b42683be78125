"""What is to be saved of inodes, in a small file that is mapped into memory until some thousand of
them go to the database together. Only `inodes` uses it.

A statement of its own takes fifty microseconds and lets other threads have the interpreter, which
an event loop that opens a new file every millisecond waits for again each time.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from trainmount_fuse.names.mapped_file import mapped_file

__all__ = ["SavedRows"]

log = logging.getLogger(__name__)

_SIZE_BYTES: Final = 1 << 20
_WORD_BYTES: Final = 8

Row = tuple[int | str | None, ...]
"""The values of an inode, and at the end its number."""


class SavedRows:
    """Rows that a predecessor left or this process added, until they are written down elsewhere.
    The event loop's thread only.
    """

    def __init__(self, path: Path, write: Callable[[Sequence[Row]], None]) -> None:
        """`write` puts rows, each number once, where they stay. Where the file cannot be had, that
        is done with each row at once.
        """
        self._write = write
        self._rows: dict[int, Row] = {}
        self._end = _WORD_BYTES
        self._bytes: memoryview | None = None
        try:
            mapped = memoryview(mapped_file(path, _SIZE_BYTES, keep=True))
        except OSError as error:
            fields = {"path": str(path), "error": str(error)}
            log.warning("Inodes are saved in the database alone", extra=fields)
            return
        self._bytes = mapped
        # How far the file counts. A word of eight bytes is never half written.
        self._length = mapped[:_WORD_BYTES].cast("Q")
        try:
            for line in bytes(mapped[_WORD_BYTES : self._known_end()]).splitlines():
                row = json.loads(line)
                self._rows[row[-1]] = tuple(row)
        except (ValueError, TypeError, LookupError):
            # Torn by a power failure, which no mount outlives.
            log.warning("What was saved of inodes cannot be read", extra={"path": str(path)})
        self.settle()
        self._end = self._length[0] = _WORD_BYTES

    def __contains__(self, ino: int) -> bool:
        """Whether a row of that inode is not written down elsewhere yet."""
        return ino in self._rows

    def add(self, row: Row) -> None:
        """Keep a row, which outlives this process then.

        Raises sqlite3.Error where it is time to `settle`.
        """
        line = json.dumps(row).encode() + b"\n"
        if self._bytes is None or len(line) > _SIZE_BYTES - _WORD_BYTES:
            self.settle()
            self._write([row])
            return
        if self._end + len(line) > _SIZE_BYTES:
            self.settle()
        ino = row[-1]
        assert isinstance(ino, int)
        self._bytes[self._end : self._end + len(line)] = line
        self._end += len(line)
        # After the bytes that it lets count.
        self._length[0] = self._end
        self._rows[ino] = row

    def settle(self) -> None:
        """Write all rows down elsewhere. Raises sqlite3.Error; then all are here still."""
        if not self._rows:
            return
        self._write(list(self._rows.values()))
        self._rows.clear()
        if self._bytes is not None:
            self._end = self._length[0] = _WORD_BYTES

    def _known_end(self) -> int:
        end = self._length[0]
        return end if _WORD_BYTES <= end <= _SIZE_BYTES else _WORD_BYTES
