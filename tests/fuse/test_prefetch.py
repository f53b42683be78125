"""Reading ahead: what is fetched and put into the kernel's pages before it is asked for."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainmount_files.errors import Unavailable
from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import BlockFile, FileKey
from trainmount_fuse.cache.blocks import BlockCache, Fetch
from trainmount_fuse.memory import MemoryBudget
from trainmount_fuse.reads.prefetch import Prefetcher
from trainmount_fuse.reads.push import HOLE_BYTES, Pages, PushCounter
from trainmount_fuse.reads.read_patterns import Streams

KIB = 1 << 10
MIB = 1 << 20
BLOCK = 64 * KIB


class Kernel:
    """Pages of one inode."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = bytearray(size_bytes)
        self.pushed: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def store(self, _ino: int, offset: int, data: memoryview) -> None:
        with self._lock:
            self.bytes[offset : offset + len(data)] = data
            self.pushed.append((offset, offset + len(data)))


class Bench:
    """A file of random bytes, and what is between it and its readers."""

    def __init__(self, folder: Path, size_bytes: int, fetch_bytes: int = MIB) -> None:
        self.data = os.urandom(size_bytes)
        self.cache = BlockCache(
            folder,
            capacity_bytes=256 * MIB,
            block_size_bytes=BLOCK,
            max_fetch_bytes=fetch_bytes,
            free_disk_floor_bytes=0,
            memory=MemoryBudget(),
        )
        self.prefetcher = Prefetcher(
            self.cache,
            max_bytes=8 * fetch_bytes,
            fetch_bytes=fetch_bytes,
            block_size_bytes=BLOCK,
            num_threads=2,
        )
        self.asked: list[ByteRange] = []
        self.error: Exception | None = None
        self.file: BlockFile = self.cache.open(FileKey("f", "v", size_bytes))
        self.kernel = Kernel(size_bytes)
        self.pages = Pages(
            7, self.kernel.store, self.prefetcher.pushes, self.file.num_blocks, BLOCK
        )

    def fetch(self, byte_range: ByteRange, buffer: memoryview) -> None:
        self.asked.append(byte_range)
        if self.error is not None:
            raise self.error
        buffer[:] = self.data[byte_range.start : byte_range.end]

    def fetch_with(self, _cancelled: object) -> Fetch:
        return self.fetch

    def wait_idle(self) -> None:
        moment = threading.Event()
        while self.prefetcher.statistics().num_queued:
            moment.wait(0.001)

    def read_forward(self, streams: Streams, pages: Pages | None = None) -> None:
        for offset in range(0, len(self.data), MIB):
            self.prefetcher.advance(streams, self.file, offset, MIB, self.fetch_with, pages)
            read = self.cache.read(self.file, offset, MIB, self.fetch)
            assert read == self.data[offset : offset + MIB]


@pytest.fixture
def make_bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(size_bytes: int, **options: int) -> Bench:
        made.append(Bench(tmp_path, size_bytes, **options))
        return made[-1]

    yield make
    for bench in made:
        bench.prefetcher.close()
        bench.cache.close()


def test_a_forward_reader_has_each_byte_fetched_once(make_bench: Callable[[int], Bench]) -> None:
    bench = make_bench(6 * MIB)
    streams = Streams()
    bench.read_forward(streams)
    bench.wait_idle()
    assert sum(len(one) for one in bench.asked) == 6 * MIB
    assert bench.file.users == 1
    figures = bench.prefetcher.statistics()
    assert figures.prefetched_bytes == figures.used_bytes > 3 * MIB


