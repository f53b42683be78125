"""Which files of a volume some patterns mean. Called by `warming` and `eviction`, in their threads.

A pattern is a path below the volume's root. A directory means all that is below it. `*`, `?` and
`[...]` stand for parts of one name, `**` for any number of directories; as in a shell, a name that
begins with a dot is meant only by a pattern that does. A path that is there is taken as it is,
whatever letters it has.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Final

from trainmount_files.errors import InvalidRequest, NotADirectory, NotFound, VolumeError
from trainmount_files.trees import Report
from trainmount_files.trees.crew import Crew
from trainmount_files.volume import FileStat, Volume, list_directory
from trainmount_fuse.names.readings import is_valid_name

__all__ = ["Selection"]

_MAGIC: Final = re.compile(r"[*?\[]")


class Selection:
    """A walk through a volume that brings up the files that patterns mean, each once."""

    def __init__(
        self, volume: Volume, crew: Crew, report: Report, visit: Callable[[FileStat], None]
    ) -> None:
        """`visit` is called from the crew's threads; what cannot be looked at goes to `report`."""
        self._volume = volume
        self._crew = crew
        self._report = report
        self._visit = visit
        self._seen: set[str] | None = None
        self._lock = threading.Lock()

    def start(self, patterns: Sequence[str]) -> None:
        """The first task of the crew."""
        if len(patterns) > 1:
            # One pattern alone never brings a file up twice.
            self._seen = set()
        for pattern in patterns:
            self._crew.add_large(partial(self._pattern, pattern))

    def _pattern(self, pattern: str) -> None:
        try:
            names = _names(pattern)
            found = self._stat("/".join(names))
            if found is not None:
                self._take(found)
            elif any(_MAGIC.search(name) for name in names):
                if not self._glob("", names):
                    self._fail(NotFound("find", pattern, "nothing matches it"), pattern)
            else:
                self._fail(NotFound("find", pattern, "no such file or directory"), pattern)
        except VolumeError as error:
            self._fail(error, pattern)

    def _stat(self, path: str) -> FileStat | None:
        try:
            return self._volume.stat(path)
        except (NotFound, NotADirectory, InvalidRequest):
            # A store may refuse letters of a pattern in a name.
            return None

    def _glob(self, directory: str, names: Sequence[str]) -> bool:
        """Bring up what the rest of a pattern means below a directory; whether there was any."""
        name, rest = names[0], names[1:]
        if not _MAGIC.search(name):
            return self._literal(f"{directory}/{name}" if directory else name, rest)
        # No directory at all is also any number of directories.
        found = name == "**" and bool(rest) and self._glob(directory, rest)
        for entry in self._entries(directory):
            if name == "**":
                if entry.name.startswith("."):
                    continue
                if not rest:
                    self._take(entry)
                    found = True
                elif entry.is_directory:
                    found |= self._glob(entry.path, names)
            elif _matches(entry.name, name):
                if not rest:
                    self._take(entry)
                    found = True
                elif entry.is_directory:
                    found |= self._glob(entry.path, rest)
        return found

    def _literal(self, path: str, rest: Sequence[str]) -> bool:
        if rest:
            return self._glob(path, rest)
        found = self._stat(path)
        if found is None:
            return False
        self._take(found)
        return True

    def _entries(self, directory: str) -> list[FileStat]:
        try:
            listed = list_directory(self._volume, directory)
            return [entry for entry in listed if is_valid_name(entry.name)]
        except (NotFound, NotADirectory):
            return []

    def _take(self, entry: FileStat) -> None:
        if entry.is_directory:
            self._crew.add_large(partial(self._directory, entry.path))
            return
        if self._seen is not None:
            with self._lock:
                if entry.path in self._seen:
                    return
                self._seen.add(entry.path)
        self._visit(entry)

    def _directory(self, path: str) -> None:
        try:
            for entry in list_directory(self._volume, path):
                if self._crew.stop.is_set():
                    return
                if is_valid_name(entry.name):
                    self._take(entry)
        except NotFound:
            # Removed since it was listed.
            return
        except VolumeError as error:
            self._fail(error, path)

    def _fail(self, error: VolumeError, path: str) -> None:
        if not self._crew.stop.is_set():
            self._report.failed(path, error)


def _names(pattern: str) -> list[str]:
    names = [name for name in pattern.split("/") if name not in ("", ".")]
    if ".." in names:
        raise InvalidRequest("find", pattern, "must not contain '..'")
    return names


def _matches(name: str, pattern: str) -> bool:
    if name.startswith(".") and not pattern.startswith("."):
        return False
    return fnmatchcase(name, pattern)
