"""What the store said of names, and for how long that counts: listings, single answers, absences.

`core` asks here before it believes anything. All state belongs to the event loop's thread. An
answer that was asked for before a local change of the same name is thrown away: between asking and
answering, the change may or may not have been seen.

A directory is read page by page (`readings`), as far as somebody wants to see it. Whoever comes
while a reading that is young enough is under way shares it. One that reached the end, and is not
too large to keep, answers for single names, too.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import trio

from trainmount_files.errors import NotADirectory, NotFound, Unavailable
from trainmount_files.volume import FileStat, Page, Volume
from trainmount_fuse.names.inodes import Inode, InodeTable
from trainmount_fuse.names.readings import MAX_KEPT, HiddenNames, Reading, ReadPage, without_twins
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.workers import Workers

__all__ = ["Metadata", "MetadataStatistics"]

_MAX_ENTRIES: Final = 150_000
"""Entries of all listings that are kept, at some 400 bytes each."""

_MAX_DIRECTORIES: Final = 20_000
_MAX_ABSENT: Final = 10_000

_MANY_AT_ONCE: Final = 4
_PAGE_ENTRIES: Final = 1000
"""Names asked for at once in one directory, for each page that it has, from which on a listing
answers for all: a page of the Files API costs the processor as much as three or four single
answers.
"""

_MANY_PAGES: Final = 2
"""A directory of more pages is asked for its names one by one."""

_MANY_IN_A_ROW: Final = 16
"""Names asked for one after the other in one directory while an answer counts, for each page that
it has, from which on a listing answers for those that come next. A page of a bucket is priced like
a dozen single answers.
"""

_LARGE_SECONDS: Final = 60.0
_MAX_ATTEMPTS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataStatistics:
    """Counters since the start; a snapshot."""

    num_stats: int
    """Single names that the store was asked for."""

    num_pages: int
    """Pages of directories that the store was asked for."""

    num_lookups: int
    """Names that were asked for here."""

    num_hits: int
    """Of those, answered by what was known, as there."""

    num_negative_hits: int
    """The same, as not there."""

    num_hidden: int
    """Different names seen that no file system can show beside the others."""

    num_entries: int
    """Entries of the listings kept now."""


@dataclass(slots=True)
class _Directory:
    reading: Reading | None = None
    """The newest one."""

    entries: dict[str, FileStat] = field(default_factory=dict)
    """Of the last reading that is whole, and what came after it."""

    listed_at: float = -math.inf
    absent: dict[str, float] = field(default_factory=dict)
    """Name -> when it was known not to be there."""

    changed: dict[str, float] = field(default_factory=dict)
    """Name -> when this mount changed it last."""

    last_change: float = -math.inf
    num_asking: int = 0
    """Names of it that somebody waits for: that the store is asked for, or a listing."""

    num_single: int = 0
    """Names that the store was asked for one by one since `single_since`, and no open followed."""

    single_since: float = -math.inf
    large_until: float = -math.inf
    """Until then it is taken for too large to be listed for a few names."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while it is listed for single names."""

    @property
    def is_worth_listing(self) -> bool:
        """Whether a listing costs less than an answer for each name that is waited for, or that
        comes next where names go on coming.
        """
        num_pages = max(1, -(-len(self.entries) // _PAGE_ENTRIES))
        return (
            self.num_asking >= _MANY_AT_ONCE * num_pages
            or self.num_single >= _MANY_IN_A_ROW * num_pages
        )

    def note_single(self, now: float, max_age_seconds: float) -> None:
        """The store is asked for one name, and its answer counts that long."""
        if not max_age_seconds:
            return
        if now - self.single_since >= max_age_seconds:
            self.num_single, self.single_since = 0, now
        self.num_single += 1


class Metadata:
    """Answers about names, asked of the store where what is known is too old."""

    def __init__(
        self, volume: Volume, workers: Workers, inodes: InodeTable, settings: MountSettings
    ) -> None:
        self._volume = volume
        self._workers = workers
        self._inodes = inodes
        self._settings = settings
        self._longest_timeout_seconds = max(
            settings.entry_timeout_seconds,
            settings.attr_timeout_seconds,
            settings.directory_timeout_seconds,
            settings.open_timeout_seconds,
        )
        self._has_twins = not volume.capabilities.keeps_directories
        self._directories: OrderedDict[int, _Directory] = OrderedDict()
        self._num_entries = 0
        self._hidden = HiddenNames()
        self._emptied: set[tuple[int, str]] = set()
        self._num_stats = self._num_pages = self._num_lookups = 0
        self._num_hits = self._num_negative_hits = 0

    @property
    def num_hidden(self) -> int:
        """Different names seen that no file system can show beside the others."""
        return self._hidden.count

    def statistics(self) -> MetadataStatistics:
        """A snapshot of the counters."""
        return MetadataStatistics(
            num_stats=self._num_stats,
            num_pages=self._num_pages,
            num_lookups=self._num_lookups,
            num_hits=self._num_hits,
            num_negative_hits=self._num_negative_hits,
            num_hidden=self._hidden.count,
            num_entries=self._num_entries,
        )

    def reading(self, directory: Inode) -> Reading:
        """A reading of the directory no older than the directory timeout."""
        known = self._directory(directory.ino)
        now = time.monotonic()
        newest = known.reading
        if newest is not None and newest.is_kept:
            age = now - newest.asked_at
            if age < self._settings.directory_timeout_seconds:
                return newest
        if now - known.listed_at >= self._longest_timeout_seconds:
            # Good for nothing any more: two listings of a large directory are too much memory.
            self._num_entries -= len(known.entries)
            known.entries, known.listed_at = {}, -math.inf
        known.reading = Reading(directory.ino, self._inodes.path_of(directory), now)
        return known.reading

    def reading_from(self, directory: Inode, token: str, asked_at: float) -> Reading:
        """A reading that goes on where a predecessor's was; nobody shares it."""
        path = self._inodes.path_of(directory)
        return Reading(directory.ino, path, asked_at, tokens=[token], num_entries=MAX_KEPT + 1)

    async def page(self, reading: Reading, index: int) -> ReadPage:
        """One page of a reading: any that was seen, or the one behind it. Raises VolumeError."""
        async with reading.lock:
            now = time.monotonic()
            if index < len(reading.pages):
                page = reading.pages[index]
                if page is not None:
                    return page
                answer = await self._ask(reading, index)
                shown = self._hidden.shown(reading.path, answer.entries)
                return ReadPage(shown, now, answer.next_page_token or None)
            answer = await self._ask(reading, index)
            token = answer.next_page_token or None
            if token is not None and token in reading.tokens:
                raise Unavailable("list", reading.path, "the store repeated a page token")
            self._hidden.note(reading.path, answer.refused)
            shown = self._hidden.shown(reading.path, answer.entries)
            if self._has_twins:
                shown = without_twins(reading, shown, self._hidden, is_last=token is None)
                shown = tuple(self._as_shown(reading.directory_ino, one) for one in shown)
            page = ReadPage(shown, now, token)
            self._append(reading, page)
            return page

    async def find(
        self, directory: Inode, name: str, max_age_seconds: float
    ) -> tuple[FileStat | None, float]:
        """What is at the name (None: nothing) and when that was asked, no older than
        `max_age_seconds`.

        An absence is believed for the negative timeout where that is shorter. Raises VolumeError,
        OSError.
        """
        known = self._directory(directory.ino)
        self._num_lookups += 1
        max_absence = min(max_age_seconds, self._settings.negative_timeout_seconds)
        for _attempt in range(_MAX_ATTEMPTS):
            arrived_at = time.monotonic()
            answer = self._known(known, name, max_age_seconds, max_absence)
            if answer is None and known.is_worth_listing and known.large_until < arrived_at:
                look = partial(self._known, known, name, max_age_seconds, max_absence, arrived_at)
                known.num_asking += 1
                try:
                    await self._list_for_names(directory, known, look)
                finally:
                    known.num_asking -= 1
                answer = look()
            if answer is not None:
                self._num_hits += answer[0] is not None
                self._num_negative_hits += answer[0] is None
                return answer
            path = self._inodes.path_of(directory)
            path = f"{path}/{name}" if path else name
            was_directory = self._has_twins and self._was_directory(directory.ino, name)
            now = time.monotonic()
            self._num_stats += 1
            known.num_asking += 1
            known.note_single(now, max_age_seconds)
            try:
                stat = await self._workers.call(
                    _stat, self._volume, path, self._has_twins, was_directory
                )
            finally:
                known.num_asking -= 1
            if stat is not None:
                stat = self._as_shown(directory.ino, stat)
            if known.changed.get(name, -math.inf) < now:
                break
        self._keep(known, name, stat, now)
        return stat, now

    def _known(
        self,
        known: _Directory,
        name: str,
        max_age_seconds: float,
        max_absence: float,
        arrived_at: float = math.inf,
    ) -> tuple[FileStat | None, float] | None:
        """What is known of the name and young enough, or asked for after `arrived_at`; None where
        the store has to be asked.
        """
        now = time.monotonic()

        def counts(asked_at: float, max_age: float) -> bool:
            return now - asked_at < max_age or asked_at >= arrived_at

        absent_at = known.absent.get(name, -math.inf)
        if counts(absent_at, max_absence):
            return None, absent_at
        if name in known.entries:
            if counts(known.listed_at, max_age_seconds):
                return known.entries[name], known.listed_at
        elif counts(known.listed_at, max_absence):
            return None, known.listed_at
        return None

    async def _list_for_names(
        self, directory: Inode, known: _Directory, look: Callable[[], object]
    ) -> None:
        """Have a listing that answers whoever asks, shared by all who wait for one.

        Does nothing where the directory is large, and where those who waited for a listing before
        are too few for another.
        """
        async with known.lock:
            if look() is not None or known.large_until > time.monotonic():
                return
            if not known.is_worth_listing:
                return
            max_pages = max(_MANY_PAGES, known.num_single // _MANY_IN_A_ROW)
            known.num_single = 0
            reading = Reading(directory.ino, self._inodes.path_of(directory), time.monotonic())
            known.reading = reading
            for index in range(max_pages):
                page = await self.page(reading, index)
                if page.next_token is None:
                    return
            known.large_until = time.monotonic() + _LARGE_SECONDS

    def note_opened(self, directory_ino: int) -> None:
        """The answer for a name served an open, which takes no listing's word."""
        known = self._directories.get(directory_ino)
        if known is not None and known.num_single:
            known.num_single -= 1

    def listed(self, directory_ino: int) -> tuple[Mapping[str, FileStat], float]:
        """The entries of the newest whole listing that is kept, and when it was asked for; none and
        minus infinity where there is none. Asks nobody.
        """
        known = self._directories.get(directory_ino)
        return ({}, -math.inf) if known is None else (known.entries, known.listed_at)

    def was_changed_since(self, parent_ino: int, name: str, asked_at: float) -> bool:
        """Whether this mount changed the name after that, so that an answer from then may not
        count.
        """
        known = self._directories.get(parent_ino)
        return known is not None and known.changed.get(name, -math.inf) >= asked_at

    def changed_since(self, parent_ino: int, asked_at: float) -> list[str]:
        """The names in the directory that this mount changed after that."""
        known = self._directories.get(parent_ino)
        if known is None or known.last_change < asked_at:
            return []
        return [name for name, at in known.changed.items() if at >= asked_at]

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

    def note_emptied(self, parent_ino: int, name: str) -> None:
        """This mount removed the last file of a directory beside which a bucket has a file of the
        same name: until `note_removed_directory` it stays a directory.
        """
        self._emptied.add((parent_ino, name))

    def note_removed_directory(self, parent_ino: int, name: str) -> None:
        """This mount removed a directory; the file of its name, if there is one, shows now."""
        if self.is_emptied(parent_ino, name):
            self._emptied.remove((parent_ino, name))
            self.note_unknown(parent_ino, name)
        else:
            self.note_absent(parent_ino, name)

    def is_emptied(self, parent_ino: int, name: str) -> bool:
        """Whether it is a directory here only because this mount emptied it."""
        return (parent_ino, name) in self._emptied

    def note_unknown(self, parent_ino: int, name: str) -> None:
        """Ask again: what is known of the name is not to be trusted."""
        known = self._directory(parent_ino)
        self._changed(known, name)
        self._drop_entry(known, name)
        known.absent.pop(name, None)
        # A listing without the name would call it absent.
        known.listed_at = -math.inf
        known.reading = None

    def forget(self, directory_ino: int) -> None:
        """Ask again for every name in the directory."""
        known = self._directories.pop(directory_ino, None)
        if known is not None:
            self._num_entries -= len(known.entries)

    def clear(self) -> None:
        """Forget everything, as after a directory was moved."""
        self._directories.clear()
        self._num_entries = 0

    def _directory(self, ino: int) -> _Directory:
        known = self._directories.get(ino)
        if known is None:
            known = self._directories[ino] = _Directory()
            self._bound()
        self._directories.move_to_end(ino)
        return known

    def _bound(self) -> None:
        while len(self._directories) > 1 and (
            self._num_entries > _MAX_ENTRIES or len(self._directories) > _MAX_DIRECTORIES
        ):
            _ino, oldest = self._directories.popitem(last=False)
            self._num_entries -= len(oldest.entries)

    async def _ask(self, reading: Reading, index: int) -> Page:
        self._num_pages += 1
        try:
            return await self._workers.call(
                self._volume.list_page, reading.path, reading.tokens[index]
            )
        except NotADirectory:
            directory = self._inodes.get(reading.directory_ino)
            if not self.is_emptied(directory.parent_ino, directory.name):
                raise
            return Page((), None)

    def _append(self, reading: Reading, page: ReadPage) -> None:
        reading.pages.append(page)
        reading.num_entries += len(page.entries)
        reading.tokens.append(page.next_token)
        if not reading.is_kept:
            # The last two stay, for readers that go side by side.
            for index in range(len(reading.pages) - 2):
                reading.pages[index] = None
        elif page.next_token is None:
            self._keep_whole(reading)

    def _keep_whole(self, reading: Reading) -> None:
        known = self._directory(reading.directory_ino)
        if known.reading is not reading or known.last_change >= reading.asked_at:
            return
        entries = {stat.name: stat for page in reading.pages if page for stat in page.entries}
        self._num_entries += len(entries) - len(known.entries)
        known.entries, known.listed_at = entries, reading.asked_at
        known.absent.clear()
        self._bound()

    def _as_shown(self, parent_ino: int, stat: FileStat) -> FileStat:
        is_emptied = (parent_ino, stat.name) in self._emptied
        return FileStat(stat.path, is_directory=True) if is_emptied else stat

    def _was_directory(self, parent_ino: int, name: str) -> bool:
        child = self._inodes.find_child(parent_ino, name)
        return child is not None and child.is_directory

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
            # Who reads from here on must not be shown what a listing from before them says.
            known.reading, known.listed_at = None, -math.inf
        known.changed[name] = known.last_change = now

    def _drop_entry(self, known: _Directory, name: str) -> None:
        if known.entries.pop(name, None) is not None:
            self._num_entries -= 1


def _stat(volume: Volume, path: str, has_twins: bool, was_directory: bool) -> FileStat | None:
    try:
        stat = volume.stat(path)
    except (NotFound, NotADirectory):
        return None
    if not has_twins or stat.is_directory or (stat.size_bytes and not was_directory):
        return stat
    # A file of no bytes is how some tools keep a directory, and one that showed as a directory
    # goes on as one while something is in it.
    try:
        below = volume.list_page(path)
    except (NotFound, NotADirectory):
        return stat
    return FileStat(path, is_directory=True) if below.entries or below.next_page_token else stat
