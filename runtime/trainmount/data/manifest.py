"""The frozen listing that a loader works on, its fingerprint, and what has changed since a state
was taken.

Called by `dataset` (which gets the entries from a `sources.Source`) and `loader`. A position is a
number of samples in the order of a listing, so it means something only over the same listing: the
state therefore carries a summary, and a directory that has changed is an error that names the first
file that differs, never a silent shift.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One file of the listing."""

    path: str
    """Relative to the dataset's directory, with `/` between names."""

    size_bytes: int


class Manifest:
    """Files in the order of their paths. Immutable."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries: tuple[Entry, ...] = tuple(sorted(entries))

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal; equal for listings of the same paths and sizes, on any machine."""
        return _prefix_digests(self.entries, [len(self.entries)])[0]

    def summary(self) -> dict[str, Any]:
        """What a state keeps of this listing. JSON-able."""
        summary: dict[str, Any] = {
            "count": len(self.entries),
            "bytes": sum(entry.size_bytes for entry in self.entries),
            "fingerprint": self.fingerprint,
        }
        if len(self.entries) <= _MAX_LISTED_FILES:
            summary["files"] = _pack(self.entries)
        else:
            places = [len(self.entries) * number // _NUM_MARKS for number in range(1, _NUM_MARKS)]
            digests = _prefix_digests(self.entries, places)
            summary["marks"] = [list(mark) for mark in zip(places, digests, strict=True)]
        return summary

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

    def _first_difference(self, summary: Mapping[str, Any]) -> str:
        if "files" in summary:
            return _first_difference(_unpack(summary["files"]), self.entries)
        before = 0
        marks = [(int(place), str(digest)) for place, digest in summary.get("marks", ())]
        places = [place for place, _ in marks if place <= len(self)]
        for (place, digest), now in zip(marks, _prefix_digests(self.entries, places), strict=False):
            if digest != now:
                break
            before = place
        if before >= len(self):
            return f"files after {self.entries[-1].path if self.entries else 'the first'} are gone"
        return f"the first difference is at or after {self.entries[before].path}"


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


def _first_difference(then: tuple[Entry, ...], now: tuple[Entry, ...]) -> str:
    sizes_then = {entry.path: entry.size_bytes for entry in then}
    sizes_now = {entry.path: entry.size_bytes for entry in now}
    for path in sorted(sizes_then.keys() | sizes_now.keys()):
        if path not in sizes_then:
            return f"{path} was added"
        if path not in sizes_now:
            return f"{path} is gone"
        if sizes_then[path] != sizes_now[path]:
            return f"{path} had {sizes_then[path]} bytes, now {sizes_now[path]}"
    return "the recorded listing does not match its own fingerprint"


def _prefix_digests(entries: tuple[Entry, ...], places: list[int]) -> list[str]:
    """A digest of the first `n` entries for each `n` of `places`, which ascend."""
    digest = hashlib.sha256()
    found = []
    done = 0
    for place in places:
        for entry in entries[done:place]:
            digest.update(f"{entry.path}\0{entry.size_bytes}\n".encode("utf-8", "surrogateescape"))
        done = place
        found.append(digest.copy().hexdigest())
    return found


def _pack(entries: tuple[Entry, ...]) -> str:
    text = json.dumps([[entry.path, entry.size_bytes] for entry in entries], separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"), 9)).decode("ascii")


def _unpack(packed: str) -> tuple[Entry, ...]:
    try:
        listed = json.loads(zlib.decompress(base64.b64decode(packed)))
        return tuple(Entry(str(path), int(size)) for path, size in listed)
    except (ValueError, TypeError, zlib.error):
        return ()
