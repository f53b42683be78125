"""The frozen listing that a loader works on, its fingerprint, and what has changed since a state
was taken.

Called by `dataset` (which gets the entries from a `sources.Source` or a `recorded`) and
`loader`. A position is a number of samples in the order of a listing, so it means something only
over the same listing: the state therefore carries a summary, and a directory that has changed is an
error that names the first file that differs, never a silent shift.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from trainmount.errors import ManifestChanged

__all__ = ["Entry", "Manifest", "compile_pattern", "is_hidden"]

# A listing of so many files is some 20 KiB in the state, compressed, and lets the error name any
# file. Longer ones leave digests at regular places, which name the neighbourhood of the first
# difference.
_MAX_LISTED_FILES: Final = 4096
_NUM_MARKS: Final = 64

_BOOKKEEPING: Final = re.compile(
    r"_SUCCESS|_committed_.*|_started_.*|_metadata|_common_metadata|_delta_log|_temporary"
)


# Each sample makes one, which takes three times as long where it is frozen.
@dataclass(slots=True, order=True, unsafe_hash=True)
class Entry:
    """One file of the listing. Two are equal if path and size are. Nobody changes one."""

    path: str
    """Relative to the dataset's directory, with `/` between names."""

    size_bytes: int

    version: str = field(default="", compare=False)
    """What the store said of the content when it was listed; empty where nobody asked."""

    checksum: str = field(default="", compare=False)
    """`crc32:` or a name of `hashlib`, and hexadecimal digits; empty where none is known."""


class Manifest:
    """Files in the order of their paths, or in the given one. Immutable.

    A file takes its path's bytes and 16 more, in a few objects: with an object a file, each loader
    worker would copy all of them by merely looking at them, since that counts references.
    """

    def __init__(self, entries: Iterable[Entry], *, keeps_order: bool = False) -> None:
        self._columns = _Columns()
        self._columns.extend(entries)
        if not keeps_order:
            self._columns.sort()

    def __len__(self) -> int:
        return len(self._columns.sizes)

    def __getitem__(self, index: int) -> Entry:
        return self._columns.entry(index)

    def __iter__(self) -> Iterator[Entry]:
        return map(self._columns.entry, range(len(self)))

    def size_bytes_of(self, index: int) -> int:
        return self._columns.sizes[index]

    def numbers_of(self, paths: Collection[str]) -> frozenset[int]:
        """Those of these files that are listed. One pass, where any are asked for."""
        if not paths:
            return frozenset()
        return frozenset(number for number, entry in enumerate(self) if entry.path in paths)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All of them, each an object of its own."""
        return tuple(self)

    @property
    def total_bytes(self) -> int:
        return sum(self._columns.sizes)

    @property
    def fingerprint(self) -> str:
        """Hexadecimal; equal for listings of the same paths and sizes, on any machine."""
        return self._marks[-1][1]

    def summary(self) -> dict[str, Any]:
        """What a state keeps of this listing. JSON-able."""
        return dict(self._summary)

    def check(self, summary: Mapping[str, Any], directory: str) -> None:
        """Nothing if `summary` is of this listing.

        Raises:
            ManifestChanged: it is of another one; the message names the first file that differs.
        """
        if summary.get("fingerprint") == self.fingerprint:
            return
        count = summary.get("count")
        raise ManifestChanged(
            f"{directory} has changed since the state was taken: {self._first_difference(summary)} "
            f"({count} files then, {len(self)} now). "
            "Restore the directory, or start from the first epoch."
        )

    @cached_property
    def _summary(self) -> dict[str, Any]:
        summary = {
            "count": len(self),
            "bytes": self.total_bytes,
            "fingerprint": self.fingerprint,
        }
        if len(self) <= _MAX_LISTED_FILES:
            return summary | {"files": _pack(self)}
        return summary | {"marks": [list(mark) for mark in self._marks[:-1]]}

    @cached_property
    def _marks(self) -> list[tuple[int, str]]:
        """Numbers of files and the digest of so many; the last is that of all. One pass, which
        takes a second for a million files.
        """
        places = [len(self) * number // _NUM_MARKS for number in range(1, _NUM_MARKS + 1)]
        return list(zip(places, self._prefix_digests(places), strict=True))

    def _first_difference(self, summary: Mapping[str, Any]) -> str:
        if "files" in summary:
            return _first_difference(_unpack(summary["files"]), self)
        before = 0
        marks = [(int(place), str(digest)) for place, digest in summary.get("marks", ())]
        places = [place for place, _ in marks if place <= len(self)]
        for (place, digest), now in zip(marks, self._prefix_digests(places), strict=False):
            if digest != now:
                break
            before = place
        if before >= len(self):
            return f"files after {self[len(self) - 1].path if len(self) else 'the first'} are gone"
        return f"the first difference is at or after {self[before].path}"

    def _prefix_digests(self, places: Sequence[int]) -> list[str]:
        """A digest of the first `n` entries for each `n` of `places`, which ascend."""
        digest = hashlib.sha256()
        found: list[str] = []
        done = 0
        paths, sizes = self._columns.paths, self._columns.sizes
        for place in places:
            for index in range(done, place):
                digest.update(paths.encoded(index) + b"\0%d\n" % sizes[index])
            done = place
            found.append(digest.copy().hexdigest())
        return found


class _Texts:
    """A column of strings in two objects."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._ends = array("Q")

    def append(self, text: str) -> None:
        self._bytes += text.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._bytes))

    def encoded(self, index: int) -> bytearray:
        start = self._ends[index - 1] if index else 0
        return self._bytes[start : self._ends[index]]

    def __getitem__(self, index: int) -> str:
        return self.encoded(index).decode("utf-8", "surrogateescape")


