"""The three ways a tree can go: up to a volume, down from one, and from one to another.

A route lists its source and moves one file; `copy.py` decides which, when and in which thread.
Small files are one request each. Modification times are not kept: a store gives its own.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    PreconditionFailed,
)
from trainmount_files.trees.entries import Entry, below
from trainmount_files.trees.local_source import LocalSource
from trainmount_files.trees.local_target import LocalTarget, told_plainly
from trainmount_files.volume import MIB, ByteRange, FileStat, Volume, list_pages

__all__ = ["SMALL_BYTES", "Download", "Relay", "Route", "Upload", "volume_entries"]

SMALL_BYTES: Final = MIB
"""Files up to this size go through the memory of their thread, by one request."""

_LARGE_AT_ONCE: Final = 2
"""Larger files that are read from a volume at the same time, each by several ranges: together they
fill a line, and their buffers are bounded.
"""

_TRIES_OF_A_CHANGING_FILE: Final = 3
"""A log that grows while it is copied: each try takes the version of that moment."""

_LOOK_SECONDS: Final = 0.05

Moved = Callable[[int], None]


class Route(ABC):
    """From one root to another. Any thread may call; `close` when none does any more."""

    makes_directories = False
    """Whether a directory must be there before its files; a volume makes parents by itself."""

    @abstractmethod
    def entries(self, path: str) -> Iterator[Entry]:
        """What is in a directory of the source. Raises VolumeError."""

    @abstractmethod
    def make_directory(self, path: str) -> None:
        """At the destination. Raises VolumeError."""

    @abstractmethod
    def move(self, entry: Entry, *, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        """Copy one file; returns how many bytes `moved` was not told of.

        Raises:
            AlreadyExists: `overwrite` is False and something is there. VolumeError.
        """

    @abstractmethod
    def close(self) -> None:
        """Free descriptors. Volumes stay open."""


class Upload(Route):
    """From a local directory to a volume."""

    def __init__(self, source: LocalSource, prefix: str, volume: Volume, root: str) -> None:
        """`prefix` is where the tree begins below the source: the name of a single file."""
        self._source = source
        self._prefix = prefix
        self._volume = volume
        self._root = root

    def entries(self, path: str) -> Iterator[Entry]:
        return self._source.entries(path)

    def make_directory(self, path: str) -> None:
        self._volume.make_directory(below(self._root, path))

    def move(self, entry: Entry, *, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        file, found = self._source.open(below(self._prefix, entry.path))
        with file:
            self._volume.upload(
                below(self._root, entry.path),
                file,
                found.st_size,
                overwrite=overwrite,
                progress=moved,
                cancel=cancel,
                want_version=False,
            )
        return 0

    def close(self) -> None:
        self._source.close()


class _FromVolume(Route):
    """What `Download` and `Relay` share: listing, buffers, files that change."""

    def __init__(self, volume: Volume, root: str) -> None:
        self._volume = volume
        self._source_root = root
        self._local = threading.local()
        self._large = threading.Semaphore(_LARGE_AT_ONCE)

    def entries(self, path: str) -> Iterator[Entry]:
        return volume_entries(self._volume, self._source_root, path)

    def move(self, entry: Entry, *, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        for number in range(1, _TRIES_OF_A_CHANGING_FILE + 1):
            try:
                return self._move(entry, overwrite, cancel, moved)
            except (PreconditionFailed, InexactRange):
                if number == _TRIES_OF_A_CHANGING_FILE:
                    raise
            entry = self._again(entry)
        raise AssertionError("the loop ends by return or raise")

    @abstractmethod
    def _move(self, entry: Entry, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        """As `move`, of exactly the version in `entry`."""

    def _read(self, entry: Entry, cancel: threading.Event) -> memoryview:
        """A small file, in this thread's buffer, which the next call fills anew."""
        size = entry.size_bytes
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(bytearray(SMALL_BYTES))
        target: memoryview = self._local.buffer[:size]
        if size:
            self._volume.read_into(
                below(self._source_root, entry.path),
                ByteRange(0, size),
                target,
                version=entry.version or None,
                cancel=cancel,
            )
        return target

    @contextmanager
    def _one_of_few(self, entry: Entry, cancel: threading.Event) -> Iterator[None]:
        while not self._large.acquire(timeout=_LOOK_SECONDS):
            if cancel.is_set():
                raise Cancelled("copy", entry.path, "cancelled")
        try:
            yield
        finally:
            self._large.release()

    def _again(self, entry: Entry) -> Entry:
        found = self._volume.stat(below(self._source_root, entry.path))
        if found.is_directory:
            raise IsADirectory("read", entry.path, "is a directory now")
        return Entry(
            entry.path, is_directory=False, size_bytes=found.size_bytes, version=found.version
        )


