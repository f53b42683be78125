"""Bodies on a bad day, cut short or at a trickle, and those that TLS has to see. Only `bodies`
calls it, and only for such a request, so that the plain path stays free of all that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

from aiohttp import web

from trainmount_files.server.call import Call
from trainmount_files.volume import ByteRange

__all__ = ["Pace", "faulty_chunks", "send_by_writes"]

# Short enough that a slow body flows evenly, long enough to be worth a wake-up.
_TICK_SECONDS: Final = 0.02

_MIN_SLICE_BYTES: Final = 1024
_MAX_SLICE_BYTES: Final = 256 * 1024


class Pace:
    """Waits so that what was spent so far took at least its time; no rate is no wait."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._started = time.monotonic()
        self._spent = 0

    @property
    def slice_bytes(self) -> int:
        """How much to move at once."""
        if self._rate is None:
            return _MAX_SLICE_BYTES
        return int(min(max(self._rate * _TICK_SECONDS, _MIN_SLICE_BYTES), _MAX_SLICE_BYTES))

    async def spend(self, num_bytes: int) -> None:
        if self._rate is None:
            return
        self._spent += num_bytes
        ahead = self._started + self._spent / self._rate - time.monotonic()
        if ahead > 0:
            await asyncio.sleep(ahead)


async def faulty_chunks(call: Call) -> AsyncIterator[bytes]:
    """The body of a request as its fault lets it through.

    Raises:
        ConnectionResetError: the fault cuts here; the connection is closed.
    """
    fault, pace = call.fault, Pace(call.fault.bandwidth_bytes_per_second)
    left = fault.cut_after_bytes
    content = call.request.content
    while True:
        # Reading little at a time keeps the kernel's window shut, so that the client is slow too.
        chunk = await content.read(pace.slice_bytes)
        if left is not None and (len(chunk) >= left or not chunk):
            _hang_up(call)
        if not chunk:
            return
        if left is not None:
            left -= len(chunk)
        await pace.spend(len(chunk))
        yield chunk


async def send_by_writes(
    call: Call,
    response: web.StreamResponse,
    read: Callable[[ByteRange], Awaitable[bytes | bytearray]],
    span: ByteRange,
) -> None:
    """Send a span of a file, which `read` gives, behind headers that announce all of it.

    Raises:
        ConnectionResetError: the fault cuts here, or the file shrank; the connection is closed.
    """
    fault, pace = call.fault, Pace(call.fault.bandwidth_bytes_per_second)
    cut = fault.cut_after_bytes
    end = span.end if cut is None else min(span.end, span.start + cut)
    offset = span.start
    while offset < end:
        piece = await read(ByteRange(offset, min(offset + pace.slice_bytes, end)))
        if not piece:
            break
        await response.write(piece)
        offset += len(piece)
        # A client that takes all at once lets none of the two wait, and others must have a turn.
        await asyncio.sleep(0)
        await pace.spend(len(piece))
    if offset != span.end:
        _hang_up(call)
    await response.write_eof()


def _hang_up(call: Call) -> None:
    if call.request.transport is not None:
        call.request.transport.close()
    raise ConnectionResetError("the body was cut")
