"""File bytes in and out of the server; called by `file_routes` and `upload_routes`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable
from typing import Final, TypeVar

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from trainmount_files.server.body_faults import faulty_chunks, send_by_writes
from trainmount_files.server.call import Api, Call
from trainmount_files.server.conditions import FileInfo
from trainmount_files.server.errors import ApiError
from trainmount_files.server.ranges import parse_range
from trainmount_files.server.sending import send_span
from trainmount_files.server.staging import LockHeldError, Staging, Temporary
from trainmount_files.volume import MIB, ByteRange

__all__ = ["file_headers", "receive", "send_file", "store_body"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Written to the disk at once, while as much again comes in. Larger only costs memory.
_WRITE_BYTES: Final = MIB

# What writev takes at once, on every Linux.
_MAX_VECTORS: Final = 1024

# Up to here one write of head and body together beats the set-up of sendfile.
_SMALL_BYTES: Final = 256 * 1024


async def store_body(
    api: Api,
    call: Call,
    finish: Callable[[Temporary], T],
    *,
    admit: Callable[[], None] | None = None,
    at_once: bool = False,
) -> T:
    """Take the body of the request into a file of the staging folder, then call `finish` with it.

    `admit` refuses before gigabytes come what `finish` would refuse after them; for a small body it
    is not called. `at_once` says that `finish` takes no lock but `Staging.locked`. A body holds
    5 MiB of memory at most: a batch that is written, the one that fills up, and what the reader has
    ahead.

    Raises:
        ApiError: 400 for a body that breaks off, 413 for one above the limit, or what the two
            functions raise; nothing of the body is left then.
    """
    limit = _limit(api, call)
    announced = call.request.content_length
    if announced is not None and announced <= _SMALL_BYTES:
        pieces = [piece async for piece in _pieces(call, limit)]
        # Without fsync nothing of this waits for the disk while it keeps up, and a thread would
        # cost more than the work.
        if at_once and not api.settings.fsync:
            with contextlib.suppress(LockHeldError), api.staging.impatient():
                return _store_small(api.staging, pieces, finish)
        return await api.run(_store_small, api.staging, pieces, finish)
    if admit is not None:
        await api.run(admit)
    temporary = await api.run(api.staging.new_temporary)
    try:
        await receive(api, call, temporary)
        return await api.run(finish, temporary)
    finally:
        await api.run(temporary.discard)


def _store_small(staging: Staging, pieces: list[bytes], finish: Callable[[Temporary], T]) -> T:
    with staging.temporary() as temporary:
        _write_all(temporary.fd, pieces)
        return finish(temporary)


async def receive(api: Api, call: Call, temporary: Temporary) -> None:
    """Write the body of the request to a file, one batch while the next one comes. Also what came
    of a body that breaks off is in the file.

    Raises:
        ApiError: 400 for a body that breaks off, 413 for one above the limit.
    """
    limit = _limit(api, call)
    writing: asyncio.Task[None] | None = None
    pieces: list[bytes] = []
    pending = 0
    try:
        async for piece in _pieces(call, limit):
            pieces.append(piece)
            pending += len(piece)
            # A client may send its body byte by byte: each piece costs more than it holds.
            if pending >= _WRITE_BYTES or len(pieces) >= _MAX_VECTORS:
                if writing is not None:
                    await writing
                writing = asyncio.create_task(api.run(_write_all, temporary.fd, pieces))
                pieces, pending = [], 0
    finally:
        # In any case: its descriptor is closed next.
        if writing is not None:
            await asyncio.wait([writing])
            await writing
        await api.run(_write_all, temporary.fd, pieces)


async def _pieces(call: Call, limit: int) -> AsyncIterator[bytes]:
    """The body as it comes, all of it or an error."""
    received = 0
    chunks = faulty_chunks(call) if call.fault.touches_bodies else _chunks(call)
    try:
        async for chunk in chunks:
            received += len(chunk)
            if received > limit:
                raise _too_large(limit)
            yield chunk
    except (ClientError, HttpProcessingError, ConnectionError) as error:
        raise _broken_off() from error
    # With a chunked body the parser raises above when the last chunk is missing; a length is
    # compared here.
    announced = call.request.content_length
    if announced is not None and received != announced:
        raise _broken_off()


def file_headers(call: Call, info: FileInfo) -> dict[str, str]:
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes"}
    if not call.fault.no_last_modified:
        headers["Last-Modified"] = info.last_modified
    return headers | call.validators(info.etag)


async def send_file(api: Api, call: Call, fd: int, info: FileInfo, path: str) -> web.StreamResponse:
    """Answer with an open file or the part of it that was asked for. Closes `fd`."""
    try:
        request = call.request
        call.conditions.require_read(info, path)
        headers = file_headers(call, info)
        wanted = None
        if not call.fault.ignore_range and call.conditions.allow_range(info):
            wanted = parse_range(request.headers.get("Range"), info.size_bytes)
        span = wanted or ByteRange(0, info.size_bytes)
        if wanted is not None:
            headers["Content-Range"] = f"bytes {span.start}-{span.end - 1}/{info.size_bytes}"
        status = 200 if wanted is None else 206
        if len(span) <= _SMALL_BYTES and not call.fault.touches_bodies:
            body = await api.run_cached(_read, fd, span)
            if len(body) == len(span):
                return web.Response(status=status, headers=headers, body=body)
        return await _stream(api, call, fd, span, status=status, headers=headers)
    finally:
        os.close(fd)


async def _stream(
    api: Api, call: Call, fd: int, span: ByteRange, *, status: int, headers: dict[str, str]
) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = len(span)
    await response.prepare(call.request)
    if call.fault.touches_bodies or call.is_encrypted:
        await send_by_writes(call, response, lambda part: api.run_cached(_read, fd, part), span)
        return response
    try:
        sent = await send_span(api.senders, call.request, fd, span)
    except ConnectionError:
        raise
    except OSError:
        _log.exception("A file could not be read while it was sent")
        sent = -1
    if sent != len(span):
        # The file shrank or failed below us: only a closed connection tells the client so.
        if call.request.transport is not None:
            call.request.transport.close()
        raise ConnectionResetError("the body was cut")
    await response.write_eof()
    return response


def _read(fd: int, span: ByteRange, *, cached: bool = False) -> bytearray:
    """What the file has of a small span; with `cached`, all of it or OSError without waiting."""
    body = bytearray(len(span))
    count = os.preadv(fd, [body], span.start, os.RWF_NOWAIT if cached else 0)
    if cached and count != len(span):
        raise BlockingIOError
    return body[:count]


async def _chunks(call: Call) -> AsyncIterator[bytes]:
    if not call.request.can_read_body:
        # All requests without a body share one stream, whose chunks never end the second time.
        return
    content = call.request.content
    if call.request.content_length is None:
        # Its own chunks may be of a byte each, and each would cost a turn of the event loop.
        async for chunk in content.iter_any():
            yield chunk
        return
    # Not `iter_any`, which copies what it has into one piece.
    async for chunk, _is_end in content.iter_chunks():
        yield chunk


def _write_all(fd: int, pieces: list[bytes]) -> None:
    for start in range(0, len(pieces), _MAX_VECTORS):
        left = [memoryview(piece) for piece in pieces[start : start + _MAX_VECTORS]]
        while left:
            count = os.writev(fd, left)
            while left and count >= len(left[0]):
                count -= len(left.pop(0))
            if count:
                left[0] = left[0][count:]


def _limit(api: Api, call: Call) -> int:
    """Raises ApiError 413 for a body that announces more."""
    limit = call.max_body_bytes(api.settings)
    announced = call.request.content_length
    if announced is not None and announced > limit:
        raise _too_large(limit)
    return limit


def _broken_off() -> ApiError:
    return ApiError(400, "INVALID_PARAMETER_VALUE", "The body of the request broke off.")


def _too_large(limit: int) -> ApiError:
    message = f"The body must be at most {limit} bytes; larger files are uploaded in parts."
    return ApiError(413, "INVALID_PARAMETER_VALUE", message, reason="FILES_API_FILE_TOO_LARGE")
