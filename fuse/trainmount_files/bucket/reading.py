"""Bytes out of a bucket: exactly the range of exactly the version. Called by `volume.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from trainmount_files.bucket.keys import Meta, Opened, etag_of, version_of
from trainmount_files.bucket.library import Calls
from trainmount_files.errors import InexactRange, PreconditionFailed
from trainmount_files.retry import Cancellation
from trainmount_files.volume import MIB, ByteRange

__all__ = ["PIECE_BYTES", "WHOLE_BYTES", "read_exactly"]

WHOLE_BYTES: Final = 16 * MIB
"""Up to here it is quickest to take a range from obstore in one piece, which is in memory then."""

PIECE_BYTES: Final = MIB

_SHORT_BYTES: Final = MIB
"""Up to here a request that nobody waits for any more may go on to its end."""


def read_exactly(
    opened: Opened,
    calls: Calls,
    path: str,
    key: str,
    byte_range: ByteRange,
    take: Callable[[int, memoryview], None],
    *,
    piece_bytes: int,
    version: str | None,
    cancel: Cancellation | None,
) -> None:
    """Give `take` the range, which is not empty, in order: each piece with its distance from the
    start, in this thread, of at least `piece_bytes` but for the last.

    obstore asks for the range and the ETag, compares the answer's `Content-Range`, and goes on
    where a connection broke only if the ETag is still the same. What it then hands over is compared
    once more. Raises as `Volume.read_into` does.
    """
    options: dict[str, Any] = {"range": (byte_range.start, byte_range.end)}
    etag = etag_of(version) if version is not None else None
    if etag is not None:
        options["if_match"] = etag
    is_whole = len(byte_range) <= piece_bytes

    async def get() -> tuple[Any, Any]:
        result = await opened.library.get_async(opened.store, key, options=options)
        return result, await result.bytes_async() if is_whole else None

    def get_short() -> tuple[Any, Any]:
        result = opened.library.get(opened.store, key, options=options)
        return result, result.bytes()

    if is_whole and len(byte_range) <= _SHORT_BYTES:
        result, body = calls.run_blocking("read", path, get_short, cancel)
    else:
        result, body = calls.run("read", path, get, cancel)
    _check(path, result.meta, tuple(result.range), byte_range, version)
    if is_whole:
        if len(body) != len(byte_range):
            raise InexactRange("read", path, "the store gave another number of bytes")
        take(0, memoryview(body))
        return
    stream = result.stream(min_chunk_size=piece_bytes)

    async def following() -> Any:
        return await anext(stream, None)

    done = 0
    while (piece := calls.run("read", path, following, cancel)) is not None:
        if len(piece) > len(byte_range) - done:
            raise InexactRange("read", path, "the store gave more bytes than asked for")
        take(done, memoryview(piece))
        done += len(piece)
    if done != len(byte_range):
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