class Download(_FromVolume):
    """From a volume to a local directory."""

    makes_directories = True

    def __init__(self, volume: Volume, root: str, target: LocalTarget, prefix: str) -> None:
        """`prefix` is where the tree begins below the target: the name of a single file."""
        super().__init__(volume, root)
        self._target = target
        self._prefix = prefix

    def make_directory(self, path: str) -> None:
        self._target.make_directory(path)

    def _move(self, entry: Entry, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        path = below(self._prefix, entry.path)
        if entry.size_bytes <= SMALL_BYTES:
            if not overwrite:
                self._target.require_free(path)
            self._target.write(path, self._read(entry, cancel), overwrite=overwrite)
            return entry.size_bytes
        from trainmount_files.transfer import download_file

        source = below(self._source_root, entry.path)
        with self._one_of_few(entry, cancel), told_plainly("write", path):
            for progress in (moved, None):
                destination, exists = self._target.prepare(path, overwrite=overwrite)
                try:
                    download_file(
                        self._volume,
                        source,
                        destination,
                        overwrite=exists,
                        known=_to_stat(source, entry),
                        progress=progress,
                        cancel=cancel,
                    )
                    break
                except AlreadyExists:
                    # Another copy has put it there meanwhile. It may be replaced, which is known
                    # after a second look at its name; the bytes have been counted.
                    if progress is None or exists or not overwrite:
                        raise
        return 0

    def close(self) -> None:
        self._target.close()


class Relay(_FromVolume):
    """From a volume to a volume, through this machine's memory."""

    def __init__(self, source: Volume, source_root: str, target: Volume, target_root: str) -> None:
        super().__init__(source, source_root)
        self._target = target
        self._target_root = target_root

    def make_directory(self, path: str) -> None:
        self._target.make_directory(below(self._target_root, path))

    def _move(self, entry: Entry, overwrite: bool, cancel: threading.Event, moved: Moved) -> int:
        path = below(self._target_root, entry.path)
        if entry.size_bytes <= SMALL_BYTES:
            self._target.put(
                path, self._read(entry, cancel), overwrite=overwrite, want_version=False
            )
            return entry.size_bytes
        from trainmount_files.transfer import open_reader, upload_stream

        source = below(self._source_root, entry.path)
        known = _to_stat(source, entry)
        with (
            self._one_of_few(entry, cancel),
            open_reader(self._volume, source, known=known, cancel=cancel) as reader,
        ):
            upload_stream(
                self._target,
                path,
                reader,
                size_bytes=entry.size_bytes,
                overwrite=overwrite,
                progress=moved,
                cancel=cancel,
            )
        return 0

    def close(self) -> None:
        pass


def _to_stat(path: str, entry: Entry) -> FileStat:
    """What a listing has said: it saves the question."""
    return FileStat(path, is_directory=False, size_bytes=entry.size_bytes, version=entry.version)


def volume_entries(volume: Volume, root: str, path: str) -> Iterator[Entry]:
    """A directory of a volume, page by page; what no path can name comes as a refusal."""
    cut = len(root) + 1 if root else 0
    for page in list_pages(volume, below(root, path)):
        for found in page.entries:
            name = found.path[cut:]
            yield Entry(
                name,
                is_directory=found.is_directory,
                size_bytes=found.size_bytes,
                version=found.version,
            )
        for name in page.refused:
            yield Entry(
                below(path, name),
                is_directory=False,
                refusal=InvalidRequest("copy", below(path, name), "no path can have this name"),
            )
