"""Daemons that die at any point of the write path: before or after any change of the journal and
any request to the store, parts that are sent ahead among them.

A dead daemon changes nothing any more; its successor gets the request again that nobody answered.
What was acknowledged by fsync or close is in the store, and the store never shows anything but the
whole content of one such moment.
"""

from __future__ import annotations

import errno
import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis.strategies as st
import pytest
import trio
from hypothesis import HealthCheck, given, settings

from trainmount_fuse.attributes import ROOT_INO, AttributeChanges
from trainmount_fuse.writes.journal import Journal

PART = 4096

size = st.sampled_from([1, 700, PART, 2 * PART + 1, 4 * PART])
operation = st.one_of(
    st.tuples(st.just("append"), size),
    st.tuples(st.just("append"), size),
    st.tuples(st.just("append"), size),
    st.tuples(st.just("overwrite"), st.integers(0, 6 * PART), size),
    st.tuples(st.just("truncate"), st.sampled_from([0, 1, PART, 3 * PART, 20 * PART])),
    st.tuples(st.just("fsync")),
    st.tuples(st.just("reopen")),
    st.tuples(st.just("rename")),
    st.tuples(st.just("settle")),
)
deaths = st.lists(st.integers(0, 14), max_size=4)


class _Killed(Exception):
    """The process is gone; nothing of it may act on the world after this."""


@dataclass
class Life:
    """One daemon. Dies when it comes to its `points`-th point; None for never."""

    points: int | None
    is_dead: bool = False

    def pass_point(self) -> None:
        if self.points is not None:
            self.points -= 1
            if self.points < 0:
                self.is_dead = True
        if self.is_dead:
            raise _Killed


@dataclass
class Program:
    """Writes one file through mounts that die, and knows what it should hold."""

    world: Any
    node: Any
    deaths: list[int]
    life: Life = field(default_factory=lambda: Life(None))
    content: bytearray = field(default_factory=bytearray)
    name: str = "f"
    fh: int = 0
    count: int = 0
    acknowledged: bytes | None = None
    sent_states: set[bytes] = field(default_factory=set)
    """Whole contents that were ever to be uploaded."""

    def begin_life(self) -> None:
        self.life = Life(self.deaths.pop(0) if self.deaths else None)
        journal_life, watched = self.life, type(self.node.volume)(self.world.remote)
        watched.part_bytes = PART
        watched.fault = watched.after = lambda _operation, _path: journal_life.pass_point()
        watched.begun = self.node.volume.begun
        self.node.volume = watched
        _Lives.current = self.life

    async def successor(self) -> None:
        while self.life.is_dead:
            self.begin_life()
            try:
                await self.node.crash()
            except _Killed:
                continue

    async def answered(self, request: Any) -> Any:
        """What the kernel does: the request comes again until a daemon lives to answer it."""
        while True:
            await self.successor()
            try:
                result = await request()
            except _Killed:
                continue
            return result

    async def ino(self) -> int:
        found = await self.answered(lambda: self.node.fs.lookup(ROOT_INO, self.name.encode()))
        return int(found.ino)

    async def append(self, num_bytes: int) -> None:
        await self.overwrite(len(self.content), num_bytes)

    async def overwrite(self, offset: int, num_bytes: int) -> None:
        self.count += 1
        data = bytes([self.count % 255 + 1]) * num_bytes
        fh = self.fh
        assert await self.answered(lambda: self.node.fs.write(fh, offset, data)) == num_bytes
        self.content.extend(bytes(max(0, offset + num_bytes - len(self.content))))
        self.content[offset : offset + num_bytes] = data

    async def truncate(self, num_bytes: int) -> None:
        ino, fh = await self.ino(), self.fh
        changes = AttributeChanges(size=num_bytes)
        await self.answered(lambda: self.node.fs.setattr(ino, changes, fh))
        self.content = bytearray(bytes(self.content)[:num_bytes].ljust(num_bytes, b"\0"))

    async def fsync(self) -> None:
        self.sent_states.add(bytes(self.content))
        await self.answered(lambda: self.node.fs.fsync(self.fh, False))
        self.acknowledged = bytes(self.content)
        assert self.world.remote_files() == {self.name: self.acknowledged}

    async def reopen(self) -> None:
        await self.close()
        while not await self._opened():
            pass

    async def _opened(self) -> bool:
        """As the kernel: where the answer is ESTALE, which each daemon may give once, look the name
        up again.
        """
        ino = await self.ino()
        try:
            opened = await self.answered(lambda: self.node.fs.open(ino, os.O_RDWR))
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return False
        self.fh = opened.fh
        return True

    async def close(self) -> None:
        self.sent_states.add(bytes(self.content))
        await self.answered(lambda: self.node.fs.flush(self.fh))
        self.acknowledged = bytes(self.content)
        assert self.world.remote_files() == {self.name: self.acknowledged}
        await self.answered(lambda: self.node.fs.release(self.fh))

    async def rename(self) -> None:
        old, new = self.name.encode(), b"g" if self.name == "f" else b"f"
        await self.answered(lambda: self.node.fs.rename(ROOT_INO, old, ROOT_INO, new, 0))
        self.name = new.decode()

    async def settle(self) -> None:
        """Let threads come to their points."""
        await trio.sleep(0.002)

    def check_store(self) -> None:
        seen = self.world.remote_files()
        assert set(seen) <= {"f", "g"}
        for content in seen.values():
            assert content in self.sent_states
        if self.acknowledged is not None:
            assert len(seen) == 1


