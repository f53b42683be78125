"""Read-ahead: who reads forward, how far to run in front of them, and the threads that do.

`filesystem.read` tells each read; blocks are fetched into `blocks` before they are asked for. The
window of a reader doubles with each read that goes on where the last one ended, and a read
elsewhere starts another reader with none. Reads and readers are seen by the event loop's thread
only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from trainmount_files.errors import VolumeError
from trainmount_fuse.block_file import BlockFile
from trainmount_fuse.blocks import BlockCache, Fetch

__all__ = ["Prefetcher", "Stream", "Streams", "planned_window"]

log = logging.getLogger(__name__)

_MAX_STREAMS: Final = 8
"""Readers told apart in one handle: forked processes share a descriptor and each read a part
forward.
"""

_FIRST_WINDOW_BYTES: Final = 2 << 20


@dataclass(slots=True)
class Stream:
    """One forward reader of a handle."""

    next_offset: int
    window_bytes: int = 0
    scheduled_until: int = 0


@dataclass(slots=True)
class Streams:
    """The readers of one handle, the most recent last."""

    streams: list[Stream] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    """Set when the handle is released: fetches that nobody waits for end."""


def planned_window(streams: Streams, offset: int, size: int, max_bytes: int) -> Stream:
    """The reader that a read belongs to, moved on, with the window it has earned."""
    end = offset + size
    for stream in streams.streams:
        # The kernel's own read-ahead sends requests slightly out of order.
        if stream.next_offset - 2 * size <= offset <= stream.next_offset + 4 * size:
            streams.streams.remove(stream)
            streams.streams.append(stream)
            grown = max(_FIRST_WINDOW_BYTES, 2 * stream.window_bytes)
            stream.window_bytes = min(max_bytes, grown)
            stream.next_offset = max(stream.next_offset, end)
            return stream
    stream = Stream(end, scheduled_until=end)
    if offset == 0:
        # Most readers of a first byte want the rest.
        stream.window_bytes = min(max_bytes, _FIRST_WINDOW_BYTES)
    streams.streams.append(stream)
    del streams.streams[:-_MAX_STREAMS]
    return stream


class Prefetcher:
    """The threads that fetch ahead. At most `num_threads` ranges of `fetch_bytes` are in memory."""

    def __init__(
        self,
        cache: BlockCache,
        *,
        max_bytes: int,
        fetch_bytes: int,
        block_size_bytes: int,
        num_threads: int,
    ) -> None:
        self._cache = cache
        self._max_bytes = max_bytes
        self._fetch_bytes = fetch_bytes // block_size_bytes * block_size_bytes
        self._block_size_bytes = block_size_bytes
        self._max_queued = 4 * num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
        self._num_queued = 0
        self._lock = threading.Lock()

    def advance(
        self,
        streams: Streams,
        file: BlockFile,
        offset: int,
        size: int,
        fetch_with: Callable[[threading.Event], Fetch],
    ) -> None:
        """A read of this range was asked for: fetch what its reader wants next. Never waits."""
        if not self._max_bytes or not size:
            return
        stream = planned_window(streams, offset, size, self._max_bytes)
        end = min(stream.next_offset + stream.window_bytes, file.key.size_bytes)
        start = max(stream.scheduled_until, stream.next_offset)
        # Small steps would ask for small ranges; wait until a whole one is due, or the file ends.
        if start >= end or (
            end - start < self._fetch_bytes // 2
            and end < file.key.size_bytes
            and start > stream.next_offset
        ):
            return
        while start < end:
            stop = min(end, (start // self._fetch_bytes + 1) * self._fetch_bytes)
            if not self._submit(file, start, stop, streams.cancelled, fetch_with):
                return
            stream.scheduled_until = start = stop

    def close(self) -> None:
        """Stop; ranges under way are given up by their cancel events or end by themselves."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _submit(
        self,
        file: BlockFile,
        start: int,
        stop: int,
        cancelled: threading.Event,
        fetch_with: Callable[[threading.Event], Fetch],
    ) -> bool:
        first, last = start // self._block_size_bytes, (stop - 1) // self._block_size_bytes
        if file.has(first, last):
            return True
        with self._lock:
            if self._num_queued >= self._max_queued:
                return False
            self._num_queued += 1
        self._cache.retain(file)
        future = self._executor.submit(
            self._fill, file, first, last, cancelled, fetch_with(cancelled)
        )
        future.add_done_callback(lambda _future: self._ended(file))
        return True

    def _ended(self, file: BlockFile) -> None:
        self._cache.release(file)
        with self._lock:
            self._num_queued -= 1

    def _fill(
        self, file: BlockFile, first: int, last: int, cancelled: threading.Event, fetch: Fetch
    ) -> None:
        if cancelled.is_set():
            return
        try:
            self._cache.ensure(file, first, last, fetch)
        except (VolumeError, OSError):
            # Whoever reads there asks again and gets the error; nobody asked for this one yet.
            log.debug("Read-ahead failed", exc_info=True, extra={"path": file.key.path})
