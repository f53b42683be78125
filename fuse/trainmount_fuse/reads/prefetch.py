"""The threads that fetch ahead of the readers, and the process that fetches whole small files.
`reading` tells each read; `read_patterns` says what comes next; the bytes go into `blocks`, and
where the kernel takes them into its pages (`push`).

What is ahead is bounded by the window of each reader and by the mount's memory, for which `blocks`
waits. Readers are seen by the event loop's thread only.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import trio

from trainmount_files.errors import VolumeError
from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import BlockFile
from trainmount_fuse.cache.blocks import BlockCache, Fetch
from trainmount_fuse.cache.shared_memory import SharedBuffer
from trainmount_fuse.reads.fetch_process import FetchProcess
from trainmount_fuse.reads.push import Pages, PushCounter
from trainmount_fuse.reads.read_patterns import Streams

__all__ = ["FetchWith", "PrefetchStatistics", "Prefetcher", "Streams"]

log = logging.getLogger(__name__)

FetchWith = Callable[[threading.Event], Fetch]
"""How to fetch from a version of a file until the event is set."""

_MIN_PIECE_BYTES: Final = 1 << 20
_MAX_LIVE: Final = 512

_FILES_PER_THREAD: Final = 4
"""Whole small files are fetched by so many times as many threads as ranges of large ones: what they
wait for is the store's latency, and all of them together take less memory than one large range.
"""

_PATIENCE_SECONDS: Final = 180.0
"""A fetch of the process that takes longer, well above what a volume tries for, will never end."""


@dataclass(frozen=True, slots=True)
class PrefetchStatistics:
    """Counters since the start."""

    prefetched_bytes: int
    """Asked for ahead of any read."""

    used_bytes: int
    """Of those, the ranges that a read reached."""

    wasted_bytes: int
    """Of those, the ranges that no read had reached when their handle was closed."""

    pushed_bytes: int
    """Put into the kernel's pages, from the store or from the cache."""

    num_refused_pushes: int
    """Pushes that the kernel did not take: it had forgotten the inode."""

    num_queued: int
    """Ranges that are waiting or under way now."""


@dataclass(frozen=True, slots=True)
class _Job:
    """For whom a range is fetched, and how."""

    streams: Streams
    file: BlockFile
    fetch_with: FetchWith
    pages: Pages | None


