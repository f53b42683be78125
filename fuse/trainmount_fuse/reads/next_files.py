"""Which file of a directory is read next. Called by `reading` with each file whose reading begins.

Programs read directories in the order of their names, or of a listing, which in a store is the
same; several processes take turns, so the order is only roughly kept. What was guessed and then
read lets more be guessed; a file that is read although others were guessed lets less. Programs also
read every file of a directory in an order that they drew: where a good part of one was read like
that, or all of it before, the others are guessed, in any order. Only names that a listing has told
are guessed. State of the event loop's thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainmount_files.volume import FileStat
from trainmount_fuse.reads.read_patterns import Streams

__all__ = ["Folder", "NextFiles"]

_MAX_FOLDERS: Final = 64
_MAX_FILES: Final = 50_000
"""Larger directories are not sorted for this: that would keep the event loop for tenths of a
second.
"""

_FIRST_WINDOW_FILES: Final = 2
_MAX_WINDOW_FILES: Final = 64
_NEAR: Final = 64
"""Places in the order by which processes that take turns may be apart."""

_NEAR_SHARE: Final = 16
_MIN_NEAR: Final = 8
"""In a small directory, only so many parts of it: there, any two files are not far apart."""

_MIN_READ_FILES: Final = 4
"""Who has read so many files of a directory reads those whose names are looked up next."""

_SCATTERED_SHARE: Final = 16
_MIN_SCATTERED_FILES: Final = 16
"""Who has read one part in so many of a directory here and there, and at least so many files, is
taken to go through all of it.
"""

_ROUND_SHARE: Final = 8
"""Where all but one part in so many of a directory was read, a file that is read again begins the
next round.
"""

_GUESSED_OF_READ: Final = 2
"""So many times the bytes that were read here and there may be fetched and not read yet: what a
program wastes that stops is in proportion to what it used.
"""

_MAX_COUNTED_BYTES: Final = 8 << 20
"""Of one file that is read: of a larger one, maybe only the start was."""

_MAX_SCATTERED_AT_ONCE: Final = 8
"""With each file whose reading begins."""


@dataclass(slots=True)
class Folder:
    """How one directory is read."""

    listed_at: float
    names: list[str]
    """Of its files, in order."""

    places: dict[str, int]
    streams: Streams = field(default_factory=Streams)
    """Holds the event that ends fetches for guesses which were given up."""

    expected: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """Files that were guessed and not read yet, with the bytes that were asked for."""

    next_place: int = -1
    scheduled_until: int = 0
    window_files: int = 0

    was_read: bytearray = field(default_factory=bytearray)
    """By place, whether the reading of the file has begun."""

    num_read: int = 0
    read_bytes: int = 0
    num_scattered: int = 0
    """Readings that began away from the one before."""

    scattered: dict[str, int] = field(default_factory=dict)
    """As `expected`, of files guessed in no order."""

    scattered_streams: Streams = field(default_factory=Streams)
    scattered_bytes: int = 0
    scattered_until: int = 0

    was_scattered: bool = False
    """Whether it was read in no order in the round before."""

    def begin_round(self) -> None:
        """A program goes through it once more."""
        self.was_scattered = self.is_scattered
        self.was_read = bytearray(len(self.names))
        self.num_read = self.read_bytes = self.num_scattered = self.scattered_until = 0

    @property
    def is_scattered(self) -> bool:
        """Whether its files are read in no order, and many of them."""
        enough = max(_MIN_SCATTERED_FILES, len(self.names) // _SCATTERED_SHARE)
        if self.was_scattered:
            enough = 1
        return self.num_read >= enough and 2 * self.num_scattered > self.num_read


class NextFiles:
    """Guesses for the directories that are being read."""

    def __init__(self) -> None:
        self._folders: OrderedDict[int, Folder] = OrderedDict()

    def begin(
        self, directory_ino: int, name: str, entries: Mapping[str, FileStat], listed_at: float
    ) -> Folder | None:
        """The reading of a file begins; the folder, where something can be guessed in it.

        `entries` are what its last listing told, none where there is none.
        """
        folder = self._folder(directory_ino, entries, listed_at)
        place = None if folder is None else folder.places.get(name)
        if folder is None or place is None:
            return None
        if folder.was_read[place] and folder.num_read * _ROUND_SHARE >= len(folder.names) * (
            _ROUND_SHARE - 1
        ):
            folder.begin_round()
        if not folder.was_read[place]:
            folder.was_read[place] = 1
            folder.num_read += 1
            size_bytes = entries[name].size_bytes if name in entries else 0
            folder.read_bytes += min(size_bytes, _MAX_COUNTED_BYTES)
        near = min(_NEAR, max(_MIN_NEAR, len(folder.names) // _NEAR_SHARE))
        is_near = folder.next_place >= 0 and abs(place - folder.next_place) <= near
        if name in folder.expected:
            folder.window_files = min(_MAX_WINDOW_FILES, 2 * folder.window_files)
        elif is_near:
            folder.window_files = max(folder.window_files, _FIRST_WINDOW_FILES)
        else:
            folder.num_scattered += 1
            folder.window_files //= 4
            folder.scheduled_until = 0
        folder.next_place = max(folder.next_place, place + 1) if is_near else place + 1
        return folder

    def find(self, directory_ino: int) -> Folder | None:
        """The folder, where the reading of a file in it has begun."""
        return self._folders.get(directory_ino)

    def give_up(self) -> None:
        """Fetch nothing of what is under way."""
        for folder in self._folders.values():
            folder.streams.cancelled.set()
            folder.scattered_streams.cancelled.set()

    def wanted(self, folder: Folder) -> list[str]:
        """Names to fetch now, in order."""
        start = max(folder.next_place, folder.scheduled_until)
        end = min(len(folder.names), folder.next_place + folder.window_files)
        room = max(0, folder.window_files - len(folder.expected))
        return folder.names[start : min(end, start + room)]

    def note_asked(self, folder: Folder, name: str, num_bytes: int) -> None:
        """The file is being fetched."""
        folder.scheduled_until = folder.places[name] + 1
        if num_bytes:
            folder.expected[name] = num_bytes

    def scattered(self, folder: Folder, max_bytes: int) -> list[str]:
        """Names to fetch now where files are read in no order; `max_bytes` may be fetched and not
        read yet.
        """
        max_bytes = min(max_bytes, _GUESSED_OF_READ * folder.read_bytes)
        if not folder.is_scattered or folder.scattered_bytes >= max_bytes:
            return []
        found: list[str] = []
        place = folder.scattered_until
        while place < len(folder.names) and len(found) < _MAX_SCATTERED_AT_ONCE:
            name = folder.names[place]
            is_asked = name in folder.expected or name in folder.scattered
            if not folder.was_read[place] and not is_asked:
                found.append(name)
            place += 1
        if not found:
            folder.scattered_until = place
        return found

    def is_likely(self, folder: Folder, name: str) -> bool:
        """Whether a name that is looked up is likely to be read at once, and was not guessed."""
        place = folder.places.get(name)
        return (
            place is not None
            and folder.num_read >= _MIN_READ_FILES
            and not folder.was_read[place]
            and name not in folder.expected
            and name not in folder.scattered
            and folder.scattered_bytes < _GUESSED_OF_READ * folder.read_bytes
        )

    def note_looked_up(self, folder: Folder, name: str, num_bytes: int) -> None:
        """The file, whose name is being looked up, is being fetched."""
        folder.scattered[name] = num_bytes
        folder.scattered_bytes += num_bytes

    def note_scattered(self, folder: Folder, name: str, num_bytes: int) -> None:
        """The file is being fetched, or is too large to be where `num_bytes` is 0."""
        folder.scattered_until = folder.places[name] + 1
        if num_bytes:
            self.note_looked_up(folder, name, num_bytes)

    def take_used(self, folder: Folder, name: str) -> int:
        """Bytes that were fetched of a file that is read now."""
        guessed = folder.scattered.pop(name, 0)
        folder.scattered_bytes -= guessed
        return guessed + folder.expected.pop(name, 0)

    def take_passed(self, folder: Folder) -> int:
        """Bytes of files that were guessed and that the readers have passed by or turned from."""
        if not folder.expected:
            return 0
        if not folder.window_files:
            wasted = sum(folder.expected.values())
            folder.expected.clear()
            folder.streams.cancelled.set()
            folder.streams = Streams()
            return wasted
        wasted = 0
        for name in list(folder.expected):
            if folder.places[name] >= folder.next_place - 2 * _NEAR:
                break
            wasted += folder.expected.pop(name)
        return wasted

    def _folder(
        self, directory_ino: int, entries: Mapping[str, FileStat], listed_at: float
    ) -> Folder | None:
        folder = self._folders.get(directory_ino)
        is_new = folder is None or folder.listed_at != listed_at
        if is_new and 1 < len(entries) <= _MAX_FILES:
            names = sorted(name for name, stat in entries.items() if _is_wanted(stat))
            if folder is None or folder.names != names:
                places = {name: place for place, name in enumerate(names)}
                folder = self._folders[directory_ino] = Folder(listed_at, names, places)
                folder.was_read = bytearray(len(names))
                if len(self._folders) > _MAX_FOLDERS:
                    _ino, oldest = self._folders.popitem(last=False)
                    oldest.streams.cancelled.set()
                    oldest.scattered_streams.cancelled.set()
            folder.listed_at = listed_at
        if folder is not None:
            self._folders.move_to_end(directory_ino)
        return folder


def _is_wanted(stat: FileStat) -> bool:
    return not stat.is_directory and stat.size_bytes > 0
