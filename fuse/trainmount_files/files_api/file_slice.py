"""A range of a local file as the body of a request. Made by `file_bodies`, sent by `transport`."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Final

from trainmount_files.errors import VolumeError
from trainmount_files.retry import Cancellation
from trainmount_files.volume import MIB

__all__ = ["SEND_BLOCK_BYTES", "FileSlice"]

SEND_BLOCK_BYTES: Final = MIB // 4
"""Bytes read from a file and handed to the socket at once; the memory of a part that is being sent.

As fast as a MiB on loopback, and sixty-four parts at once are 16 MiB.
"""


class FileSlice:
    """A body that is read from a file by position while it is sent; each request makes its own."""

    def __init__(
        self,
        descriptor: int,
        start: int,
        size_bytes: int,
        *,
        on_short: VolumeError,
        on_cancel: VolumeError,
        on_failure: Callable[[OSError], VolumeError],
        cancel: Cancellation | None,
    ) -> None:
        """`on_short` is raised where the file ends before the slice does."""
        self._descriptor = descriptor
        self._start = start
        self._end = start + size_bytes
        self._on_short = on_short
        self._on_cancel = on_cancel
        self._on_failure = on_failure
        self._cancel = cancel

    def __len__(self) -> int:
        return self._end - self._start

    def __iter__(self) -> Iterator[memoryview]:
        """Pieces that are good until the next one is asked for."""
        return self._pieces(self._start)

    def send_to(self, sock: socket.socket) -> None:
        """Straight from the operating system's pages to a socket without TLS: half the processor
        time of a copy through here, and one turn of the interpreter for megabytes.

        Raises:
            OSError: the connection broke, or took nothing for the socket's timeout.
        """
        offset = self._start
        while offset < self._end:
            self._check_cancelled()
            try:
                count = os.sendfile(sock.fileno(), self._descriptor, offset, self._end - offset)
            except BlockingIOError:
                _wait_writable(sock)
                continue
            except ConnectionError:
                raise
            except OSError:
                # Not every file can be sent like this, and of those that can it does not say which
                # of the two sides has failed.
                for piece in self._pieces(offset):
                    sock.sendall(piece)
                return
            if not count:
                raise self._on_short
            offset += count

    def _check_cancelled(self) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise self._on_cancel

    def _pieces(self, offset: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(SEND_BLOCK_BYTES, self._end - offset)))
        while offset < self._end:
            self._check_cancelled()
            try:
                count = os.preadv(self._descriptor, [buffer[: self._end - offset]], offset)
            except OSError as error:
                raise self._on_failure(error) from error
            if not count:
                raise self._on_short
            yield buffer[:count]
            offset += count


def _wait_writable(sock: socket.socket) -> None:
    seconds = sock.gettimeout()
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    if not poll.poll(None if seconds is None else seconds * 1000):
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
