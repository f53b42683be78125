"""A small stand-in for the kernel over a `Filesystem`, on a real directory volume, with faults and
counters.

Tests written as `async def` run under trio. `world.node(...)` is a mount on one node; nodes of one
world share the volume and nothing else.
"""

from __future__ import annotations

import errno
import inspect
import os
import threading
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import trio

from trainmount_files.directory import DirectoryVolume
from trainmount_files.errors import VolumeError
from trainmount_files.volume import Buffer, ByteRange, Capabilities, FileStat, Page, Upload
from trainmount_fuse.attributes import ROOT_INO, AttributeChanges, Attributes
from trainmount_fuse.errno import errno_of, errno_of_transfer
from trainmount_fuse.filesystem import Filesystem
from trainmount_fuse.settings import MountSettings

KIB = 1 << 10


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    function = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    names = inspect.signature(function).parameters
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def main() -> None:
        with trio.fail_after(120):
            await function(**arguments)

    trio.run(main)
    return True


class WatchedVolume:
    """A directory volume that counts calls, and fails where a test says so."""

    def __init__(self, root: Path) -> None:
        self.inner = DirectoryVolume(root)
        self.calls: Counter[str] = Counter()
        self.fetched_ranges: list[ByteRange] = []
        self.fault: Callable[[str, str], None] | None = None
        """Called with the operation and the path before each call; raises to make it fail."""
        self.after: Callable[[str, str], None] | None = None
        """The same after each call that worked."""
        self.part_bytes: int | None = None
        """With a size, the store takes parts of it as they come, and joins them by their names."""

        self.begun: set[int] = set()
        """Uploads in parts that have not ended, by their tokens."""
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        if self.part_bytes is None:
            return self.inner.capabilities
        return replace(self.inner.capabilities, part_bytes=self.part_bytes, copies_parts=False)

    def stat(self, path: str) -> FileStat:
        return self._call("stat", path, lambda: self.inner.stat(path))

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        return self._call("list", path, lambda: self.inner.list_page(path, page_token))

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        def read() -> None:
            self.inner.read_into(path, byte_range, buffer, version=version, cancel=cancel)

        self._call("read", path, read)
        with self._lock:
            self.fetched_ranges.append(byte_range)

    def put(self, path: str, data: Buffer, *, overwrite: bool = True) -> FileStat:
        return self._call("upload", path, lambda: self.inner.put(path, data, overwrite=overwrite))

    def upload(
        self,
        path: str,
        source: BinaryIO,
        size_bytes: int,
        *,
        overwrite: bool = True,
        cancel: threading.Event | None = None,
    ) -> FileStat:
        def upload() -> FileStat:
            return self.inner.upload(path, source, size_bytes, overwrite=overwrite, cancel=cancel)

        return self._call("upload", path, upload)

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        def start() -> Upload:
            inner = self.inner.start_upload(path, overwrite=overwrite, cancel=cancel)
            return WatchedUpload(self, path, inner)

        return self._call("start", path, start)

    def token_of(self, upload: WatchedUpload) -> str:
        return str(id(upload))

    def abandon_upload(self, path: str, token: str) -> bool:
        def abandon() -> bool:
            self.begun.discard(int(token))
            return True

        return self._call("abandon", path, abandon)

    def delete(self, path: str) -> None:
        self._call("delete", path, lambda: self.inner.delete(path))

    def rename(self, source: str, destination: str) -> FileStat:
        return self._call("rename", source, lambda: self.inner.rename(source, destination))

    def make_directory(self, path: str) -> None:
        self._call("make_directory", path, lambda: self.inner.make_directory(path))

    def remove_directory(self, path: str) -> None:
        self._call("remove_directory", path, lambda: self.inner.remove_directory(path))

    def close(self) -> None:
        self.inner.close()

    def _call(self, operation: str, path: str, function: Callable[[], Any]) -> Any:
        with self._lock:
            self.calls[operation] += 1
        if self.fault is not None:
            self.fault(operation, path)
        result = function()
        if self.after is not None:
            self.after(operation, path)
        return result


