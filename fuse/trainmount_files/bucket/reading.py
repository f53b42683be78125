"""Bytes out of a bucket: exactly the range of exactly the version. Called by `volume.py`."""

from __future__ import annotations

from typing import Any, Final

from trainmount_files.bucket.keys import Meta, Opened, is_etag, version_of
from trainmount_files.bucket.library import Calls
from trainmount_files.errors import InexactRange, PreconditionFailed
from trainmount_files.retry import Cancellation
from trainmount_files.volume import MIB, ByteRange

__all__ = ["read_exactly"]

_WHOLE_BYTES: Final = 16 * MIB
"""Up to here a range is taken from obstore in one piece, beyond in pieces: its memory."""

_PIECE_BYTES: Final = 8 * MIB


def read_exactly(
    opened: Opened,
    calls: Calls,
    path: str,
    key: str,
    byte_range: ByteRange,
    target: memoryview,
    *,
    version: str | None,
    cancel: Cancellation | None,
) -> None:
    """Fill `target`, which has the range's length and is not empty, as `Volume.read_into` has it.

    obstore asks for the range and the ETag, compares the answer's `Content-Range`, and goes on
    where a connection broke only if the ETag is still the same. What it then hands over is compared
    once more. The bytes are copied once, by this thread.
    """
    options: dict[str, Any] = {"range": (byte_range.start, byte_range.end)}
    if version is not None and is_etag(version):
        options["if_match"] = version
    is_whole = len(byte_range) <= _WHOLE_BYTES

    async def get() -> tuple[Any, Any]:
        result = await opened.library.get_async(opened.store, key, options=options)
        return result, await result.bytes_async() if is_whole else None

    result, body = calls.run("read", path, get, cancel)
    _check(path, result.meta, tuple(result.range), byte_range, version)
    if is_whole:
        if len(body) != len(byte_range):
            raise InexactRange("read", path, "the store gave another number of bytes")
        target[:] = memoryview(body)
        return
    stream = result.stream(min_chunk_size=_PIECE_BYTES)
    done = 0
    while True:

        async def following() -> bytes | None:
            piece: bytes | None = await anext(stream, None)
            return piece

        piece = calls.run("read", path, following, cancel)
        if piece is None:
            break
        if len(piece) > len(target) - done:
            raise InexactRange("read", path, "the store gave more bytes than asked for")
        target[done : done + len(piece)] = memoryview(piece)
        done += len(piece)
    if done != len(target):
        raise InexactRange("read", path, "the store gave fewer bytes than asked for")


def _check(
    path: str, meta: Meta, got: tuple[int, ...], byte_range: ByteRange, version: str | None
) -> None:
    if version is not None and version_of(meta) != version:
        raise PreconditionFailed("read", path, "the file has changed")
    if meta["size"] < byte_range.end:
        raise InexactRange("read", path, "the range reaches past the end of the file")
    if got != (byte_range.start, byte_range.end):
        raise InexactRange("read", path, "the store answered with another range")
