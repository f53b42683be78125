"""Reading through a filesystem: what is fetched, how often, and what a silent store holds up."""

from __future__ import annotations

import errno
import os
import random
import threading
from typing import Any

import trio

from trainmount_files.errors import Unavailable

KIB = 1 << 10


async def test_readers_that_share_a_handle_fetch_each_byte_once(world: Any) -> None:
    """Four processes read a quarter each, interleaved, through one descriptor."""
    node = await world.node()
    data = os.urandom(1024 * KIB)
    (world.remote / "file").write_bytes(data)
    fh = await node.open("file")
    parts: list[bytearray] = [bytearray() for _reader in range(4)]
    for step in range(0, 256 * KIB, 16 * KIB):
        for reader, part in enumerate(parts):
            part += await node.fs.read(fh, reader * 256 * KIB + step, 16 * KIB)
    await node.close(fh)
    assert b"".join(parts) == data
    assert sum(len(one) for one in node.volume.fetched_ranges) == len(data)


async def test_a_handle_never_mixes_the_versions_of_a_file(world: Any) -> None:
    node = await world.node()
    old, new = os.urandom(1024 * KIB), os.urandom(1024 * KIB)
    (world.remote / "file").write_bytes(old)
    fh = await node.open("file")
    assert await node.fs.read(fh, 0, 64 * KIB) == old[: 64 * KIB]
    (world.remote / "new").write_bytes(new)
    (world.remote / "new").replace(world.remote / "file")
    outcomes: set[int | None] = set()
    for offset in range(0, len(old), 64 * KIB):
        try:
            assert await node.fs.read(fh, offset, 64 * KIB) == old[offset : offset + 64 * KIB]
            outcomes.add(0)
        except OSError as error:
            outcomes.add(error.errno)
    assert outcomes == {0, errno.ESTALE}
    assert await node.read("file") == new
    await node.close(fh)


async def test_files_that_are_read_in_order_are_fetched_before_they_are_opened(world: Any) -> None:
    node = await world.node()
    contents = {f"{number:03}": os.urandom(8 * KIB) for number in range(40)}
    for name, content in contents.items():
        (world.remote / name).write_bytes(content)
    await node.entries()
    for name in list(contents)[:20]:
        assert await node.read(name) == contents[name]
    await node.settled(lambda: node.volume.calls["read"] > 25, "files ahead are fetched")
    for name in list(contents)[20:]:
        assert await node.read(name) == contents[name]
    assert sum(len(one) for one in node.volume.fetched_ranges) == 40 * 8 * KIB
    figures = node.fs.core.prefetcher.statistics()
    assert figures.used_bytes == figures.prefetched_bytes >= 30 * 8 * KIB
    assert figures.wasted_bytes == 0


async def test_files_that_are_read_at_random_have_hardly_any_others_fetched(world: Any) -> None:
    node = await world.node()
    for number in range(1000):
        (world.remote / f"{number:04}").write_bytes(number.to_bytes(2, "little") * 100)
    await node.entries()
    chosen = random.Random(7).sample(range(1000), 60)
    for number in chosen:
        assert await node.read(f"{number:04}") == number.to_bytes(2, "little") * 100
    core = node.fs.core
    await node.settled(lambda: core.prefetcher.statistics().num_queued == 0, "nothing is fetched")
    assert node.volume.calls["read"] <= 60 + 30


async def test_who_reads_much_of_a_directory_in_no_order_finds_the_rest_fetched(world: Any) -> None:
    node = await world.node()
    contents = {f"{number:03}": os.urandom(8 * KIB) for number in range(400)}
    for name, content in contents.items():
        (world.remote / name).write_bytes(content)
    await node.entries()
    order = random.Random(7).sample(list(contents), 400)
    for name in order[:100]:
        assert await node.read(name) == contents[name]
    core = node.fs.core
    await node.settled(lambda: core.prefetcher.statistics().num_queued == 0, "nothing is fetched")
    # Twice as many as were read, and a window of those that came next by chance.
    assert 150 < node.volume.calls["read"] <= 3 * 100 + 64
    for name in order[100:]:
        assert await node.read(name) == contents[name]
    assert sum(len(one) for one in node.volume.fetched_ranges) == 400 * 8 * KIB
    figures = core.prefetcher.statistics()
    assert figures.used_bytes >= 200 * 8 * KIB
    # Some were given up as next ones, before all were wanted.
    assert figures.used_bytes + figures.wasted_bytes == figures.prefetched_bytes


