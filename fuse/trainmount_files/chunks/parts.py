"""The bytes of a chunked file, from the parts of one generation. Used by `volume.py`."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from typing import Final

from trainmount_files.chunks.generation import Chunks, Generation, errors_of
from trainmount_files.chunks.manifest import Manifest, part_path
from trainmount_files.errors import (
    InexactRange,
    NotFound,
    PreconditionFailed,
    VolumeError,
    local_errors,
)
from trainmount_files.transfer.local_files import write_at
from trainmount_files.volume import MIB, ByteRange, Progress, Volume

__all__ = ["Parts", "by_pieces", "changed"]

_COPY_BYTES: Final = 8 * MIB
"""Bytes moved at once by a copy; also its memory."""

_BOUNCE_BYTES: Final = 2 * MIB
"""As a download of a volume that cannot write to a file itself; several run at once."""


class Parts:
    """Reads what manifests name. Any thread may call."""

    def __init__(self, volume: Volume, chunks: Chunks) -> None:
        self._volume = volume
        self._chunks = chunks

    def manifest_of(self, path: str, version: str) -> Manifest:
        """The manifest of a version that the caller has seen.

        Raises:
            PreconditionFailed: the file is another version now.
            NotFound: it is gone.
        """
        manifest = self._chunks.manifests.of_version(path, version)
        if manifest is not None:
            return manifest
        manifest = self._chunks.manifests.read("read", path)
        if manifest is None:
            self._volume.stat(path)
        if manifest is None or manifest.version != version:
            raise changed(path)
        return manifest

    def read(
        self,
        path: str,
        manifest: Manifest,
        byte_range: ByteRange,
        target: memoryview,
        cancel: threading.Event | None,
    ) -> None:
        """Fill `target`, which is as long as the range, as `Volume.read_into` says."""
        if byte_range.end > manifest.size_bytes:
            raise InexactRange("read", path, "the range reaches past the end of the file")
        done = 0
        for number, piece in manifest.pieces(byte_range):
            try:
                with errors_of(path, f"part {number}"):
                    self._volume.read_into(
                        part_path(path, manifest.generation, number),
                        piece,
                        target[done : done + len(piece)],
                        cancel=cancel,
                    )
            except (NotFound, InexactRange):
                raise self._lost_part(path, manifest, number) from None
            done += len(piece)

    def copy(self, path: str, manifest: Manifest, generation: Generation) -> None:
        """Copy each part into another write, by way of a nameless file."""
        for number, size in manifest.parts:
            location = part_path(path, manifest.generation, number)
            with local_errors("rename", path), tempfile.TemporaryFile() as copy:
                buffer = memoryview(bytearray(min(_COPY_BYTES, size)))
                for start in range(0, size, _COPY_BYTES):
                    piece = ByteRange(start, min(start + _COPY_BYTES, size))
                    try:
                        with errors_of(path, f"part {number}"):
                            self._volume.read_into(location, piece, buffer)
                    except (NotFound, InexactRange):
                        raise self._lost_part(path, manifest, number) from None
                    write_at(copy.fileno(), buffer[: len(piece)], start)
                generation.put_file(number, copy, size, cancel=None)

    def _lost_part(self, path: str, manifest: Manifest, number: int) -> VolumeError:
        """Why a part is not there: replaced by a later write, mostly."""
        self._chunks.manifests.forget(path)
        now = self._chunks.manifests.read("read", path)
        if now is not None and now.generation == manifest.generation:
            reason = f"part {number} is missing or cut: the file is damaged"
            return InexactRange("read", path, reason)
        return changed(path)


def changed(path: str) -> PreconditionFailed:
    return PreconditionFailed("read", path, "the file has changed")


def by_pieces(
    read: Callable[[ByteRange, memoryview], None],
    byte_range: ByteRange,
    descriptor: int,
    progress: Progress | None,
) -> None:
    """Write a range of a file at its place in a local one; `read` fills a buffer with a piece."""
    buffer = memoryview(bytearray(min(_BOUNCE_BYTES, len(byte_range))))
    for start in range(byte_range.start, byte_range.end, _BOUNCE_BYTES):
        piece = ByteRange(start, min(start + _BOUNCE_BYTES, byte_range.end))
        target = buffer[: len(piece)]
        read(piece, target)
        write_at(descriptor, target, start)
        if progress is not None:
            progress(len(piece))