class _Sparse:
    """A column of strings most of which are empty, or all of which are there."""

    def __init__(self) -> None:
        self._texts: _Texts | None = None

    def append(self, text: str, index: int) -> None:
        if self._texts is None:
            if not text:
                return
            self._texts = _Texts()
            for _ in range(index):
                self._texts.append("")
        self._texts.append(text)

    def __getitem__(self, index: int) -> str:
        return self._texts[index] if self._texts is not None else ""


class _Columns:
    """The entries, field by field."""

    def __init__(self) -> None:
        self.paths = _Texts()
        self.sizes = array("Q")
        self.versions = _Sparse()
        self.checksums = _Sparse()
        self._is_sorted = True

    def extend(self, entries: Iterable[Entry]) -> None:
        last = ""
        for index, entry in enumerate(entries):
            self.paths.append(entry.path)
            self.sizes.append(entry.size_bytes)
            self.versions.append(entry.version, index)
            self.checksums.append(entry.checksum, index)
            self._is_sorted = self._is_sorted and last <= entry.path
            last = entry.path

    def entry(self, index: int) -> Entry:
        if not 0 <= index < len(self.sizes):
            raise IndexError(f"file {index} is not in a listing of {len(self.sizes)}")
        return Entry(
            self.paths[index], self.sizes[index], self.versions[index], self.checksums[index]
        )

    def sort(self) -> None:
        if self._is_sorted:
            return
        order = sorted(range(len(self.sizes)), key=self.paths.__getitem__)
        ordered = _Columns()
        ordered.extend(map(self.entry, order))
        self.__dict__.update(ordered.__dict__)


def is_hidden(name: str) -> bool:
    """True for names that are not data: hidden ones, and what Spark and Delta leave beside data
    (`_SUCCESS`).
    """
    return name.startswith(".") or _BOOKKEEPING.fullmatch(name) is not None


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A glob over relative paths: `*` and `?` stay within a name, `**/` is any number of
    directories, also none.

    Raises:
        ValueError: the pattern is empty or begins with `/`.
    """
    if not pattern or pattern.startswith("/"):
        raise ValueError(f"pattern must be a relative glob such as '**/*.png', got {pattern!r}")
    pieces: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            pieces.append("(?:[^/]+/)*")
            position += 3
        elif pattern.startswith("**", position):
            pieces.append(".*")
            position += 2
        else:
            pieces.append(
                {"*": "[^/]*", "?": "[^/]"}.get(pattern[position], re.escape(pattern[position]))
            )
            position += 1
    return re.compile("".join(pieces), re.DOTALL)


def _first_difference(then: Iterable[Entry], now: Iterable[Entry]) -> str:
    sizes_then = {entry.path: entry.size_bytes for entry in then}
    sizes_now = {entry.path: entry.size_bytes for entry in now}
    for path in sorted(sizes_then.keys() | sizes_now.keys()):
        if path not in sizes_then:
            return f"{path} was added"
        if path not in sizes_now:
            return f"{path} is gone"
        if sizes_then[path] != sizes_now[path]:
            return f"{path} had {sizes_then[path]} bytes, now {sizes_now[path]}"
    if sizes_then and list(sizes_then) != list(sizes_now):
        return "the files are listed in another order"
    return "the recorded listing does not match its own fingerprint"


def _pack(entries: Iterable[Entry]) -> str:
    text = json.dumps([[entry.path, entry.size_bytes] for entry in entries], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def _unpack(packed: str) -> tuple[Entry, ...]:
    try:
        listed = json.loads(zlib.decompress(base64.b64decode(packed)))
        return tuple(Entry(str(path), int(size)) for path, size in listed)
    except (ValueError, TypeError, zlib.error):
        return ()
