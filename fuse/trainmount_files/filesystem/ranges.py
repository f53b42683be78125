"""Bytes of a file at once, as one object. Called by the reading verbs of `volumes.py`."""

from __future__ import annotations

import threading
from typing import Final

from trainmount_files.filesystem.bulk import try_each
from trainmount_files.filesystem.files import sized_buffer
from trainmount_files.volume import MIB, ByteRange, FileStat, Volume

__all__ = ["read_range", "resolve"]

_PIECE_BYTES: Final = 8 * MIB
"""Of one request; longer ranges are read in several at once, into their places."""


def resolve(start: int | None, end: int | None, size: int) -> ByteRange:
    """The bytes that `[start:end]` are of `size`, as slices have it: negative numbers count from
    the end, and what lies outside is cut off.
    """
    first, last, _ = slice(start, end).indices(size)
    return ByteRange(first, max(first, last))


def read_range(volume: Volume, found: FileStat, wanted: ByteRange, *, parallelism: int) -> bytes:
    """The bytes `wanted` of the version `found`, which they lie inside of.

    Raises:
        PreconditionFailed: the file has changed.
    """
    buffer = sized_buffer(len(wanted))
    if not len(wanted):
        return b""
    version = found.version or None
    with buffer.getbuffer() as target:

        def read(offset: int, stop: threading.Event) -> None:
            end = min(offset + _PIECE_BYTES, len(wanted))
            piece = ByteRange(wanted.start + offset, wanted.start + end)
            with target[offset:end] as view:
                volume.read_into(found.path, piece, view, version=version, cancel=stop)

        offsets = range(0, len(wanted), _PIECE_BYTES)
        for outcome in try_each(offsets, read, parallelism=parallelism):
            if isinstance(outcome, Exception):
                raise outcome
    return buffer.getvalue()
