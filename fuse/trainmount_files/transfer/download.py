"""A file of a volume to a file of this machine: whole or absent. Called by the command line, fsspec
and the tree copies.

Ranges are fetched at once into a file that has no name yet; the name is given in one step when the
last byte is there. Where the file system has no nameless files the new file has a name of its own
beside the destination until then, and is removed by whatever ends the download but a kill.
"""

from __future__ import annotations

import itertools
import os
import threading
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path
from typing import Final

from trainmount_files.cancellation import LinkedEvent
from trainmount_files.errors import Cancelled, IsADirectory, PreconditionFailed, local_errors
from trainmount_files.transfer.local_files import NewFile, write_at
from trainmount_files.transfer.workers import Workers, raise_first
from trainmount_files.volume import MIB, ByteRange, FileStat, Progress, ReadsToFile, Volume

__all__ = ["download_file"]

_BOUNCE_BYTES: Final = 2 * MIB
"""What one thread has in memory where the volume cannot write to a file by itself."""

_END_SECONDS: Final = 30.0
"""Threads of a transfer that was given up end at once; this only bounds the wait for them."""


def download_file(
    volume: Volume,
    path: str,
    destination: str | os.PathLike[str],
    *,
    overwrite: bool = True,
    version: str | None = None,
    known: FileStat | None = None,
    parallelism: int = 8,
    range_bytes: int = 8 * MIB,
    progress: Progress | None = None,
    cancel: threading.Event | None = None,
) -> FileStat:
    """Store a file of the volume at `destination` and return what was stored.

    The destination shows its old content, or nothing, until the whole file is there; after an error
    or an interrupt it is as it was and nothing is left beside it. A link at the destination is
    replaced, not followed. `known` is what a listing has said of the file: it saves a request.

    Raises:
        PreconditionFailed: the file is another version than `version` or `known`, or changed
            meanwhile.
        AlreadyExists: `overwrite=False` and something is at the destination.
        LocalError: the destination cannot be written: no space, no directory, no permission.
        IsADirectory: `path` is a directory.
        Cancelled: `cancel` was set.
    """
    if parallelism < 1 or range_bytes < 1:
        raise ValueError(
            f"must be at least 1: parallelism={parallelism}, range_bytes={range_bytes}"
        )
    if cancel is not None and cancel.is_set():
        raise Cancelled("download", path, "cancelled")
    found = known if known is not None else volume.stat(path)
    if found.is_directory:
        raise IsADirectory("download", path, "is a directory")
    if version is not None and found.version != version:
        raise PreconditionFailed("download", path, "the file has changed")
    with NewFile(Path(destination), path, overwrite=overwrite) as new:
        _Download(volume, found, new.descriptor, progress, cancel).run(parallelism, range_bytes)
        new.publish()
    return found


class _Download:
    """The bytes of one file on their way."""

    def __init__(
        self,
        volume: Volume,
        found: FileStat,
        descriptor: int,
        progress: Progress | None,
        cancel: threading.Event | None,
    ) -> None:
        self._volume = volume
        self._found = found
        self._descriptor = descriptor
        self._progress = progress
        self._stop = LinkedEvent(cancel)

    def run(self, parallelism: int, range_bytes: int) -> None:
        size = self._found.size_bytes
        ranges = -(-size // range_bytes)
        if ranges <= 1:
            if size:
                self._fetch(ByteRange(0, size))
            return
        starts = itertools.count(0, range_bytes)

        def fetch_more() -> None:
            # `next` on a count is one step, so that no two threads take the same range.
            while (start := next(starts)) < size:
                self._fetch(ByteRange(start, min(start + range_bytes, size)))

        workers = Workers(min(parallelism, ranges), "trainmount-download")
        try:
            futures = [workers.submit(fetch_more) for _ in range(min(parallelism, ranges))]
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # After an end by a failure or an interrupt: the others break off.
            self._stop.set()
            workers.close(_END_SECONDS)
        raise_first(futures)

    def _fetch(self, piece: ByteRange) -> None:
        path, version = self._found.path, self._found.version or None
        if isinstance(self._volume, ReadsToFile):
            with local_errors("download", path):
                self._volume.read_to_file(
                    path,
                    piece,
                    self._descriptor,
                    version=version,
                    progress=self._progress,
                    cancel=self._stop,
                )
            return
        buffer = memoryview(bytearray(min(_BOUNCE_BYTES, len(piece))))
        for start in range(piece.start, piece.end, _BOUNCE_BYTES):
            part = ByteRange(start, min(start + _BOUNCE_BYTES, piece.end))
            self._volume.read_into(path, part, buffer, version=version, cancel=self._stop)
            with local_errors("download", path):
                write_at(self._descriptor, buffer[: len(part)], start)
            if self._progress is not None:
                self._progress(len(part))
