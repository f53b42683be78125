"""Where files come from: a directory of this machine (a mount too), or a volume that is not
mounted.

Called by `dataset`. One source is used by the main process and, as a copy, by each loader worker;
any thread may read. Reads are checked against the listing: a file that is gone, or has another size
or checksum, is told at once, by name.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from trainmount.data.checksums import is_right, pieces_of
from trainmount.data.manifest import Entry
from trainmount.data.walk import Found, Pages, walk
from trainmount.errors import DamagedFile, DataError, MissingFile
from trainmount.locations import is_local, local_path

if TYPE_CHECKING:
    from trainmount.data.cache import FileCache
    from trainmount_files.volume import FileStat, Volume

__all__ = ["DirectorySource", "Source", "VolumeSource", "open_source"]

T = TypeVar("T")

_PAGE_ENTRIES: Final = 1000

# So much of a file is read before its consumer does; of a long one, the rest follows as it is read.
_AHEAD_BYTES: Final = 8 << 20

# /proc/mounts says so of what `trainmount mount` and the CSI driver mount.
_OUR_MOUNTS: Final = "fuse.trainmount"

# Where versions are times in seconds, a file may change within the second without another version.
_SETTLED_SECONDS: Final = 2.0


# What has become a pipe since it was listed must not be waited for.
_TO_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK

# Links that lead nowhere, or in a circle.
_NO_TARGET: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


class Source(Protocol):
    """Files below one directory."""

    @property
    def describe(self) -> str:
        """How the files are reached: by a mount, a directory or the volume client."""
        ...

    @property
    def needs_cache(self) -> bool:
        """True if `path` gives local copies."""
        ...

    def scan(self, pattern: str, matches: re.Pattern[str]) -> Iterator[Entry]:
        """All files whose relative path matches, in any order. Raises DataError if the directory is
        not there.
        """
        ...

    def find(self, path: str) -> Entry:
        """One file. Raises MissingFile."""
        ...

    def path(self, entry: Entry, *, reads: bool) -> str:
        """A local path at which the file can be opened; a copy is the caller's. With `reads` its
        bytes are in the page cache by then, or the first 8 MiB, or a mount brings them. Raises
        MissingFile, DamagedFile.
        """
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
        self._prefix = f"{directory}/"

    @property
    def describe(self) -> str:
        kind = _mount_type(self._directory)
        if kind is not None and kind.startswith("fuse"):
            return f"mount {self._directory} ({kind})"
        return f"directory {self._directory}"

    @property
    def needs_cache(self) -> bool:
        return False

    def scan(self, pattern: str, matches: re.Pattern[str]) -> Iterator[Entry]:
        return walk(self._pages, pattern, matches)

    def find(self, path: str) -> Entry:
        try:
            found = (self._directory / path).stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise MissingFile(f"{self._directory}/{path} is not there") from error
        return Entry(path, found.st_size)

    @cached_property
    def _mount_reads_ahead(self) -> bool:
        """A mount of ours fetches a file whose name is looked up; opening it would cost its daemon
        more than that.
        """
        return _mount_type(self._directory) == _OUR_MOUNTS

    def path(self, entry: Entry, *, reads: bool) -> str:
        path = f"{self._prefix}{entry.path}"
        try:
            if not reads or entry.checksum or self._mount_reads_ahead:
                _check_kind(path, entry, os.stat(path))  # noqa: PTH116 - once a sample
            else:
                descriptor = os.open(path, _TO_READ)
                try:
                    _check_kind(path, entry, os.fstat(descriptor))
                    os.read(descriptor, min(entry.size_bytes, _AHEAD_BYTES))
                finally:
                    os.close(descriptor)
            if entry.checksum:
                _check_content(path, entry, pieces_of(path))
        except OSError as error:
            raise _unreadable(path, error) from error
        return path

    def read(self, entry: Entry) -> bytes:
        path = f"{self._prefix}{entry.path}"
        try:
            descriptor = os.open(path, _TO_READ)
            try:
                # One more, to see that a file has become longer.
                data = os.read(descriptor, entry.size_bytes + 1)
                if data and len(data) < entry.size_bytes:
                    data += _rest_of(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _unreadable(path, error) from error
        if len(data) != entry.size_bytes:
            _check_size(path, entry, os.stat(path).st_size)  # noqa: PTH116 - a failure
        _check_content(path, entry, [data])
        return data

    def _pages(self, directory: str) -> Pages:
        place = self._directory / directory
        try:
            with os.scandir(place) as entries:
                while page := [_found_of(entry) for entry in islice(entries, _PAGE_ENTRIES)]:
                    yield [found for found in page if found is not None]
        except OSError as error:
            raise DataError(f"cannot list {place}: {error.strerror or error}") from error


class VolumeSource:
    """A directory of a volume that is not mounted here: files come through the volume client.

    Each read is one request: the file, of the version that was listed; or, where the cache has it,
    the question whether that is still the version.
    """

    def __init__(self, url: str, cache: FileCache) -> None:
        self._url = url
        self._cache = cache
        self._volume: Volume | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self._url, "cache": self._cache}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["url"], state["cache"])  # type: ignore[misc]

    @property
    def describe(self) -> str:
        return f"volume client for {self._url}, not mounted here"

    @property
    def needs_cache(self) -> bool:
        return True

    def scan(self, pattern: str, matches: re.Pattern[str]) -> Iterator[Entry]:
        return walk(self._pages, pattern, matches)

    def find(self, path: str) -> Entry:
        found = self._stat(path, lambda: MissingFile(f"{self._url}/{path} is not there"))
        return Entry(path, found.size_bytes, self._settled_version(found))

    def path(self, entry: Entry, *, reads: bool) -> str:  # noqa: ARG002 - a copy is always read
        name = entry.path.rpartition("/")[2]

        def stored(key: str) -> Path | None:
            copy = self._cache.take(key, name)
            if copy is not None and not _has_content(entry, pieces_of(copy)):
                # The disk has lost it, not the store.
                self._cache.drop(key)
                copy.unlink()
                return None
            return copy

        def fetch(version: str, key: str) -> Path:
            copy = self._cache.new_path(name)
            self._download(entry, version, copy)
            try:
                _check_content(f"{self._url}/{entry.path}", entry, pieces_of(copy))
                if key:
                    self._cache.keep(copy, key)
            except BaseException:
                copy.unlink()
                raise
            return copy

        return str(self._obtain(entry, stored, fetch))

    def read(self, entry: Entry) -> bytes:
        def stored(key: str) -> bytes | None:
            data = self._cache.read(key)
            if data is not None and not _has_content(entry, [data]):
                self._cache.drop(key)
                return None
            return data

        def fetch(version: str, key: str) -> bytes:
            from trainmount_files.volume import ByteRange

            buffer = bytearray(entry.size_bytes)
            whole = ByteRange(0, entry.size_bytes)
            self._open().read_into(entry.path, whole, buffer, version=version or None)
            data = bytes(buffer)
            _check_content(f"{self._url}/{entry.path}", entry, [data])
            if key:
                self._cache.keep_bytes(data, key)
            return data

        return self._obtain(entry, stored, fetch)

    # Private

    def _obtain(
        self,
        entry: Entry,
        stored: Callable[[str], T | None],
        fetch: Callable[[str, str], T],
    ) -> T:
        """What `stored` has under the key of the present version, or `fetch` gets, which is given
        the version and the key to keep it under, empty where it must not be kept.
        """
        from trainmount_files.errors import (
            InexactRange,
            IsADirectory,
            NotFound,
            PreconditionFailed,
            VolumeError,
        )

        path = f"{self._url}/{entry.path}"
        try:
            if entry.version and not self._cache.has(self._key(entry, entry.version)):
                try:
                    return fetch(entry.version, self._key(entry, entry.version))
                except (PreconditionFailed, InexactRange, IsADirectory):
                    # Written anew since it was listed: with the size that was listed, it counts.
                    pass
            found = self._present(entry)
            key = self._key(entry, found.version)
            have = stored(key) if found.version and self._cache.has(key) else None
            if have is not None:
                return have
            return fetch(found.version, key if self._settled_version(found) else "")
        except NotFound as error:
            raise _missing(path) from error
        except (InexactRange, PreconditionFailed) as error:
            raise DamagedFile(
                f"{path} is not the file that was listed any more: {error}"
            ) from error
        except VolumeError as error:
            raise DataError(f"cannot read {path}: {error}") from error
        except OSError as error:
            raise DataError(
                f"{path} ({entry.size_bytes} bytes) cannot be copied to this machine: "
                f"{error.strerror or error}; make room or set cache_dir"
            ) from error

    def _present(self, entry: Entry) -> FileStat:
        path = f"{self._url}/{entry.path}"
        found = self._stat(entry.path, lambda: _missing(path))
        if found.is_directory:
            raise DamagedFile(f"{path} is a directory now, and was a file when it was listed")
        _check_size(path, entry, found.size_bytes)
        return found

    def _stat(self, path: str, missing: Callable[[], MissingFile]) -> FileStat:
        from trainmount_files.errors import NotADirectory, NotFound, VolumeError

        try:
            return self._open().stat(path)
        except (NotFound, NotADirectory) as error:
            raise missing() from error
        except VolumeError as error:
            raise DataError(f"cannot read {self._url}/{path}: {error}") from error

    def _download(self, entry: Entry, version: str, copy: Path) -> None:
        from trainmount_files.errors import LocalError
        from trainmount_files.transfer import download_file
        from trainmount_files.volume import FileStat

        known = FileStat(entry.path, False, entry.size_bytes, version=version)

        def download() -> None:
            try:
                download_file(self._open(), entry.path, copy, known=known)
            except LocalError as error:
                raise OSError(error.errno or errno.EIO, error.reason) from error

        self._cache.making_room(entry.size_bytes, download)

    def _pages(self, directory: str) -> Pages:
        from trainmount_files.errors import VolumeError
        from trainmount_files.volume import list_pages

        try:
            for page in list_pages(self._open(), directory):
                yield [
                    Found(
                        found.name,
                        found.is_directory,
                        found.size_bytes,
                        self._settled_version(found),
                    )
                    for found in page.entries
                ]
        except VolumeError as error:
            raise DataError(f"cannot list {self._url}: {error}") from error

    def _settled_version(self, found: FileStat) -> str:
        """The version, where other bytes would have had another one."""
        is_new = time.time() - found.mtime_ns / 1e9 < _SETTLED_SECONDS
        return "" if is_new and self._open().capabilities.coarse_versions else found.version

    def _key(self, entry: Entry, version: str) -> str:
        return self._cache.key(self._url, entry.path, entry.size_bytes, version)

    def _open(self) -> Volume:
        from trainmount_files import open_volume

        with self._lock:
            # It makes connections of its own in each process.
            if self._volume is None:
                self._volume = open_volume(self._url)
            return self._volume


def open_source(path: str, cache: FileCache) -> Source:
    """The source that `path` leads to. Nothing is read yet."""
    if is_local(path):
        return DirectorySource(local_path(path))
    return VolumeSource(path.rstrip("/"), cache)


def _unreadable(path: str, error: OSError) -> DataError:
    """What the file system says of one file, as one of our errors."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return _missing(path)
    reason = f"{path} cannot be read: {error.strerror or error}"
    if isinstance(error, PermissionError):
        return DataError(reason)
    return DamagedFile(f"{reason}; restore it, or pass on_error='skip'")