class WatchedUpload:
    """A file in parts; each call is counted and may be made to fail as those of the volume."""

    def __init__(self, volume: WatchedVolume, path: str, inner: Upload) -> None:
        self._volume = volume
        self._path = path
        self._inner = inner
        volume.begun.add(id(self))

    def put_part(self, part_number: int, data: Buffer) -> None:
        def put() -> None:
            self._inner.put_part(part_number, data)

        self._volume._call("part", self._path, put)

    def complete(self) -> FileStat:
        stat = self._volume._call("complete", self._path, self._inner.complete)
        self._volume.begun.discard(id(self))
        return stat

    def abort(self) -> None:
        self._volume.begun.discard(id(self))
        self._inner.abort()


class Node:
    """Programs on one node, as the kernel would pass their calls on."""

    def __init__(self, volume: WatchedVolume, settings: MountSettings) -> None:
        self.volume = volume
        self.settings = settings
        self.fs = Filesystem(volume, settings)
        self._num_mounts = 0

    async def crash(self) -> None:
        """The daemon is killed and a successor takes over; handles stay open."""
        self.fs = Filesystem(self.volume, self.settings)
        await self.fs.start()

    async def remount(self, **changes: Any) -> None:
        """The daemon and the mount are gone; the same mount is made anew."""
        self._num_mounts += 1
        mount_id = f"mount-{self._num_mounts}"
        self.settings = replace(self.settings, mount_id=mount_id, **changes)
        await self.crash()

    async def stat(self, path: str) -> Attributes:
        attributes = await self.fs.getattr(ROOT_INO)
        for name in path.split("/"):
            attributes = await self.fs.lookup(attributes.ino, name.encode())
            if attributes.ino == 0:
                raise FileNotFoundError(errno.ENOENT, path)
        return attributes

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except FileNotFoundError:
            return False
        return True

    async def open(self, path: str, flags: int = os.O_RDONLY, mode: int = 0o644) -> int:
        for attempt in (1, 2):
            try:
                attributes = await self.stat(path)
            except FileNotFoundError:
                if not flags & os.O_CREAT:
                    raise
                parent, name = await self.parent(path)
                return (await self.fs.create(parent, name, mode, flags))[0].fh
            if flags & os.O_CREAT and flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, path)
            try:
                return (await self.fs.open(attributes.ino, flags)).fh
            except OSError as error:
                # The kernel looks the name up again, once.
                if error.errno != errno.ESTALE or attempt == 2:
                    raise
        raise AssertionError

    async def close(self, fh: int) -> None:
        try:
            await self.fs.flush(fh)
        finally:
            await self.fs.release(fh)

    async def read_handle(self, fh: int, chunk: int = 64 * KIB) -> bytes:
        data = bytearray()
        while piece := await self.fs.read(fh, len(data), chunk):
            data += piece
        return bytes(data)

    async def read(self, path: str) -> bytes:
        fh = await self.open(path)
        try:
            return await self.read_handle(fh)
        finally:
            await self.close(fh)

    async def write(self, path: str, data: bytes, flags: int = os.O_CREAT | os.O_TRUNC) -> None:
        fh = await self.open(path, flags | os.O_WRONLY)
        try:
            for start in range(0, len(data), 128 * KIB):
                await self.fs.write(fh, start, data[start : start + 128 * KIB])
        finally:
            await self.close(fh)

    async def append(self, path: str, data: bytes) -> None:
        fh = await self.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        # The kernel appends at the size it knows.
        size = (await self.stat(path)).size
        await self.fs.write(fh, size, data)
        await self.close(fh)

    async def entries(self, path: str = "") -> dict[str, Attributes]:
        ino = (await self.stat(path)).ino if path else ROOT_INO
        fh = await self.fs.opendir(ino)
        found: dict[str, Attributes] = {}
        start = 0
        while True:
            # The kernel's buffer takes some entries at a time.
            page = list(islice(await self.fs.readdir(fh, start), 7))
            if not page:
                break
            for entry in page:
                if entry.name not in (b".", b".."):
                    assert entry.name.decode() not in found
                    found[entry.name.decode()] = entry.attributes
            start = page[-1].next_id
        await self.fs.releasedir(fh)
        return found

    async def parent(self, path: str) -> tuple[int, bytes]:
        directory, _, name = path.rpartition("/")
        ino = (await self.stat(directory)).ino if directory else ROOT_INO
        return ino, name.encode()

    # As in the kernel, a name is looked up before it is made or removed.

    async def mkdir(self, path: str) -> None:
        if await self.exists(path):
            raise FileExistsError(errno.EEXIST, path)
        await self.fs.mkdir(*await self.parent(path), 0o755)

    async def rmdir(self, path: str) -> None:
        await self.stat(path)
        await self.fs.rmdir(*await self.parent(path))

    async def unlink(self, path: str) -> None:
        await self.stat(path)
        await self.fs.unlink(*await self.parent(path))

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        await self.stat(old)
        await self.fs.rename(*await self.parent(old), *await self.parent(new), flags)

    async def truncate(self, path: str, size: int) -> None:
        await self.fs.setattr((await self.stat(path)).ino, AttributeChanges(size=size))

    def staging_files(self) -> list[str]:
        return sorted(path.name for path in (self.settings.state_dir / "staging").iterdir())

    async def settled(self, is_true: Callable[[], bool], what: str) -> None:
        """Wait until background work has made it true."""
        with trio.move_on_after(30):
            while not is_true():
                await trio.sleep(0.01)
            return
        raise AssertionError(f"never happened: {what}")


