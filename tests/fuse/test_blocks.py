"""The block cache: exact bytes, single flight, bounds, damage, survival."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainmount_files.errors import PreconditionFailed
from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import FileKey
from trainmount_fuse.cache.blocks import BlockCache
from trainmount_fuse.cache.cache_table import Geometry
from trainmount_fuse.cache.shared_memory import SharedMemory
from trainmount_fuse.memory import MemoryBudget

BLOCK = 4096


class Source:
    """Bytes of one file, and who asked for what."""

    def __init__(self, size: int) -> None:
        self.data = os.urandom(size)
        self.asked: list[ByteRange] = []
        self.key = FileKey("f", "v1", size)

    def fetch(self, byte_range: ByteRange, buffer: memoryview) -> None:
        self.asked.append(byte_range)
        buffer[:] = self.data[byte_range.start : byte_range.end]


MakeCache = Callable[..., BlockCache]


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[MakeCache]:
    def make(capacity_bytes: int = 1 << 20, **changes: object) -> BlockCache:
        values: dict[str, Any] = {
            "block_size_bytes": BLOCK,
            "max_fetch_bytes": 4 * BLOCK,
            "free_disk_floor_bytes": 0,
            "cell_bytes": BLOCK,
        }
        cache = BlockCache(tmp_path / "blocks", capacity_bytes=capacity_bytes, **(values | changes))
        opened.append(cache)
        return cache

    opened: list[BlockCache] = []
    yield make
    for cache in opened:
        cache.close()


def test_any_range_is_exact_and_each_block_is_fetched_once(make_cache: MakeCache) -> None:
    cache, source = make_cache(), Source(10 * BLOCK + 100)
    file = cache.open(source.key)
    for offset, size in [(5, 1), (BLOCK - 1, 2), (9 * BLOCK, BLOCK + 100), (0, len(source.data))]:
        assert cache.read(file, offset, size, source.fetch) == source.data[offset : offset + size]
    assert sum(len(one) for one in source.asked) == len(source.data)
    assert max(len(one) for one in source.asked) <= 4 * BLOCK
    assert cache.flush()
    assert cache.statistics().cached_bytes == len(source.data)


def test_what_is_in_memory_is_read_without_waiting_and_what_is_not_is_refused(
    make_cache: MakeCache,
) -> None:
    cache, source = make_cache(), Source(3 * BLOCK)
    file = cache.open(source.key)
    assert cache.read_nowait(file, 0, 10) is None
    cache.read(file, 0, 10, source.fetch)
    assert cache.read_nowait(file, 1, BLOCK - 1) == source.data[1:BLOCK]
    assert cache.read_nowait(file, BLOCK - 1, 2) is None


def test_cached_blocks_are_there_after_a_restart_and_are_checked_before_use(
    make_cache: MakeCache,
) -> None:
    source = Source(5 * BLOCK)
    first = make_cache()
    first.read(first.open(source.key), 0, len(source.data), source.fetch)
    assert first.flush()
    # Killed: nothing was closed.
    second = make_cache()
    file = second.open(source.key)
    source.asked.clear()
    assert second.read_nowait(file, 0, 10) is None
    assert second.read(file, 0, len(source.data), source.fetch) == source.data
    assert source.asked == []
    assert second.read_nowait(file, 0, 10) == source.data[:10]


def test_small_blocks_that_are_read_ahead_from_the_disk_are_checked_where_nobody_waits(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    source = Source(5 * BLOCK)
    first = make_cache()
    first.read(first.open(source.key), 0, len(source.data), source.fetch)
    first.close()
    cache = make_cache()
    file = cache.open(source.key)
    cache.will_need(file, 4)
    deadline = time.monotonic() + 30
    while (data := cache.read_nowait(file, BLOCK + 7, 10)) is None:
        assert time.monotonic() < deadline
    assert data == source.data[BLOCK + 7 : BLOCK + 17]
    (path,) = tmp_path.glob("blocks/*.cache")
    start = path.read_bytes().index(source.data)
    with path.open("r+b") as opened:
        opened.seek(start + BLOCK)
        opened.write(b"nonsense")
    # What came from the disk again was not checked yet.
    cache.will_need(file, 4)
    assert cache.read_nowait(file, BLOCK + 7, 10) is None
    source.asked.clear()
    assert cache.read(file, BLOCK + 7, 10, source.fetch) == source.data[BLOCK + 7 : BLOCK + 17]
    assert source.asked == [ByteRange(BLOCK, 2 * BLOCK)]
    assert cache.statistics().num_bad_blocks == 1


@pytest.mark.parametrize("damage", ["halved", "flipped", "emptied", "zeroed"])
def test_damage_on_disk_is_noticed_and_fetched_again(
    make_cache: MakeCache, tmp_path: Path, damage: str
) -> None:
    """No block that is not whole is ever given, nor read as zeros."""
    source = Source(8 * BLOCK)
    first = make_cache()
    first.read(first.open(source.key), 0, len(source.data), source.fetch)
    assert first.flush()
    (path,) = tmp_path.glob("blocks/*.cache")
    start = path.read_bytes().index(source.data)
    if damage == "halved":
        os.truncate(path, start + 4 * BLOCK)
    elif damage == "flipped":
        with path.open("r+b") as opened:
            opened.seek(start + 2 * BLOCK + 7)
            opened.write(bytes([source.data[2 * BLOCK + 7] ^ 1]))
    elif damage == "emptied":
        os.truncate(path, start)
    else:
        with path.open("r+b") as opened:
            opened.seek(start + BLOCK)
            opened.write(bytes(3 * BLOCK))
    source.asked.clear()
    second = make_cache()
    file = second.open(source.key)
    assert second.read(file, 0, len(source.data), source.fetch) == source.data
    refetched = {"halved": 4, "flipped": 1, "emptied": 8, "zeroed": 3}[damage]
    assert sum(len(one) for one in source.asked) == refetched * BLOCK
    assert second.statistics().num_bad_blocks == refetched
    assert second.flush()
    assert second.statistics().cached_bytes == len(source.data)


def test_who_asks_is_told_each_fetched_range_once(make_cache: MakeCache) -> None:
    cache, source = make_cache(), Source(6 * BLOCK + 7)
    file = cache.open(source.key)
    told: list[tuple[int, bytes]] = []

    def note(offset: int, data: memoryview) -> None:
        told.append((offset, bytes(data)))

    cache.ensure(file, 0, 4, source.fetch, on_fetched=note)
    cache.ensure(file, 0, 6, source.fetch, on_fetched=note)
    assert [(offset // BLOCK, len(data)) for offset, data in told] == [
        (0, 4 * BLOCK),
        (4, BLOCK),
        (5, BLOCK + 7),
    ]
    assert b"".join(data for _offset, data in told) == source.data


def test_blocks_on_disk_and_in_memory_are_told_in_one_piece_if_all_are_here(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    source, told = Source(6 * BLOCK + 7), []

    def note(offset: int, data: memoryview) -> None:
        told.append((offset, bytes(data)))

    first = make_cache()
    first.ensure(first.open(source.key), 1, 4, source.fetch)
    first.close()
    cache = make_cache()
    file = cache.open(source.key)
    assert not cache.load(file, 1, 6, note)
    cache.ensure(file, 5, 6, source.fetch)
    assert not cache.load(file, 0, 6, note)
    assert told == []
    assert cache.load(file, 1, 6, note)
    assert told == [(BLOCK, source.data[BLOCK:])]
    # A block that is damaged is not told, and fetched again.
    (path,) = tmp_path.glob("blocks/*.cache")
    at = path.read_bytes().index(source.data[2 * BLOCK : 3 * BLOCK])
    with path.open("r+b") as opened:
        opened.seek(at)
        opened.write(b"nonsense")
    assert not cache.load(file, 1, 3, note)
    assert len(told) == 1
    assert cache.statistics().num_bad_blocks == 1
    assert cache.ensure(file, 1, 3, source.fetch) == {2}


def test_large_blocks_that_stand_together_are_read_in_one_piece_and_a_damaged_one_is_found(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    block, told = 512 << 10, []
    large = {
        "block_size_bytes": block,
        "max_fetch_bytes": 4 * block,
        "cell_bytes": 4 * block,
        "capacity_bytes": 256 * block,
    }

    def note(offset: int, data: memoryview) -> None:
        told.append((offset, bytes(data)))

    source = Source(6 * block + 7)
    first = make_cache(**large)
    first.ensure(first.open(source.key), 0, 6, source.fetch)
    first.close()
    cache = make_cache(**large)
    file = cache.open(source.key)
    assert cache.load(file, 0, 6, note)
    assert told == [(0, source.data)]
    (path,) = tmp_path.glob("blocks/*.cache")
    at = path.read_bytes().index(source.data[2 * block : 3 * block])
    with path.open("r+b") as opened:
        opened.seek(at + 5)
        opened.write(b"nonsense")
    assert not cache.load(file, 0, 6, note)
    assert len(told) == 1
    assert cache.statistics().num_bad_blocks == 1
    assert cache.ensure(file, 0, 6, source.fetch) == {2}
    assert cache.load(file, 0, 6, note)
    assert told[1] == (0, source.data)


def test_another_version_shares_no_block(make_cache: MakeCache) -> None:
    cache, old, new = make_cache(), Source(BLOCK), Source(BLOCK)
    new.key = FileKey("f", "v2", BLOCK)
    assert cache.read(cache.open(old.key), 0, BLOCK, old.fetch) == old.data
    assert cache.read(cache.open(new.key), 0, BLOCK, new.fetch) == new.data
    assert cache.read(cache.open(old.key), 0, BLOCK, old.fetch) == old.data
    assert len(old.asked) == len(new.asked) == 1


def test_threads_that_want_one_block_share_one_fetch(make_cache: MakeCache) -> None:
    cache, source = make_cache(), Source(64 * BLOCK)
    file = cache.open(source.key)
    started, go = threading.Barrier(8), threading.Event()

    def slow(byte_range: ByteRange, buffer: memoryview) -> None:
        go.wait(10)
        source.fetch(byte_range, buffer)

    def read(number: int) -> bytes:
        started.wait(10)
        offset = number % 4 * BLOCK
        return bytes(cache.read(file, offset, 20 * BLOCK, slow))

    with ThreadPoolExecutor(8) as threads:
        results = [threads.submit(read, number) for number in range(8)]
        go.set()
        for number, result in enumerate(results):
            offset = number % 4 * BLOCK
            assert result.result() == source.data[offset : offset + 20 * BLOCK]
    assert sum(len(one) for one in source.asked) == 23 * BLOCK


def test_a_failed_fetch_is_everybodys_own_error_and_leaves_nothing(make_cache: MakeCache) -> None:
    cache, source = make_cache(), Source(4 * BLOCK)
    file = cache.open(source.key)

    def fail(byte_range: ByteRange, buffer: memoryview) -> None:
        buffer[:] = b"?" * len(buffer)
        raise PreconditionFailed("read", "f", "the file has changed")

    with pytest.raises(PreconditionFailed):
        cache.read(file, 0, BLOCK, fail)
    assert cache.statistics().cached_bytes == 0
    assert cache.read(file, 0, BLOCK, source.fetch) == source.data[:BLOCK]


def test_the_oldest_go_first_when_the_bound_is_reached(make_cache: MakeCache) -> None:
    cache = make_cache(capacity_bytes=64 * BLOCK)
    sources = [Source(16 * BLOCK) for _ in range(6)]
    files = []
    for number, source in enumerate(sources):
        source.key = FileKey(f"f{number}", "v", 16 * BLOCK)
        files.append(cache.open(source.key))
        cache.read(files[-1], 0, 16 * BLOCK, source.fetch)
        assert cache.flush()
        # The first is used again and again, so the others go in their order.
        assert cache.read(files[0], 0, 16 * BLOCK, sources[0].fetch) == sources[0].data
    assert cache.statistics().space_bytes == 64 * BLOCK
    assert sources[0].asked == [ByteRange(i * 4 * BLOCK, (i + 1) * 4 * BLOCK) for i in range(4)]
    kept = [cache.cached_bytes_of(file) // BLOCK for file in files]
    assert kept == [16, 0, 0, 16, 16, 16]
    assert cache.read(files[1], 0, 16 * BLOCK, sources[1].fetch) == sources[1].data


def test_space_on_disk_stays_within_the_bound(make_cache: MakeCache, tmp_path: Path) -> None:
    cache, source = make_cache(capacity_bytes=64 * BLOCK), Source(256 * BLOCK)
    file = cache.open(source.key)
    for offset in range(0, len(source.data), BLOCK):
        assert cache.read(file, offset, BLOCK, source.fetch) == source.data[offset : offset + BLOCK]
    assert cache.flush()
    (path,) = tmp_path.glob("blocks/*.cache")
    table = Geometry.for_capacity(64 * BLOCK, BLOCK).table_bytes
    assert path.stat().st_blocks * 512 <= table + 64 * BLOCK
    statistics = cache.statistics()
    assert statistics.cached_bytes <= statistics.space_bytes <= statistics.limit_bytes == 64 * BLOCK
    assert statistics.evicted_bytes >= 256 * BLOCK - 64 * BLOCK


def test_readers_never_see_what_eviction_leaves(make_cache: MakeCache) -> None:
    # So little memory that nearly all is read from disk.
    cache = make_cache(capacity_bytes=24 * BLOCK, memory=MemoryBudget(16 * BLOCK))
    sources = [Source(32 * BLOCK) for _ in range(4)]
    for number, source in enumerate(sources):
        source.key = FileKey(f"f{number}", "v", 32 * BLOCK)
    wrong: list[int] = []

    def read(number: int) -> None:
        source = sources[number % 4]
        file = cache.open(source.key)
        for step in range(60):
            offset = (step * 7 + number) % 30 * BLOCK + 11
            data = cache.read_nowait(file, offset, BLOCK)
            if data is None:
                data = bytes(cache.read(file, offset, BLOCK, source.fetch))
                # Else all is lost: the readers are faster than any disk.
                assert cache.flush()
            if data != source.data[offset : offset + BLOCK]:
                wrong.append(offset)
        cache.release(file)

    with ThreadPoolExecutor(8) as threads:
        for result in [threads.submit(read, number) for number in range(8)]:
            result.result()
    assert wrong == []
    assert cache.flush()
    assert cache.statistics().cached_bytes <= 24 * BLOCK
    assert cache.statistics().evicted_bytes > 0


def test_a_disk_at_its_reserve_keeps_nothing_and_costs_no_reader_its_bytes(
    make_cache: MakeCache,
) -> None:
    cache, source = make_cache(free_disk_floor_bytes=1 << 60), Source(64 * BLOCK)
    file = cache.open(source.key)
    assert cache.read(file, 0, len(source.data), source.fetch) == source.data
    cache.ensure(file, 0, file.num_blocks - 1, source.fetch)
    assert cache.flush()
    assert cache.statistics().cached_bytes == 0
    assert cache.statistics().dropped_bytes >= len(source.data)
    assert not cache.free_space(1)


def test_files_of_an_earlier_mount_count_and_are_evicted_unopened(make_cache: MakeCache) -> None:
    old = Source(32 * BLOCK)
    first = make_cache()
    first.read(first.open(old.key), 0, 32 * BLOCK, old.fetch)
    first.close()
    second = make_cache(capacity_bytes=64 * BLOCK)
    assert second.statistics().cached_bytes == 32 * BLOCK
    new = Source(64 * BLOCK)
    new.key = FileKey("g", "v", 64 * BLOCK)
    assert second.read(second.open(new.key), 0, 64 * BLOCK, new.fetch) == new.data
    assert second.flush()
    assert second.statistics().space_bytes == 64 * BLOCK
    old.asked.clear()
    assert second.read(second.open(old.key), 0, BLOCK, old.fetch) == old.data[:BLOCK]
    assert len(old.asked) == 1


def test_rekeyed_blocks_are_those_of_the_new_name(make_cache: MakeCache) -> None:
    cache, source = make_cache(), Source(4 * BLOCK)
    cache.read(cache.open(source.key), 0, 4 * BLOCK, source.fetch)
    new_key = FileKey("g", "v9", 4 * BLOCK)
    cache.rekey(source.key, new_key)
    source.asked.clear()
    assert cache.read(cache.open(new_key), 0, 4 * BLOCK, source.fetch) == source.data
    assert source.asked == []
    assert cache.flush()
    cache.drop(new_key)
    assert cache.statistics().cached_bytes == 0


def refuse(_key: object, _num_blocks: int) -> bool:
    raise OSError(errno.ENOLCK, "no locks available")


@pytest.mark.parametrize("is_refused", [False, True])
def test_what_another_process_cannot_begin_or_bring_is_fetched_by_who_reads(
    make_cache: MakeCache, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    cache, source, shared = make_cache(), Source(BLOCK - 7), SharedMemory(8 * BLOCK)
    file = cache.open(source.key)
    if is_refused:
        assert cache._cells is not None
        monkeypatch.setattr(cache._cells, "try_claim", refuse)
        assert cache.begin_fetch(file, 0, 0, shared) is None
        monkeypatch.undo()
    else:
        held = cache.begin_fetch(file, 0, 0, shared)
        assert held is not None
        assert cache.begin_fetch(file, 0, 0, shared) is None
        cache.end_fetch(held, is_there=False)
    assert source.asked == []
    assert cache.read(file, 0, BLOCK - 7, source.fetch) == source.data
    assert source.asked == [ByteRange(0, BLOCK - 7)]
    assert shared.try_take(8 * BLOCK) is not None