def _missing(path: str) -> MissingFile:
    return MissingFile(f"{path} was listed and is gone; restore it, or pass on_error='skip'")


def _check_kind(path: str, entry: Entry, found: os.stat_result) -> None:
    # Most are as they were, and one call less is felt.
    if found.st_size == entry.size_bytes and stat.S_ISREG(found.st_mode):
        return
    if stat.S_ISDIR(found.st_mode):
        raise DamagedFile(f"{path} is a directory now, and was a file when it was listed")
    _check_size(path, entry, found.st_size)
    if not stat.S_ISREG(found.st_mode):
        raise DamagedFile(
            f"{path} is no regular file any more; restore it, or pass on_error='skip'"
        )


def _check_size(path: str, entry: Entry, size_bytes: int) -> None:
    if size_bytes != entry.size_bytes:
        raise DamagedFile(
            f"{path} had {entry.size_bytes} bytes when it was listed, now {size_bytes}; "
            "restore it, or pass on_error='skip'"
        )


def _has_content(entry: Entry, pieces: Iterable[bytes]) -> bool:
    return not entry.checksum or is_right(entry.checksum, pieces)


def _check_content(path: str, entry: Entry, pieces: Iterable[bytes]) -> None:
    if not _has_content(entry, pieces):
        kind = entry.checksum.partition(":")[0]
        raise DamagedFile(
            f"{path} has other bytes than its {kind} says; restore it, or pass on_error='skip'"
        )


def _rest_of(descriptor: int) -> bytes:
    """A read ends early at 2 GiB, and wherever else the file system likes."""
    pieces: list[bytes] = []
    while piece := os.read(descriptor, _AHEAD_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _found_of(entry: os.DirEntry[str]) -> Found | None:
    """None for what is neither a file nor a directory, and for links without a file behind."""
    if entry.is_dir(follow_symlinks=False):
        return Found(entry.name, is_directory=True)
    try:
        return (
            Found(entry.name, is_directory=False, size_bytes=entry.stat().st_size)
            if entry.is_file()
            else None
        )
    except OSError as error:
        if error.errno not in _NO_TARGET:
            raise
        return None


def _mount_type(directory: Path) -> str | None:
    """The type of the file system that the directory is on; None where nobody tells."""
    best, kind = -1, None
    try:
        lines = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        # Blanks in a name are written as \040.
        point = line.split(" ")[1].replace("\\040", " ")
        if len(point) >= best and directory.is_relative_to(point):
            best, kind = len(point), line.split(" ")[2]
    return kind