async def test_a_file_comes_while_its_name_is_asked_for_where_others_are_read(world: Any) -> None:
    node = await world.node()
    contents = {f"{number:03}": os.urandom(8 * KIB) for number in range(200)}
    for name, content in contents.items():
        (world.remote / name).write_bytes(content)
    await node.entries()
    for name in ("020", "060", "100", "140"):
        assert await node.read(name) == contents[name]
    before = node.volume.calls["read"]
    for name in ("180", "181"):
        await node.stat(name)
    await node.settled(lambda: node.volume.calls["read"] == before + 2, "both are fetched")
    assert await node.read("180") == contents["180"]
    assert node.volume.calls["read"] == before + 2


async def test_a_silent_store_holds_up_neither_names_nor_bytes_that_are_here(world: Any) -> None:
    node = await world.node(num_worker_threads=2)
    (world.remote / "here").write_bytes(b"h" * 8 * KIB)
    (world.remote / "other").write_bytes(b"o" * 8 * KIB)
    for number in range(32):
        (world.remote / f"silent-{number}").write_bytes(b"s" * 64 * KIB)
    assert await node.read("here") == b"h" * 8 * KIB
    speaks = threading.Event()

    def fault(operation: str, path: str) -> None:
        if operation == "read" and path.startswith("silent"):
            speaks.wait()

    node.volume.fault = fault
    read: list[bytes] = []

    async def read_silent(number: int) -> None:
        read.append(await node.read(f"silent-{number}"))

    async with trio.open_nursery() as nursery:
        for number in range(32):
            nursery.start_soon(read_silent, number)
        await node.settled(lambda: node.volume.calls["read"] >= 32, "all wait for the store")
        assert await node.read("here") == b"h" * 8 * KIB
        assert await node.read("other") == b"o" * 8 * KIB
        assert len(await node.entries()) == 34
        await node.fs.statfs()
        assert read == []
        speaks.set()
    assert read == [b"s" * 64 * KIB] * 32


async def test_the_kernels_second_try_after_a_long_failure_fails_at_once(world: Any) -> None:
    """Without that, a program would wait for the store's deadline twice."""
    node = await world.node(prefetch_max_bytes=0)
    (world.remote / "file").write_bytes(b"f" * 64 * KIB)
    fh = await node.open("file")
    moment = threading.Event()

    def fault(operation: str, path: str) -> None:
        if operation == "read":
            moment.wait(1.1)
            raise Unavailable("read", path, "503")

    node.volume.fault = fault
    assert await world.errno_from(node.fs.read(fh, 0, 32 * KIB), transfer=True) == errno.EIO
    num_asked = node.volume.calls["read"]
    assert await world.errno_from(node.fs.read(fh, 4 * KIB, 4 * KIB), transfer=True) == errno.EIO
    assert node.volume.calls["read"] == num_asked
    node.volume.fault = None
    assert await node.fs.read(fh, 32 * KIB, 32 * KIB) == b"f" * 32 * KIB
    await node.close(fh)


async def test_nothing_is_put_into_the_pages_of_a_file_that_somebody_may_write(world: Any) -> None:
    pushed: list[int] = []
    node = await world.node()
    await node.fs.stop()
    (world.remote / "file").write_bytes(os.urandom(1024 * KIB))
    node.fs = type(node.fs)(node.volume, node.settings, lambda _i, at, _data: pushed.append(at))
    await node.fs.start()
    writer = await node.open("file", os.O_RDWR)
    reader = await node.open("file")
    await node.read_handle(reader)
    assert pushed == []
    await node.close(writer)
    again = await node.open("file")
    await node.read_handle(again)
    await node.settled(lambda: bool(pushed), "a file without a writer has its pages filled")
    await node.close(reader)
    await node.close(again)
