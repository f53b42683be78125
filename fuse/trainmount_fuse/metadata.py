"""What the store said of names, and for how long that counts: listings, single answers, absences.

`core` asks here before it believes anything. All state belongs to the event loop's thread. An
answer that was asked for before a local change of the same name is thrown away: between asking and
answering, the change may or may not have been seen.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import trio

from trainmount_files.errors import NotADirectory, NotFound
from trainmount_files.volume import FileStat, Volume, list_directory
from trainmount_fuse.inodes import Inode, InodeTable
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.workers import Workers

__all__ = ["Listed", "Metadata", "is_valid_name"]

NAME_MAX_BYTES: Final = 255

_MAX_ENTRIES: Final = 500_000
_MAX_ABSENT: Final = 10_000
_MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True)
class Listed:
    """A whole directory at one moment."""

    entries: dict[str, FileStat]
    asked_at: float
    """Monotonic time before the first page was asked for."""


@dataclass(slots=True)
class _Directory:
    entries: dict[str, FileStat] = field(default_factory=dict)
    listed_at: float = -math.inf
    absent: dict[str, float] = field(default_factory=dict)
    """Name -> when it was known not to be there."""

    changed: dict[str, float] = field(default_factory=dict)
    """Name -> when this mount changed it last."""

    last_change: float = -math.inf
    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while listing, so that one listing serves all who wait."""


class Metadata:
    """Answers about names, asked of the store where what is known is too old."""

    def __init__(
        self, volume: Volume, workers: Workers, inodes: InodeTable, settings: MountSettings
    ) -> None:
        self._volume = volume
        self._workers = workers
        self._inodes = inodes
        self._settings = settings
        self._directories: OrderedDict[int, _Directory] = OrderedDict()
        self._num_entries = 0
        self.num_hidden = 0
        """Entries of the last listings whose names no file system can show."""

    async def list(self, directory: Inode) -> Listed:
        """The directory's entries, no older than the directory timeout. Raises VolumeError,
        OSError.
        """
        known = self._directory(directory.ino)
        async with known.lock:
            now = time.monotonic()
            if now - known.listed_at < self._settings.directory_timeout_seconds:
                return Listed(known.entries, known.listed_at)
            path = self._inodes.path_of(directory)
            entries, num_hidden = await self._workers.call(_collect, self._volume, path)
            self.num_hidden = num_hidden
            if known.last_change < now:
                self._num_entries += len(entries) - len(known.entries)
                known.entries, known.listed_at = entries, now
                known.absent.clear()
                self._bound()
            return Listed(entries, now)

    async def find(
        self, directory: Inode, name: str, max_age_seconds: float
    ) -> tuple[FileStat | None, float]:
        """What is at the name (None: nothing) and when that was asked, no older than
        `max_age_seconds`.

        An absence is believed for the negative timeout where that is shorter. Raises VolumeError,
        OSError.
        """
        known = self._directory(directory.ino)
        max_absence = min(max_age_seconds, self._settings.negative_timeout_seconds)
        for _attempt in range(_MAX_ATTEMPTS):
            now = time.monotonic()
            if now - known.absent.get(name, -math.inf) < max_absence:
                return None, known.absent[name]
            if name in known.entries:
                if now - known.listed_at < max_age_seconds:
                    return known.entries[name], known.listed_at
            elif now - known.listed_at < max_absence:
                return None, known.listed_at
            path = self._inodes.path_of(directory)
            path = f"{path}/{name}" if path else name
            stat = await self._workers.call(_stat, self._volume, path)
            if known.changed.get(name, -math.inf) < now:
                break
        self._keep(known, name, stat, now)
        return stat, now

    def was_changed_since(self, parent_ino: int, name: str, asked_at: float) -> bool:
        """Whether this mount changed the name after that, so that an answer from then may not
        count.
        """
        known = self._directories.get(parent_ino)
        return known is not None and known.changed.get(name, -math.inf) >= asked_at

    def note_present(self, parent_ino: int, name: str, stat: FileStat) -> None:
        """This mount put something at the name."""
        known = self._directory(parent_ino)
        self._changed(known, name)
        known.absent.pop(name, None)
        if known.listed_at > -math.inf:
            self._num_entries += name not in known.entries
            known.entries[name] = stat

    def note_absent(self, parent_ino: int, name: str) -> None:
        """This mount removed whatever was at the name."""
        known = self._directory(parent_ino)
        self._changed(known, name)
        self._drop_entry(known, name)
        known.absent[name] = time.monotonic()

    def note_unknown(self, parent_ino: int, name: str) -> None:
        """Ask again: what is known of the name is not to be trusted."""
        known = self._directory(parent_ino)
        self._changed(known, name)
        self._drop_entry(known, name)
        known.absent.pop(name, None)
        # A listing without the name would call it absent.
        known.listed_at = -math.inf

    def forget(self, directory_ino: int) -> None:
        """Ask again for every name in the directory."""
        known = self._directories.pop(directory_ino, None)
        if known is not None:
            # Whoever is listing it now keeps nothing of that.
            known.last_change = time.monotonic()
            self._num_entries -= len(known.entries)

    def clear(self) -> None:
        """Forget everything, as after a directory was moved."""
        for known in self._directories.values():
            known.last_change = time.monotonic()
        self._directories.clear()
        self._num_entries = 0

    def _directory(self, ino: int) -> _Directory:
        known = self._directories.get(ino)
        if known is None:
            known = self._directories[ino] = _Directory()
        self._directories.move_to_end(ino)
        return known

    def _keep(self, known: _Directory, name: str, stat: FileStat | None, now: float) -> None:
        if stat is None:
            self._drop_entry(known, name)
            if len(known.absent) >= _MAX_ABSENT:
                known.absent.clear()
            known.absent[name] = now
            return
        known.absent.pop(name, None)
        # Newer than the rest of the listing; without it, the listing would call the name absent.
        if known.listed_at > -math.inf:
            self._num_entries += name not in known.entries
            known.entries[name] = stat

    def _changed(self, known: _Directory, name: str) -> None:
        now = time.monotonic()
        if len(known.changed) >= _MAX_ABSENT:
            known.changed = {n: at for n, at in known.changed.items() if now - at < 60}
        known.changed[name] = known.last_change = now

    def _drop_entry(self, known: _Directory, name: str) -> None:
        if known.entries.pop(name, None) is not None:
            self._num_entries -= 1

    def _bound(self) -> None:
        while self._num_entries > _MAX_ENTRIES and len(self._directories) > 1:
            _ino, oldest = self._directories.popitem(last=False)
            self._num_entries -= len(oldest.entries)


def is_valid_name(name: str) -> bool:
    """Whether a directory entry of this name can exist in a file system."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and len(name.encode(errors="surrogatepass")) <= NAME_MAX_BYTES
    )


def _collect(volume: Volume, path: str) -> tuple[dict[str, FileStat], int]:
    entries: dict[str, FileStat] = {}
    num_hidden = 0
    for stat in list_directory(volume, path):
        if not is_valid_name(stat.name):
            num_hidden += 1
        elif stat.name in entries and entries[stat.name].is_directory:
            # A store of keys can have a file and a directory of one name; the directory shows.
            num_hidden += 1
        else:
            entries[stat.name] = stat
    return entries, num_hidden


def _stat(volume: Volume, path: str) -> FileStat | None:
    try:
        return volume.stat(path)
    except (NotFound, NotADirectory):
        return None
