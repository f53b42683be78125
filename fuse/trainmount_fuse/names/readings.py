"""One reading of a directory from the store, and which of the names in it a file system can show.
Called by `metadata`; used by the event loop's thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import trio

from trainmount_files.volume import FileStat

__all__ = [
    "MAX_KEPT",
    "NAME_MAX_BYTES",
    "HiddenNames",
    "ReadPage",
    "Reading",
    "is_valid_name",
    "without_twins",
]

log = logging.getLogger(__name__)

NAME_MAX_BYTES: Final = 255

MAX_KEPT: Final = 100_000
"""Entries of one listing that is kept."""

_MAX_HIDDEN: Final = 10_000


@dataclass(frozen=True, slots=True)
class ReadPage:
    """The entries of one page that a file system can show."""

    entries: tuple[FileStat, ...]
    asked_at: float
    """Monotonic time before it was asked for."""

    next_token: str | None
    """None: this is the last page."""


@dataclass(slots=True, eq=False)
class Reading:
    """One reading of a directory, page by page; shared by all who read it meanwhile."""

    directory_ino: int
    path: str
    asked_at: float
    """Monotonic time before the first page was asked for."""

    tokens: list[str | None] = field(default_factory=lambda: [None])
    """By which each page is asked for."""

    pages: list[ReadPage | None] = field(default_factory=list)
    """None: given up, because the directory is large."""

    num_entries: int = 0
    held: dict[str, FileStat] = field(default_factory=dict)
    """Files of a bucket that a directory of the same name may still follow."""

    lock: trio.Lock = field(default_factory=trio.Lock)
    """Held while a page is asked for."""

    @property
    def is_kept(self) -> bool:
        return self.num_entries <= MAX_KEPT


class HiddenNames:
    """Names seen that no file system can show beside the others, each counted and logged once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    @property
    def count(self) -> int:
        """Different ones, up to 10,000."""
        return len(self._names)

    def shown(self, path: str, entries: Iterable[FileStat]) -> tuple[FileStat, ...]:
        """Those of a directory's entries that a file system can show."""
        shown: list[FileStat] = []
        for stat in entries:
            if is_valid_name(stat.name):
                shown.append(stat)
            else:
                self.note(path, (stat.name,))
        return tuple(shown)

    def note(self, path: str, names: Iterable[str]) -> None:
        """These are not shown."""
        for name in names:
            whole = f"{path}/{name}"
            if whole in self._names or len(self._names) >= _MAX_HIDDEN:
                continue
            self._names.add(whole)
            log.warning(
                "A name that no file system can show beside the others is hidden",
                extra={"path": ascii(whole)[1:-1]},
            )


def without_twins(
    reading: Reading, page: tuple[FileStat, ...], hidden: HiddenNames, *, is_last: bool
) -> tuple[FileStat, ...]:
    """A bucket can have a file and a directory of one name; the directory shows.

    Keys come in their order, so that between `x` and `x/` only names can stand that begin with
    `x` and a character before the slash: a file is held back until its directory cannot come.
    """
    shown: list[FileStat] = []
    for stat in page:
        key = stat.name + ("/" if stat.is_directory else "")
        passed = [name for name in reading.held if not _is_between(name, key)]
        shown.extend(reading.held.pop(name) for name in passed)
        if not stat.is_directory:
            reading.held[stat.name] = stat
            continue
        if reading.held.pop(stat.name, None) is not None:
            hidden.note(reading.path, (stat.name,))
        shown.append(stat)
    if is_last:
        shown.extend(reading.held.values())
        reading.held.clear()
    return tuple(shown)


def is_valid_name(name: str) -> bool:
    """Whether a directory entry of this name can exist in a file system."""
    return (
        name not in ("", ".", "..")
        and "/" not in name
        and "\0" not in name
        and len(name.encode(errors="surrogatepass")) <= NAME_MAX_BYTES
    )


def _is_between(name: str, key: str) -> bool:
    """Whether the directory `name` may still follow behind `key`."""
    return key.startswith(name) and key[len(name) :] <= "/"
