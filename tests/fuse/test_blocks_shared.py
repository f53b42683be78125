"""One cache directory used by several mounts: locks belong to open files, so that two caches in one
process stand for two processes; where death matters, there are real ones.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.fuse.block_sources import BLOCK, Source, content, open_cache, read_whole

from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.blocks import BlockCache
from trainmount_fuse.cache.range_locks import RangeLocks
from trainmount_fuse.cache.shared_cells import MUTEX
from trainmount_fuse.memory import MemoryBudget

MakeCache = Callable[..., BlockCache]


@pytest.fixture
def make_cache(tmp_path: Path) -> Iterator[MakeCache]:
    opened: list[BlockCache] = []

    def make(capacity_bytes: int = 64 * BLOCK, **changes: Any) -> BlockCache:
        opened.append(open_cache(tmp_path / "blocks", capacity_bytes, **changes))
        return opened[-1]

    yield make
    for cache in opened:
        cache.close()


def test_what_one_mount_fetched_the_other_does_not(make_cache: MakeCache) -> None:
    one, other, source = make_cache(), make_cache(), Source(1, 20)
    assert read_whole(one, source) == source.data()
    assert one.flush()
    source.asked_blocks.clear()
    assert read_whole(other, source) == source.data()
    assert source.asked_blocks == []
    assert other.statistics().num_hits == 1
    assert one.statistics().cached_bytes == other.statistics().cached_bytes == 20 * BLOCK


def test_a_process_that_holds_the_directory_and_does_not_end_costs_the_cache_and_not_the_mount(
    make_cache: MakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmount_fuse.cache.shared_cells._MADE_SECONDS", 0.05)
    directory = tmp_path / "blocks"
    directory.mkdir(0o700)
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    source = Source(1, 4)
    alone = make_cache()
    assert read_whole(alone, source) == source.data()
    assert alone.statistics().limit_bytes == 0
    os.close(descriptor)
    assert make_cache().statistics().limit_bytes > 0


def test_volumes_with_files_of_one_name_and_version_share_nothing(make_cache: MakeCache) -> None:
    one, other = make_cache(source="https://one/Volumes/a"), make_cache(source="https://two")
    source = Source(1, 4)
    read_whole(one, source)
    assert one.flush()
    source.asked_blocks.clear()
    assert read_whole(other, source) == source.data()
    assert source.asked_blocks == [0, 1, 2, 3]


def test_two_mounts_that_want_one_range_fetch_it_once(make_cache: MakeCache) -> None:
    one, other, source = make_cache(), make_cache(), Source(1, 4)
    has_begun, may_go_on = threading.Event(), threading.Event()

    def slow(byte_range: ByteRange, buffer: memoryview) -> None:
        has_begun.set()
        assert may_go_on.wait(20)
        source.fetch(byte_range, buffer)

    def never(byte_range: ByteRange, buffer: memoryview) -> None:
        raise AssertionError("the other mount fetches it")

    with ThreadPoolExecutor(2) as threads:
        size = source.key.size_bytes
        first = threads.submit(one.read, one.open(source.key), 0, size, slow)
        assert has_begun.wait(20)
        second = threads.submit(other.read, other.open(source.key), 0, size, never)
        may_go_on.set()
        assert first.result() == second.result() == source.data()


def test_the_directory_has_one_bound_the_largest_given(make_cache: MakeCache) -> None:
    large, small = make_cache(64 * BLOCK), make_cache(48 * BLOCK)
    for number in range(6):
        source = Source(number, 16)
        cache = (large, small)[number % 2]
        assert read_whole(cache, source) == source.data()
        assert cache.flush()
    assert small.statistics().limit_bytes == 64 * BLOCK
    assert small.statistics().space_bytes == large.statistics().space_bytes == 64 * BLOCK
    large.close()
    assert small.statistics().limit_bytes == 48 * BLOCK
    source = Source(9, 1)
    read_whole(small, source)
    assert small.flush()
    assert small.statistics().space_bytes <= 48 * BLOCK


def test_what_either_mount_used_last_stays(make_cache: MakeCache) -> None:
    one, other = make_cache(), make_cache()
    sources = [Source(number, 16) for number in range(6)]
    for source in sources:
        read_whole(one, source)
        assert one.flush()
        read_whole(other, sources[0])
    assert sources[0].asked_blocks == list(range(16))
    sources[1].asked_blocks.clear()
    read_whole(other, sources[1])
    assert sources[1].asked_blocks == list(range(16))


def test_a_mount_reads_right_what_the_other_throws_out(make_cache: MakeCache) -> None:
    """Each reads for itself and throws out for both, all the time."""
    little = {"capacity_bytes": 24 * BLOCK, "cell_bytes": BLOCK}
    caches = [make_cache(**little, memory=MemoryBudget(16 * BLOCK)) for _ in range(2)]
    sources = [Source(number, 24) for number in range(4)]
    wrong: list[tuple[int, int]] = []

    def read(worker: int) -> None:
        cache, source = caches[worker % 2], sources[worker // 2 % 4]
        file = cache.open(source.key)
        for step in range(80):
            block = (step * 7 + worker) % 24
            data = cache.read_nowait(file, block * BLOCK, BLOCK)
            if data is None:
                data = cache.read(file, block * BLOCK, BLOCK, source.fetch)
                assert cache.flush()
            if data != content(source.number, block):
                wrong.append((source.number, block))
        cache.release(file)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert wrong == []
    assert sum(cache.statistics().evicted_bytes for cache in caches) > 0
    assert sum(cache.statistics().num_bad_blocks for cache in caches) == 0


def test_a_reader_is_not_given_what_came_to_the_place_of_its_block(make_cache: MakeCache) -> None:
    """The block was checked before, its place has other bytes since."""
    one, other, source = make_cache(), make_cache(), Source(1, 64)
    read_whole(one, source)
    assert one.flush()
    file = one.open(source.key)
    # From the kernel's memory, twice: the second time without a check.
    assert one.read(file, 0, BLOCK, source.fetch) == content(1, 0)
    assert one.read_nowait(file, 0, BLOCK) == content(1, 0)
    later = Source(2, 64)
    read_whole(other, later)
    assert other.flush()
    assert one.read_nowait(file, 0, BLOCK) is None
    assert one.read(file, 0, BLOCK, source.fetch) == content(1, 0)
    assert one.statistics().num_bad_blocks == 0


def test_a_file_that_is_removed_serves_who_has_it_and_nobody_else(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    one, source = make_cache(), Source(1, 8)
    read_whole(one, source)
    assert one.flush()
    for path in (tmp_path / "blocks").iterdir():
        path.unlink()
    other = make_cache()
    newer = Source(2, 8)
    assert read_whole(other, newer) == newer.data()
    assert other.flush()
    assert other.statistics().cached_bytes == 8 * BLOCK
    source.asked_blocks.clear()
    assert read_whole(one, source) == source.data()
    assert source.asked_blocks == []


_CHILD = """
import sys
from pathlib import Path
from tests.fuse.block_sources import Source, open_cache, read_whole
cache = open_cache(Path(sys.argv[1]))
print("joined", flush=True)
number = int(sys.argv[2])
while True:
    for source in (Source(number, 24), Source(number + 1, 24), Source(1, 24)):
        assert read_whole(cache, source) == source.data(), source.number
