"""Random schedules of operations, kills and remounts, compared with a dictionary of paths.

The model is POSIX on one node: what a program sees through the mount equals it after every step,
whatever has been killed; what the store has equals it once all handles are closed.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import trio
from hypothesis import HealthCheck, given, settings

from trainmount_files.errors import VolumeError

PATHS = ["a", "b", "d", "d/x", "d/y", "d/s", "d/s/z", "e"]
path = st.sampled_from(PATHS)
data = st.binary(max_size=40) | st.integers(0, 255).map(lambda value: bytes([value]) * 9000)
offset = st.integers(0, 50) | st.sampled_from([4096, 8191])
slot = st.integers(0, 2)

operation = st.one_of(
    st.tuples(st.just("write"), path, data),
    st.tuples(st.just("append"), path, data),
    st.tuples(st.just("truncate"), path, offset),
    st.tuples(st.just("mkdir"), path),
    st.tuples(st.just("mkdir"), st.sampled_from(["d", "d/s"])),
    st.tuples(st.just("rmdir"), path),
    st.tuples(st.just("unlink"), path),
    st.tuples(st.just("rename"), path, path),
    st.tuples(st.just("open"), slot, path, st.sampled_from([os.O_RDONLY, os.O_RDWR])),
    st.tuples(st.just("create"), slot, path),
    st.tuples(st.just("write_handle"), slot, offset, data),
    st.tuples(st.just("read_handle"), slot),
    st.tuples(st.just("flush_handle"), slot),
    st.tuples(st.just("close_handle"), slot),
    st.tuples(st.just("crash")),
    st.tuples(st.just("crash")),
    st.tuples(st.just("remount")),
)


@dataclass(eq=False)
class File:
    content: bytes = b""


@dataclass(eq=False)
class Open:
    file: File
    fh: int
    writable: bool


@dataclass
class Model:
    """None is a directory."""

    tree: dict[str, File | None] = field(default_factory=dict)

    def parent_ok(self, name: str) -> bool:
        parent = name.rpartition("/")[0]
        return not parent or (parent in self.tree and self.tree[parent] is None)

    def is_file(self, name: str) -> bool:
        return self.parent_ok(name) and self.tree.get(name) is not None

    def is_directory(self, name: str) -> bool:
        return name in self.tree and self.tree[name] is None

    def below(self, name: str) -> list[str]:
        return [one for one in self.tree if one.startswith(f"{name}/")]

    def can_write(self, name: str) -> bool:
        return self.parent_ok(name) and not self.is_directory(name)

    def can_rename(self, old: str, new: str) -> bool:
        if old not in self.tree or not self.parent_ok(new):
            return False
        if old == new:
            return True
        if new.startswith(f"{old}/"):
            return False
        if new not in self.tree:
            return True
        if self.is_directory(old) != self.is_directory(new):
            return False
        return not self.below(new)

    def rename(self, old: str, new: str) -> None:
        moved = {old: new} | {one: new + one[len(old) :] for one in self.below(old)}
        kept = {name: file for name, file in self.tree.items() if name != new or old == new}
        self.tree = {moved.get(name, name): file for name, file in kept.items()}

    def contents(self) -> dict[str, bytes | None]:
        return {name: None if file is None else file.content for name, file in self.tree.items()}


class Machine:
    """Applies each operation to the mount and to the model."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.model = Model()
        self.slots: dict[int, Open] = {}

    async def step(self, name: str, *arguments: Any) -> None:
        await getattr(self, name)(*arguments)

    async def attempt(self, should_work: bool, awaitable: Any) -> Any:
        try:
            result = await awaitable
        except Exception as error:
            if should_work or not isinstance(error, OSError | VolumeError):
                raise
            return None
        assert should_work, "the mount did what cannot be done"
        return result

    async def write(self, name: str, content: bytes) -> None:
        works = self.model.can_write(name)
        await self.attempt(works, self.node.write(name, content))
        if works:
            self._file(name).content = content

    async def append(self, name: str, content: bytes) -> None:
        works = self.model.can_write(name)
        await self.attempt(works, self.node.append(name, content))
        if works:
            self._file(name).content += content

    async def truncate(self, name: str, size: int) -> None:
        works = self.model.is_file(name)
        await self.attempt(works, self.node.truncate(name, size))
        if works:
            file = self._file(name)
            file.content = file.content[:size].ljust(size, b"\0")

    async def mkdir(self, name: str) -> None:
        works = self.model.parent_ok(name) and name not in self.model.tree
        await self.attempt(works, self.node.mkdir(name))
        if works:
            self.model.tree[name] = None

    async def rmdir(self, name: str) -> None:
        works = self.model.is_directory(name) and not self.model.below(name)
        await self.attempt(works, self.node.rmdir(name))
        if works:
            del self.model.tree[name]

    async def unlink(self, name: str) -> None:
        works = self.model.is_file(name)
        await self.attempt(works, self.node.unlink(name))
        if works:
            del self.model.tree[name]

    async def rename(self, old: str, new: str) -> None:
        works = self.model.can_rename(old, new)
        await self.attempt(works, self.node.rename(old, new))
        if works:
            self.model.rename(old, new)

    async def open(self, number: int, name: str, flags: int) -> None:
        if number in self.slots:
            return
        works = self.model.is_file(name)
        fh = await self.attempt(works, self.node.open(name, flags))
        if works:
            self.slots[number] = Open(self._file(name), fh, flags != os.O_RDONLY)

    async def create(self, number: int, name: str) -> None:
        if number in self.slots:
            return
        works = self.model.parent_ok(name) and name not in self.model.tree
        fh = await self.attempt(works, self.node.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR))
        if works:
            self.slots[number] = Open(self._file(name), fh, True)

    async def write_handle(self, number: int, start: int, content: bytes) -> None:
        held = self.slots.get(number)
        if held is None or not held.writable or not content:
            return
        assert await self.node.fs.write(held.fh, start, content) == len(content)
        old = held.file.content.ljust(start, b"\0")
        held.file.content = old[:start] + content + old[start + len(content) :]

    async def read_handle(self, number: int) -> None:
        if number in self.slots:
            held = self.slots[number]
            assert await self.node.read_handle(held.fh) == held.file.content

    async def flush_handle(self, number: int) -> None:
        if number in self.slots:
            await self.node.fs.flush(self.slots[number].fh)

    async def close_handle(self, number: int) -> None:
        if number in self.slots:
            await self.node.close(self.slots.pop(number).fh)

    async def crash(self) -> None:
        await self.node.crash()

    async def remount(self) -> None:
        await self.node.remount()
        self.slots.clear()

    async def check(self) -> None:
        assert await self._seen("") == self.model.contents()

    async def finish(self, world: Any) -> None:
        for number in list(self.slots):
            await self.close_handle(number)
        await self.check()
        expected = {name: one for name, one in self.model.contents().items() if one is not None}
        await self.node.settled(lambda: self.node.staging_files() == [], "all is uploaded")
        assert world.remote_files() == expected

    def _file(self, name: str) -> File:
        file = self.model.tree.setdefault(name, File())
        assert file is not None
        return file

    async def _seen(self, directory: str) -> dict[str, bytes | None]:
        seen: dict[str, bytes | None] = {}
        for name, attributes in (await self.node.entries(directory)).items():
            full = f"{directory}/{name}" if directory else name
            if attributes.is_directory:
                seen[full] = None
                seen |= await self._seen(full)
            else:
                seen[full] = await self.node.read(full)
                assert (await self.node.stat(full)).size == len(seen[full] or b"")
        return seen


async def _run(make_world: Any, operations: list[tuple[Any, ...]], root: Path) -> None:
    world = make_world(root)
    machine = Machine(await world.node())
    try:
        for one in operations:
            await machine.step(*one)
            await machine.check()
        await machine.finish(world)
    finally:
        await machine.node.fs.stop()


@settings(
    max_examples=700,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(operations=st.lists(operation, max_size=40))
def test_the_mount_equals_a_dictionary_of_paths_through_kills_and_remounts(
    world: Any, operations: list[tuple[Any, ...]]
) -> None:
    with tempfile.TemporaryDirectory(dir=world.tmp_path) as root:
        trio.run(partial(_run, type(world), operations, Path(root)))
