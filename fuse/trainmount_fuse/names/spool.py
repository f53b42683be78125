"""What each open directory has shown, on disk: for programs that go back in it (seekdir), and for a
successor, to which a position means the same. `listing` writes it page by page.

Lost or cut off, it costs no more than the order: the directory is then read anew.
"""

from __future__ import annotations

import json
import logging
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from trainmount_files.volume import FileStat
from trainmount_fuse.names.readings import Reading

__all__ = ["Cursor", "ShownEntry", "ShownPage", "Spool"]

log = logging.getLogger(__name__)

_HEADER: Final = struct.Struct("<IIQ")
"""Bytes of the page, their checksum, and its first position."""


@dataclass(frozen=True, slots=True)
class ShownEntry:
    """One entry as it was shown."""

    name: str
    ino: int
    stat: FileStat | None
    """None for bytes that were only here."""


@dataclass(frozen=True, slots=True)
class ShownPage:
    """Entries at the positions from `first` on."""

    first: int
    entries: tuple[ShownEntry, ...]
    asked_at: float
    """Monotonic time at which the store was asked."""

    began_at: float
    """The same of the first page of this reading."""

    next_token: str | None
    """How the store's listing goes on; None at its end, with what is only here at the end of the
    page.
    """

    @property
    def is_last(self) -> bool:
        return self.next_token is None

    @property
    def end(self) -> int:
        """The first position of the page behind."""
        return self.first + len(self.entries)


@dataclass(slots=True)
class Cursor:
    """How far one handle has read its directory."""

    page: ShownPage | None = None
    """The page shown last."""

    newest: ShownPage | None = None
    """The page furthest on."""

    firsts: list[int] = field(default_factory=list)
    """The first position of each page on disk, and beside it where the page is."""

    offsets: list[int] = field(default_factory=list)
    end_offset: int = 0
    reading: Reading | None = None
    """Where further pages come from; None before this process read one."""

    num_read: int = 0
    """Pages of that reading which were shown."""

    hidden: frozenset[str] = frozenset()
    """What was shown already by a predecessor, whose reading could not go on."""

    lock: trio.Lock = field(default_factory=trio.Lock)


class Spool:
    """One file for each open directory. Used by the event loop's thread: a page is some 30 KB in
    the operating system's memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def keep_only(self, fhs: Iterable[int]) -> None:
        """Delete what belongs to other handles than these."""
        kept = {str(fh) for fh in fhs}
        for path in self._directory.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)

    def append(self, fh: int, cursor: Cursor, page: ShownPage) -> None:
        """Write down a page before it is shown. A disk that is full only makes it lost."""
        payload = zlib.compress(_encoded(page), 1)
        frame = _HEADER.pack(len(payload), zlib.crc32(payload), page.first) + payload
        try:
            with self._path(fh).open("r+b" if cursor.end_offset else "wb") as file:
                file.seek(cursor.end_offset)
                file.write(frame)
        except OSError as error:
            log.warning("A listing cannot be kept", extra={"reason": error.strerror})
        else:
            cursor.firsts.append(page.first)
            cursor.offsets.append(cursor.end_offset)
            cursor.end_offset += len(frame)
        cursor.newest = page

    def page_at(self, fh: int, cursor: Cursor, position: int) -> ShownPage | None:
        """The page that has this position; None where it is lost, or behind the end."""
        index = bisect_right(cursor.firsts, position) - 1
        if index < 0:
            return None
        with suppress(OSError), self._path(fh).open("rb") as file:
            file.seek(cursor.offsets[index])
            page = _read(file.read(_HEADER.size), file.read)
            if page is not None and page.first <= position < page.end:
                return page
        return None

    def restore(self, fh: int) -> Cursor:
        """How far a predecessor's handle was; a cursor at the start where that is lost."""
        cursor = Cursor()
        with suppress(OSError), self._path(fh).open("rb") as file:
            while True:
                page = _read(file.read(_HEADER.size), file.read)
                if page is None:
                    break
                cursor.firsts.append(page.first)
                cursor.offsets.append(cursor.end_offset)
                cursor.end_offset, cursor.newest = file.tell(), page
        return cursor

    def names(self, fh: int) -> Iterator[str]:
        """Every name that the handle was shown, as far as that is not lost."""
        with suppress(OSError), self._path(fh).open("rb") as file:
            while (page := _read(file.read(_HEADER.size), file.read)) is not None:
                yield from (one.name for one in page.entries)

    def delete(self, fh: int) -> None:
        """The handle is closed, or rewound."""
        with suppress(OSError):
            self._path(fh).unlink()

    def _path(self, fh: int) -> Path:
        return self._directory / str(fh)


def _encoded(page: ShownPage) -> bytes:
    entries = [
        [one.name, one.ino]
        if one.stat is None
        else [
            one.name,
            one.ino,
            one.stat.path,
            one.stat.is_directory,
            one.stat.size_bytes,
            one.stat.mtime_ns,
            one.stat.version,
        ]
        for one in page.entries
    ]
    values = [page.asked_at, page.began_at, page.next_token, entries]
    return json.dumps(values, separators=(",", ":")).encode()


def _read(header: bytes, read: Callable[[int], bytes]) -> ShownPage | None:
    """None at the end, and where the process was killed while it wrote."""
    if len(header) < _HEADER.size:
        return None
    length, checksum, first = _HEADER.unpack(header)
    payload = read(length)
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return None
    asked_at, began_at, token, rows = json.loads(zlib.decompress(payload))
    entries = tuple(
        ShownEntry(row[0], row[1], FileStat(*row[2:]) if len(row) > 2 else None) for row in rows
    )
    return ShownPage(first, entries, asked_at, began_at, token)