class Prefetcher:
    """Fetches ranges in threads of its own."""

    def __init__(
        self,
        cache: BlockCache,
        *,
        max_bytes: int,
        fetch_bytes: int,
        block_size_bytes: int,
        num_threads: int,
        process: FetchProcess | None = None,
    ) -> None:
        """Whole files are fetched by `process`, where there is one, and else in threads."""
        self.max_bytes = max_bytes
        """Largest window of one reader; 0 for none."""

        self.pushes = PushCounter()
        self._cache = cache
        self._process = process
        self._aside: dict[BlockFile, trio.Event] = {}
        """What the process fetches now. The event loop's thread only."""
        self._fetch_bytes = fetch_bytes // block_size_bytes * block_size_bytes
        self._block_size_bytes = block_size_bytes
        self._max_queued = 4 * num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="prefetch")
        self._max_files = _FILES_PER_THREAD * num_threads
        self._file_executor = ThreadPoolExecutor(self._max_files, thread_name_prefix="next-file")
        self._num_queued = 0
        self._num_files = 0
        self._lock = threading.Lock()
        self._live: dict[int, Streams] = {}
        self._prefetched_bytes = self._used_bytes = self._wasted_bytes = 0

    def advance(
        self,
        streams: Streams,
        file: BlockFile,
        offset: int,
        size: int,
        fetch_with: FetchWith,
        pages: Pages | None = None,
    ) -> int:
        """A read of this range was asked for: fetch what its reader wants next. Never waits.

        Returns how much of the reader's window lies behind the end of the file.
        """
        if not self.max_bytes or not size:
            return 0
        self._note_read(streams, offset, size)
        stream = streams.follow(offset, size, self.max_bytes)
        job = _Job(streams, file, fetch_with, pages)
        file_end = file.key.size_bytes
        for start, stop in streams.steps_ahead(stream, self.max_bytes):
            self._submit_all(job, start, min(stop, file_end), self._fetch_bytes)
        start, end = streams.window_ahead(stream)
        end = min(end, file_end)
        piece = self._piece_bytes(end - stream.next_offset)
        # Whole pieces, asked for when half of one is due: each range costs a request, a push and a
        # write, and memory of its size is used again by the next.
        end = min(file_end, (end + piece // 2) // piece * piece)
        while start < end:
            piece = self._piece_bytes(start - stream.next_offset)
            stop = min(end, (start // piece + 1) * piece)
            if not self._submit(job, start, stop):
                break
            start = stream.scheduled_until = stop
        return max(0, stream.next_offset + stream.window_bytes - file_end)

    def fetch_file(
        self, streams: Streams, file: BlockFile, size_bytes: int, fetch_with: FetchWith
    ) -> bool:
        """Fetch the first bytes of a file that nobody has opened yet; false where the threads have
        enough to do.
        """
        with self._lock:
            if self._num_files >= self._max_files:
                return False
            self._num_files += 1
            self._prefetched_bytes += size_bytes
        self._cache.retain(file)
        last = (size_bytes - 1) // self._block_size_bytes
        if self._fetch_aside(file, last, size_bytes, is_guess=True):
            return True
        job = _Job(streams, file, fetch_with, None)
        future = self._file_executor.submit(self._fill, job, 0, last)
        future.add_done_callback(lambda _future: self._file_ended(file))
        return True

    async def fetch_small_file(self, file: BlockFile) -> None:
        """Have a file of one block here, for a program that waits for it, unless it is too much
        trouble: then it is not here, and whoever fetches it hears why.
        """
        if file not in self._aside and file.num_blocks == 1:
            self._cache.retain(file)
            if not self._fetch_aside(file, 0, file.key.size_bytes, is_guess=False):
                self._cache.release(file)
        arrived = self._aside.get(file)
        if arrived is None:
            return
        with trio.move_on_after(_PATIENCE_SECONDS) as waiting:
            await arrived.wait()
        if waiting.cancelled_caught:
            log.error("The process that fetches small files does not answer; it is given up")
            self.give_up()

    def load_file(self, file: BlockFile, size_bytes: int) -> None:
        """As `fetch_file`, of a file whose first bytes are on disk."""
        with self._lock:
            self._prefetched_bytes += size_bytes
        self._cache.will_need(file, (size_bytes - 1) // self._block_size_bytes)

    def note_used(self, num_bytes: int) -> None:
        """Of what `fetch_file` fetched, so much is being read."""
        with self._lock:
            self._used_bytes += num_bytes

    def note_wasted(self, num_bytes: int) -> None:
        """Of what `fetch_file` fetched, so much will not be read."""
        with self._lock:
            self._wasted_bytes += num_bytes

    def statistics(self) -> PrefetchStatistics:
        """A snapshot."""
        with self._lock:
            self._sweep()
            return PrefetchStatistics(
                prefetched_bytes=self._prefetched_bytes,
                used_bytes=self._used_bytes,
                wasted_bytes=self._wasted_bytes,
                pushed_bytes=self.pushes.pushed_bytes,
                num_refused_pushes=self.pushes.num_refused,
                num_queued=self._num_queued + self._num_files,
            )

    def give_up(self) -> None:
        """Nobody waits for small files any more; what is under way does not come. The event loop's
        thread only.
        """
        if self._process is not None:
            self._process.close()

    def close(self) -> None:
        """Stop; ranges under way are given up by their cancel events or end by themselves. After
        `give_up`.
        """
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._file_executor.shutdown(wait=True, cancel_futures=True)

    def _fetch_aside(self, file: BlockFile, last: int, size_bytes: int, *, is_guess: bool) -> bool:
        """Have the process fetch the blocks up to `last`; false where it is not there or has enough
        to do, where they are on their way, and where there is no memory for them.
        """
        process = self._process
        if process is None or not process.is_ready(for_guess=is_guess):
            return False
        held = self._cache.begin_fetch(file, 0, last, process.memory)
        if held is None:
            return False
        arrived = self._aside[file] = trio.Event()

        def end(is_there: bool) -> None:
            self._cache.end_fetch(held, is_there=is_there)
            del self._aside[file]
            arrived.set()
            if is_guess:
                self._file_ended(file)
            else:
                self._cache.release(file)

        assert isinstance(held.buffer, SharedBuffer)
        key, byte_range = file.key, ByteRange(0, size_bytes)
        process.ask(key.path, key.version, byte_range, held.buffer, end)
        return True

    def _piece_bytes(self, distance_bytes: int) -> int:
        """What is asked for at once so far ahead of the reader. Ranges under way share the line, so
        the nearer one is, the smaller it is and the sooner it comes: 1, 2, 4, 8 MiB.
        """
        block = self._block_size_bytes
        wanted = 1 << ((distance_bytes + _MIN_PIECE_BYTES).bit_length() - 1)
        return max(block, min(self._fetch_bytes, wanted) // block * block)

    def _note_read(self, streams: Streams, offset: int, size: int) -> None:
        if not streams.ahead:
            return
        with self._lock:
            left = [one for one in streams.ahead if one[1] <= offset or offset + size <= one[0]]
            self._used_bytes += _total(streams.ahead) - _total(left)
            streams.ahead[:] = left

    def _submit_all(self, job: _Job, start: int, end: int, piece_bytes: int) -> int:
        """Ask for the range in pieces; returns how far that was possible, at least `start`."""
        while start < end:
            stop = min(end, (start // piece_bytes + 1) * piece_bytes)
            if not self._submit(job, start, stop):
                break
            start = stop
        return start

    def _submit(self, job: _Job, start: int, stop: int) -> bool:
        first, last = start // self._block_size_bytes, (stop - 1) // self._block_size_bytes
        is_here = job.file.has(first, last)
        if is_here if job.pages is None else not job.pages.ask(first, last):
            return True
        with self._lock:
            if self._num_queued >= self._max_queued:
                return False
            self._num_queued += 1
        if not is_here:
            self._note_ahead(job.streams, start, stop)
        self._cache.retain(job.file)
        future = self._executor.submit(self._fill, job, first, last)
        future.add_done_callback(lambda _future: self._ended(job.file))
        return True

    def _note_ahead(self, streams: Streams, start: int, stop: int) -> None:
        with self._lock:
            streams.ahead.append((start, stop))
            self._prefetched_bytes += stop - start
            self._live[id(streams)] = streams
            if len(self._live) > _MAX_LIVE:
                self._sweep()

    def _sweep(self) -> None:
        """Count what was fetched for handles that are closed."""
        for streams in self._live.values():
            if streams.cancelled.is_set():
                self._wasted_bytes += _total(streams.ahead)
                streams.ahead.clear()
        self._live = {key: one for key, one in self._live.items() if one.ahead}

    def _ended(self, file: BlockFile) -> None:
        self._cache.release(file)
        with self._lock:
            self._num_queued -= 1

    def _file_ended(self, file: BlockFile) -> None:
        self._cache.release(file)
        with self._lock:
            self._num_files -= 1

    def _fill(self, job: _Job, first: int, last: int) -> None:
        cancelled = job.streams.cancelled
        if cancelled.is_set():
            return
        fetch = job.fetch_with(cancelled)
        try:
            if job.pages is None:
                self._cache.ensure(job.file, first, last, fetch)
            elif not self._cache.ensure(job.file, first, last, fetch, on_fetched=job.pages.push):
                self._cache.load(job.file, first, last, job.pages.push)
        except (VolumeError, OSError):
            # Whoever reads there asks again and gets the error; nobody asked for this one yet.
            log.debug("Read-ahead failed", exc_info=True, extra={"path": job.file.key.path})


def _total(ranges: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)