class _Lives:
    """Which daemon a journal that is opened now belongs to."""

    current = Life(None)


def _watched_execute(real: Any) -> Any:
    def execute(self: Any, *arguments: Any, **options: Any) -> Any:
        life: Life = self.__dict__.setdefault("life", _Lives.current)
        life.pass_point()
        result = real(self, *arguments, **options)
        life.pass_point()
        return result

    return execute


async def _run(world_type: Any, root: Path, operations: list[Any], deaths: list[int]) -> None:
    _Lives.current = Life(None)
    world = world_type(root)
    node = await world.node(part_bytes=PART, stream_from_bytes=2 * PART)
    program = Program(world, node, list(deaths))
    program.fh = await node.open("f", os.O_CREAT | os.O_RDWR)
    program.life.is_dead = True
    for name, *arguments in operations:
        await getattr(program, name)(*arguments)
        program.check_store()
    assert await program.answered(lambda: node.read_handle(program.fh)) == bytes(program.content)
    await program.close()
    program.deaths.clear()
    program.life.is_dead = True
    await program.successor()
    await node.settled(lambda: node.staging_files() == [], "nothing is staged any more")
    await node.fs.stop()
    assert world.remote_files() == {program.name: bytes(program.content)}
    assert [one.token for one in Journal(node.settings.state_dir / "journal.db").uploads()] == []


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(operations=st.lists(operation, min_size=1, max_size=12), deaths=deaths)
@pytest.mark.quotes(
    "**Whole.** A path has the old file, no file or the whole new one, in the store and for every "
    "node, whoever dies.",
)
def test_deaths_at_any_point_lose_nothing_acknowledged_and_show_nothing_partial(
    world: Any, operations: list[Any], deaths: list[int]
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=world.tmp_path) as root,
        mock.patch.object(Journal, "_execute", _watched_execute(Journal._execute)),
    ):
        trio.run(partial(_run, type(world), Path(root), operations, deaths))


def test_a_renamed_file_is_still_open_where_the_daemon_died_after_the_store_had_renamed_it(
    world: Any,
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=world.tmp_path) as root,
        mock.patch.object(Journal, "_execute", _watched_execute(Journal._execute)),
    ):
        operations = [("reopen",), ("rename",), ("append", 1)]
        for point in range(15):
            folder = Path(root) / str(point)
            folder.mkdir()
            trio.run(partial(_run, type(world), folder, operations, [point]))


async def _lose_name(world_type: Any, root: Path, operation: str, point: int) -> None:
    _Lives.current = Life(None)
    world = world_type(root)
    node = await world.node(part_bytes=PART, stream_from_bytes=2 * PART)
    await node.write("new", b"new")
    program = Program(world, node, [])
    program.fh = await node.open("f", os.O_CREAT | os.O_RDWR)
    program.life.is_dead = True
    await program.append(700)
    program.life.points = point
    requests = {
        "unlink": lambda: node.fs.unlink(ROOT_INO, b"f"),
        "rename": lambda: node.fs.rename(ROOT_INO, b"new", ROOT_INO, b"f", 0),
    }
    await program.answered(requests[operation])
    assert await program.answered(lambda: node.read_handle(program.fh)) == bytes(program.content)
    await program.answered(lambda: node.fs.flush(program.fh))
    await program.answered(lambda: node.fs.release(program.fh))
    program.life.is_dead = True
    await program.successor()
    await node.settled(lambda: node.staging_files() == [], "nothing is staged any more")
    await node.fs.stop()
    assert world.remote_files() == {"new" if operation == "unlink" else "f": b"new"}


@pytest.mark.parametrize("operation", ["unlink", "rename"])
def test_unsent_bytes_of_an_open_file_that_lost_its_name_stay_its_own_wherever_the_daemon_died(
    world: Any, operation: str
) -> None:
    with (
        tempfile.TemporaryDirectory(dir=world.tmp_path) as root,
        mock.patch.object(Journal, "_execute", _watched_execute(Journal._execute)),
    ):
        for point in range(12):
            folder = Path(root) / str(point)
            folder.mkdir()
            trio.run(partial(_lose_name, type(world), folder, operation, point))