"""


def _child(directory: Path, number: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _CHILD, str(directory), str(number)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert child.stdout is not None
    assert child.stdout.readline() == "joined\n"
    return child


def _kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(20)
    assert child.stdout is not None
    child.stdout.close()


def test_a_process_that_is_killed_at_any_moment_spoils_nothing_and_leaves_no_lock(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache = make_cache(memory=MemoryBudget(16 * BLOCK))
    children = [_child(tmp_path / "blocks", 10), _child(tmp_path / "blocks", 20)]
    sources = [Source(number, 24) for number in (1, 10, 11, 20, 21)]
    try:
        for round_number in range(6):
            victim = children[round_number % 2]
            # As long as our own reads take, the children write and throw out.
            for source in sources[round_number % 3 :]:
                assert read_whole(cache, source) == source.data()
            _kill(victim)
            for source in sources:
                assert read_whole(cache, source) == source.data()
            number = 10 * (1 + round_number % 2)
            children[round_number % 2] = _child(tmp_path / "blocks", number)
    finally:
        for child in children:
            _kill(child)
    statistics = cache.statistics()
    assert statistics.num_bad_blocks == 0
    assert statistics.space_bytes <= 64 * BLOCK
    # Nobody's cell is left: whoever joins has the whole bound for itself.
    cache.close()
    last, source = make_cache(), Source(99, 64)
    assert read_whole(last, source) == source.data()
    assert last.flush()
    assert last.statistics().cached_bytes == 64 * BLOCK


def test_a_stopped_process_that_changes_the_table_costs_the_others_the_cache_only(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache, source = make_cache(), Source(1, 4)
    (path,) = (tmp_path / "blocks").iterdir()
    with path.open("r+b") as stopped:
        assert RangeLocks(stopped.fileno()).try_lock(MUTEX)
        assert read_whole(cache, source) == source.data()
        assert cache.flush()
    assert cache.statistics().dropped_bytes == 4 * BLOCK
    assert read_whole(cache, source) == source.data()
    assert cache.flush()
    assert cache.statistics().cached_bytes == 4 * BLOCK


def test_a_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocks").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    cache, source = open_cache(tmp_path / "blocks"), Source(1, 4)
    assert read_whole(cache, source) == source.data()
    assert list((tmp_path / "blocks").iterdir()) == []
    cache.close()


def test_files_and_directory_are_the_users_own(make_cache: MakeCache, tmp_path: Path) -> None:
    make_cache()
    assert (tmp_path / "blocks").stat().st_mode & 0o777 == 0o700
    (path,) = (tmp_path / "blocks").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