class World:
    """One volume in a directory, and its nodes."""

    errno_of = staticmethod(errno_of)
    errno_of_transfer = staticmethod(errno_of_transfer)
    KIB = KIB

    def __init__(self, tmp_path: Path) -> None:
        self.tmp_path = tmp_path
        self.remote = tmp_path / "volume"
        self.remote.mkdir()
        self.nodes: list[Node] = []

    async def node(self, name: str = "a", *, part_bytes: int | None = None, **changes: Any) -> Node:
        """With `part_bytes`, the store takes parts of that size while a file is written."""
        values: dict[str, Any] = {
            "source": self.remote.as_uri(),
            "cache_dir": self.tmp_path / name / "cache",
            "state_dir": self.tmp_path / name / "state",
            "mount_id": "mount-0",
            "block_size_bytes": 4 * KIB,
            "prefetch_fetch_bytes": 32 * KIB,
            "cache_size_bytes": 64 * 1024 * KIB,
            "free_disk_floor_bytes": 0,
            "num_prefetch_threads": 2,
            "num_worker_threads": 8,
        }
        volume = WatchedVolume(self.remote)
        volume.part_bytes = part_bytes
        node = Node(volume, MountSettings(**(values | changes)))
        await node.fs.start()
        self.nodes.append(node)
        return node

    def remote_files(self) -> dict[str, bytes]:
        """What the store has, without its own hidden files."""
        found: dict[str, bytes] = {}
        for path in sorted(self.remote.rglob("*")):
            relative = path.relative_to(self.remote)
            if path.is_file() and not relative.parts[0].startswith("."):
                found[str(relative)] = path.read_bytes()
        return found

    async def errno_from(self, awaitable: Any, *, transfer: bool = False) -> int:
        """The number that a program would see; 0 for none."""
        try:
            await awaitable
        except (OSError, VolumeError) as error:
            return errno_of_transfer(error) if transfer else errno_of(error)
        return 0


@pytest.fixture
def world(tmp_path: Path) -> Generator[World, None, None]:
    made = World(tmp_path)
    yield made
    for node in made.nodes:
        node.volume.close()
