"""Where files come from: a directory of this machine (a mount too), or a volume that is not
mounted.

Called by `dataset`. One source is used by the main process and, as a copy, by each loader worker; a
copy opens its own connections. Reads are checked against the listing: a file that is gone or has
another size is told at once, by name.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainmount.data.manifest import Entry, is_hidden
from trainmount.errors import DamagedFile, DataError, MissingFile
from trainmount.locations import is_local, local_path

if TYPE_CHECKING:
    from trainmount.data.cache import FileCache
    from trainmount_files.volume import Volume

__all__ = ["DirectorySource", "Source", "VolumeSource", "open_source"]


class Source(Protocol):
    """Files below one directory."""

    @property
    def describe(self) -> str:
        """How the files are reached, for a log line."""
        ...

    @property
    def needs_cache(self) -> bool:
        """True if `path` gives local copies."""
        ...

    def scan(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        """All files whose relative path matches, in any order. Raises DataError if the directory is
        not there.
        """
        ...

    def path(self, entry: Entry) -> str:
        """A local path at which the file can be opened. Raises MissingFile, DamagedFile."""
        ...

    def read(self, entry: Entry) -> bytes:
        """The file's bytes. Raises MissingFile, DamagedFile."""
        ...


class DirectorySource:
    """A directory of this machine. On a mount no second copy of the bytes is made: the path is the
    file itself.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def describe(self) -> str:
        return f"directory {self._directory}"

    @property
    def needs_cache(self) -> bool:
        return False

    def scan(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        yield from self._scan(self._directory, "", pattern)

    def _scan(self, directory: Path, prefix: str, pattern: re.Pattern[str]) -> Iterator[Entry]:
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    relative = prefix + entry.name
                    if entry.is_dir(follow_symlinks=False):
                        yield from self._scan(directory / entry.name, relative + "/", pattern)
                    elif entry.is_file() and pattern.fullmatch(relative):
                        yield Entry(relative, entry.stat().st_size)
        except OSError as error:
            raise DataError(f"cannot list {directory}: {error.strerror or error}") from error

    def path(self, entry: Entry) -> str:
        path = os.path.join(self._directory, entry.path)  # noqa: PTH118 - once a sample: pathlib costs 5 times as much
        try:
            size_bytes = os.stat(path).st_size  # noqa: PTH116 - as above
        except FileNotFoundError as error:
            raise _missing(path) from error
        _check_size(path, entry, size_bytes)
        return path

    def read(self, entry: Entry) -> bytes:
        path = os.path.join(self._directory, entry.path)  # noqa: PTH118 - as above
        try:
            with open(path, "rb") as file:  # noqa: PTH123 - as above
                data = file.read()
        except FileNotFoundError as error:
            raise _missing(path) from error
        _check_size(path, entry, len(data))
        return data


class VolumeSource:
    """A directory of a volume that is not mounted here: files come through the volume client.

    Paths lead into `cache`, which the owner bounds.
    """

    def __init__(self, url: str, cache: FileCache) -> None:
        self._url = url
        self._cache = cache
        self._volume: Volume | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._url, "cache": self._cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["cache"])  # type: ignore[misc]

    @property
    def describe(self) -> str:
        return f"volume {self._url}, not mounted here"

    @property
    def needs_cache(self) -> bool:
        return True

    def scan(self, pattern: re.Pattern[str]) -> Iterator[Entry]:
        from trainmount_files.errors import VolumeError

        try:
            yield from self._scan("", pattern)
        except VolumeError as error:
            raise DataError(f"cannot list {self._url}: {error}") from error

    def _scan(self, directory: str, pattern: re.Pattern[str]) -> Iterator[Entry]:
        from trainmount_files.volume import list_directory

        for stat in list_directory(self._open(), directory):
            if is_hidden(stat.name):
                continue
            relative = f"{directory}/{stat.name}" if directory else stat.name
            if stat.is_directory:
                yield from self._scan(relative, pattern)
            elif pattern.fullmatch(relative):
                yield Entry(relative, stat.size_bytes)

    def path(self, entry: Entry) -> str:
        return self._cache.path(entry, self.read)

    def read(self, entry: Entry) -> bytes:
        from trainmount_files.errors import InexactRange, NotFound, VolumeError
        from trainmount_files.volume import ByteRange

        path = f"{self._url}/{entry.path}"
        buffer = bytearray(entry.size_bytes)
        try:
            volume = self._open()
            _check_size(path, entry, volume.stat(entry.path).size_bytes)
            if buffer:
                volume.read_into(entry.path, ByteRange(0, len(buffer)), buffer)
        except NotFound as error:
            raise _missing(path) from error
        except InexactRange as error:
            raise DamagedFile(
                f"{path} is not the file that was listed any more: {error}"
            ) from error
        except VolumeError as error:
            raise DataError(f"cannot read {path}: {error}") from error
        return bytes(buffer)

    def _open(self) -> Volume:
        from trainmount_files import open_volume

        with self._lock:
            # A forked process must not share its parent's connections: two would read one socket's
            # answers.
            if self._volume is None or self._process != os.getpid():
                self._volume = open_volume(self._url)
                self._process = os.getpid()
            return self._volume


def open_source(path: str, cache: FileCache) -> Source:
    """The source that `path` leads to. Nothing is read yet."""
    if is_local(path):
        return DirectorySource(local_path(path))
    return VolumeSource(path.rstrip("/"), cache)


def _missing(path: str) -> MissingFile:
    return MissingFile(f"{path} was listed and is gone; restore it, or pass on_error='skip'")


def _check_size(path: str, entry: Entry, size_bytes: int) -> None:
    if size_bytes != entry.size_bytes:
        raise DamagedFile(
            f"{path} had {entry.size_bytes} bytes when it was listed, now {size_bytes}; "
            "restore it, or pass on_error='skip'"
        )
