"""A span of a file through a connection's socket, by `sendfile` in threads. Called by `bodies`.

The event loop must not send itself: eight downloads would keep it from every other request for
milliseconds at a time, and for as long as the disk takes where a file is not in memory. A thread
stays with a connection only while its client reads; for a slow one the event loop waits.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from aiohttp import web

from trainmount_files.volume import MIB, ByteRange

__all__ = ["send_span"]

# A client that reads at all makes room in this time; one that does not costs no thread for longer.
_PATIENCE_MILLISECONDS: Final = 20

# When more clients read than there are threads, each gets one for so long.
_TURN_SECONDS: Final = 0.1

# At most in one call, or a client as fast as we are would keep its thread until the file ends.
_CALL_BYTES: Final = 4 * MIB

_COPY_BYTES: Final = 256 * 1024


async def send_span(
    threads: ThreadPoolExecutor, request: web.BaseRequest, fd: int, span: ByteRange
) -> int:
    """Send what `fd` holds at `span`, behind headers that are under way; returns how many bytes
    went, fewer than asked for only where the file has become shorter.

    The caller may close `fd` afterwards, also after a cancellation.

    Raises:
        ConnectionError: the client went away.
        OSError: the file cannot be read.
    """
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size():
        # What the transport still holds goes first.
        transport.set_write_buffer_limits(0)
        await request.writer.drain()
        transport.set_write_buffer_limits()
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client went away")
    # Not read meanwhile, or a client that closes its half early would end the connection.
    was_reading = transport.is_reading()
    transport.pause_reading()
    try:
        return await _send(threads, transport.get_extra_info("socket").fileno(), fd, span)
    finally:
        if was_reading and not transport.is_closing():
            transport.resume_reading()


async def _send(threads: ThreadPoolExecutor, socket_fd: int, fd: int, span: ByteRange) -> int:
    # Own descriptors: the event loop refuses to watch one that a transport has, and a thread may
    # still be at it when this coroutine is cancelled.
    socket_fd, fd = os.dup(socket_fd), os.dup(fd)
    offset, is_short = span.start, False
    step: Future[tuple[int, bool]] | None = None
    try:
        while offset < span.end and not is_short:
            if step is not None:
                await _wait_writable(socket_fd)
            step = threads.submit(_push, socket_fd, fd, offset, span.end)
            offset, is_short = await asyncio.wrap_future(step)
        return offset - span.start
    finally:
        if step is None:
            _close(socket_fd, fd)
        else:
            step.add_done_callback(lambda _step: _close(socket_fd, fd))


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _push(socket_fd: int, fd: int, offset: int, end: int) -> tuple[int, bool]:
    """Send for one turn; returns where it got to, and whether the file ended there."""
    until = time.monotonic() + _TURN_SECONDS
    writable = select.poll()
    writable.register(socket_fd, select.POLLOUT)
    while offset < end:
        try:
            sent = _send_some(socket_fd, fd, offset, min(end - offset, _CALL_BYTES))
        except BlockingIOError:
            if not writable.poll(_PATIENCE_MILLISECONDS):
                break
        else:
            if not sent:
                return offset, True
            offset += sent
        if time.monotonic() > until:
            break
    return offset, False


def _send_some(socket_fd: int, fd: int, offset: int, num_bytes: int) -> int:
    try:
        return os.sendfile(socket_fd, fd, offset, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    # Some filesystems of older kernels.
    return os.write(socket_fd, os.pread(fd, min(num_bytes, _COPY_BYTES), offset))


async def _wait_writable(socket_fd: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable = asyncio.Event()
    loop.add_writer(socket_fd, is_writable.set)
    try:
        await is_writable.wait()
    finally:
        loop.remove_writer(socket_fd)
