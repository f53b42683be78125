"""Which reads count as forward reading, and how far read-ahead runs."""

from __future__ import annotations

import os
from pathlib import Path

from trainmount_files.volume import ByteRange
from trainmount_fuse.block_file import FileKey
from trainmount_fuse.blocks import BlockCache, Fetch
from trainmount_fuse.prefetch import Prefetcher, Streams, planned_window

MIB = 1 << 20


def test_the_window_doubles_with_each_read_that_goes_on_and_stops_at_its_bound() -> None:
    streams = Streams()
    windows = [
        planned_window(streams, n * MIB, MIB, 16 * MIB).window_bytes // MIB for n in range(7)
    ]
    assert windows == [2, 4, 8, 16, 16, 16, 16]


def test_random_reads_earn_no_window() -> None:
    streams = Streams()
    offsets = [500, 90, 7000, 333, 4100, 12, 2900, 8000, 600, 5100]
    assert {
        planned_window(streams, offset * MIB, 4096, 64 * MIB).window_bytes for offset in offsets
    } == {0}


def test_readers_that_share_a_handle_are_told_apart() -> None:
    """Four processes read a quarter each, interleaved, through one descriptor."""
    streams = Streams()
    last = {}
    for step in range(5):
        for reader in range(4):
            offset = reader * 256 * MIB + step * MIB
            last[reader] = planned_window(streams, offset, MIB, 64 * MIB).window_bytes
    assert all(window >= 16 * MIB for window in last.values())
    assert len(streams.streams) == 4


def test_reads_slightly_out_of_order_are_one_reader() -> None:
    streams = Streams()
    for offset in (0, 2, 1, 3, 5, 4, 6):
        stream = planned_window(streams, offset * MIB, MIB, 64 * MIB)
    assert len(streams.streams) == 1
    assert stream.window_bytes == 64 * MIB


def test_a_forward_reader_finds_its_next_bytes_there(tmp_path: Path) -> None:
    cache = BlockCache(
        tmp_path,
        capacity_bytes=64 * MIB,
        block_size_bytes=64 * 1024,
        max_fetch_bytes=MIB,
        free_disk_floor_bytes=0,
    )
    prefetcher = Prefetcher(
        cache, max_bytes=8 * MIB, fetch_bytes=MIB, block_size_bytes=64 * 1024, num_threads=2
    )
    data = os.urandom(6 * MIB)
    asked: list[ByteRange] = []

    def fetch(byte_range: ByteRange, buffer: memoryview) -> None:
        asked.append(byte_range)
        buffer[:] = data[byte_range.start : byte_range.end]

    def fetch_with(_cancelled: object) -> Fetch:
        return fetch

    file = cache.open(FileKey("f", "v", len(data)))
    streams = Streams()
    for offset in range(0, len(data), MIB):
        prefetcher.advance(streams, file, offset, MIB, fetch_with)
        assert cache.read(file, offset, MIB, fetch) == data[offset : offset + MIB]
    prefetcher.close()
    assert sum(len(one) for one in asked) == len(data)
    assert file.users == 1