def test_what_is_fetched_ahead_is_put_into_the_pages_but_for_the_first_page_of_each_range(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(6 * MIB)
    streams = Streams()
    bench.prefetcher.advance(streams, bench.file, 0, MIB, bench.fetch_with, bench.pages)
    bench.prefetcher.advance(streams, bench.file, MIB, MIB, bench.fetch_with, bench.pages)
    bench.wait_idle()
    assert sorted(bench.kernel.pushed) == [
        (start * MIB + HOLE_BYTES, (start + 1) * MIB) for start in range(1, 6)
    ]
    for start, end in bench.kernel.pushed:
        assert bench.kernel.bytes[start:end] == bench.data[start:end]
    assert bench.prefetcher.statistics().pushed_bytes == 5 * (MIB - HOLE_BYTES)
    left_out = bench.pages.hole(3 * MIB, HOLE_BYTES)
    assert left_out == bench.data[3 * MIB : 3 * MIB + HOLE_BYTES]
    assert bench.pages.hole(3 * MIB + HOLE_BYTES, HOLE_BYTES) is None


def test_what_the_cache_has_is_put_into_the_pages_without_a_fetch(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(4 * MIB)
    bench.cache.ensure(bench.file, 0, bench.file.num_blocks - 1, bench.fetch)
    bench.asked.clear()
    streams = Streams()
    bench.prefetcher.advance(streams, bench.file, 0, MIB, bench.fetch_with, bench.pages)
    bench.prefetcher.advance(streams, bench.file, MIB, MIB, bench.fetch_with, bench.pages)
    bench.wait_idle()
    assert bench.asked == []
    assert sum(end - start for start, end in bench.kernel.pushed) == 3 * (MIB - HOLE_BYTES)
    for start, end in bench.kernel.pushed:
        assert bench.kernel.bytes[start:end] == bench.data[start:end]
    assert bench.prefetcher.statistics().prefetched_bytes == 0


def test_no_range_is_put_into_the_pages_twice_unless_the_kernel_asks_for_it(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(4 * MIB)
    assert bench.pages.ask(0, 15)
    assert not bench.pages.ask(0, 15)
    assert not bench.pages.ask(3, 7)
    bench.pages.note_read(5 * BLOCK, 1)
    assert bench.pages.ask(3, 7)
    bench.pages.close()
    assert not bench.pages.ask(32, 40)


def test_ranges_are_whole_and_larger_the_farther_ahead_they_are(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(64 * MIB, fetch_bytes=8 * MIB)
    streams = Streams()
    for offset in range(0, 48 * MIB, MIB):
        bench.prefetcher.advance(streams, bench.file, offset, MIB, bench.fetch_with)
        bench.wait_idle()
    ranges = sorted((one.start // MIB, one.end // MIB) for one in bench.asked)
    assert ranges[:4] == [(1, 2), (2, 4), (4, 8), (8, 16)]
    assert ranges[4:] == [(start, start + 8) for start in range(16, 64, 8)]


def test_a_handle_that_is_closed_leaves_what_it_did_not_read_as_wasted(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(16 * MIB)
    streams = Streams()
    bench.prefetcher.advance(streams, bench.file, 0, 64 << 10, bench.fetch_with)
    streams.cancelled.set()
    assert bench.prefetcher.statistics().wasted_bytes == 2 * MIB - (64 << 10)
    assert bench.prefetcher.statistics().used_bytes == 0


def test_a_failure_ahead_of_the_reader_is_nobodys_error(
    make_bench: Callable[[int], Bench],
) -> None:
    bench = make_bench(4 * MIB)
    bench.error = Unavailable("read", "f", "503")
    streams = Streams()
    bench.prefetcher.advance(streams, bench.file, 0, MIB, bench.fetch_with, bench.pages)
    bench.wait_idle()
    bench.error = None
    assert bench.kernel.pushed == []
    bench.read_forward(Streams())


def test_nothing_is_pushed_after_close_and_wait_lasts_until_the_last_push_has_ended() -> None:
    inside, go_on = threading.Event(), threading.Event()
    pushed: list[int] = []

    def store(_ino: int, offset: int, _data: memoryview) -> None:
        inside.set()
        go_on.wait()
        pushed.append(offset)

    pages = Pages(7, store, PushCounter(), 64, 4096)
    data = memoryview(bytes(6 * MIB))
    pusher = threading.Thread(target=pages.push, args=(0, data))
    pusher.start()
    inside.wait()
    assert pages.is_busy
    pages.close()
    waiter = threading.Thread(target=pages.wait)
    waiter.start()
    go_on.set()
    waiter.join()
    pusher.join()
    assert not pages.is_busy
    # The piece that was under way, and no other.
    assert pushed == [HOLE_BYTES]
    pages.push(0, data)
    assert pushed == [HOLE_BYTES]


def test_a_push_leaves_out_what_is_being_read() -> None:
    kernel = Kernel(8 * MIB)
    pages = Pages(7, kernel.store, PushCounter(), 8, MIB)
    pages.begin_read(MIB, MIB)
    pages.begin_read(3 * MIB - 100, 200)
    pages.push(0, memoryview(bytes(4 * MIB)))
    pages.end_read(MIB, MIB)
    covered = sorted(kernel.pushed)
    assert covered[0] == (HOLE_BYTES, MIB)
    assert covered[1] == (2 * MIB, 3 * MIB - 100)
    assert covered[2] == (3 * MIB + 4096, 4 * MIB)


def test_a_kernel_that_has_forgotten_the_inode_is_no_error() -> None:
    def store(_ino: int, _offset: int, _data: memoryview) -> None:
        raise FileNotFoundError

    counter = PushCounter()
    pages = Pages(7, store, counter, 8, MIB)
    pages.push(0, memoryview(bytes(MIB)))
    assert (counter.num_refused, counter.pushed_bytes) == (1, 0)
    assert not pages.is_busy


def test_a_push_may_wait_for_a_reader_of_the_same_bytes(make_bench: Callable[[int], Bench]) -> None:
    """The kernel holds the pages of a read until it is answered, and a push waits for them."""
    bench = make_bench(4 * MIB)
    read = bytearray()

    def store(_ino: int, _offset: int, _data: memoryview) -> None:
        reader = threading.Thread(
            target=lambda: read.extend(bench.cache.read(bench.file, MIB, 2 * MIB, bench.fetch))
        )
        reader.start()
        reader.join()

    pages = Pages(7, store, bench.prefetcher.pushes, bench.file.num_blocks, BLOCK)
    bench.prefetcher.advance(Streams(), bench.file, 0, MIB, bench.fetch_with, pages)
    bench.wait_idle()
    assert read[: 2 * MIB] == bench.data[MIB : 3 * MIB]
    assert sum(len(one) for one in bench.asked) == 3 * MIB
