"""A filesystem whose small files are fetched by a process of its own, in a process that has no
thread when it forks: `fetch_program.py CASE SOURCE FOLDER` prints what it saw as JSON.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio
import trio.testing

from trainmount_files.directory import DirectoryVolume
from trainmount_files.volume import ByteRange
from trainmount_fuse.attributes import ROOT_INO
from trainmount_fuse.filesystem import Filesystem
from trainmount_fuse.reads import prefetch
from trainmount_fuse.reads.fetch_process import FetchProcess, fork_fetch_process
from trainmount_fuse.settings import MountSettings

HERE = os.getpid()


class Volume(DirectoryVolume):
    """Counts the reads of this process, and may hold up or refuse those of the other."""

    num_reads_here = 0
    is_silent = False

    def read_into(
        self, path: str, byte_range: ByteRange, buffer: bytearray | memoryview, **options: Any
    ) -> None:
        if os.getpid() == HERE:
            Volume.num_reads_here += 1
        elif self.is_silent:
            signal.pause()
        super().read_into(path, byte_range, buffer, **options)


class Reader:
    """One program that reads files of the root, as the kernel would pass its calls on."""

    def __init__(self, fs: Filesystem) -> None:
        self.fs = fs
        self.digests: dict[str, str] = {}

    async def names(self) -> list[str]:
        fh = await self.fs.opendir(ROOT_INO)
        found: list[str] = []
        start = 0
        while entries := list(await self.fs.readdir(fh, start)):
            found += [entry.name.decode() for entry in entries if not entry.name.startswith(b".")]
            start = entries[-1].next_id
        await self.fs.releasedir(fh)
        return sorted(found)

    async def read(self, name: str) -> None:
        found = await self.fs.lookup(ROOT_INO, name.encode())
        opened = await self.fs.open(found.ino, os.O_RDONLY)
        data = await self.fs.read(opened.fh, 0, found.size)
        self.digests[name] = hashlib.sha256(data).hexdigest()
        await self.fs.release(opened.fh)


async def reads_all(reader: Reader, process: FetchProcess) -> dict[str, Any]:
    for name in await reader.names():
        await reader.read(name)
    return {"is_ready": process.is_ready(for_guess=True)}


async def child_is_killed(reader: Reader, process: FetchProcess) -> dict[str, Any]:
    names = await reader.names()
    for number, name in enumerate(names):
        if number == 3:
            os.kill(process.pid, signal.SIGKILL)
        await reader.read(name)
    return {"is_ready": process.is_ready(for_guess=False)}


async def child_is_silent(reader: Reader, process: FetchProcess) -> dict[str, Any]:
    """A read waits for the process; the end of the mount does not."""
    name = (await reader.names())[0]
    errors: list[int | None] = []

    async def read() -> None:
        try:
            await reader.read(name)
        except OSError as error:
            errors.append(error.errno)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked(0.2)
        waited = not errors
        reader.fs.give_up_reads()
    return {"waited": waited, "errors": [errno.errorcode[code or 0] for code in errors]}


async def child_is_stopped(reader: Reader, process: FetchProcess) -> dict[str, Any]:
    """It never answers: after a while the daemon does without it."""
    prefetch._PATIENCE_SECONDS = 0.2  # type: ignore[misc]
    os.kill(process.pid, signal.SIGSTOP)
    return await reads_all(reader, process)


async def file_is_replaced(reader: Reader, process: FetchProcess) -> dict[str, Any]:
    """Between open and read: what the process is refused, the program hears as ESTALE."""
    names = await reader.names()
    found = await reader.fs.lookup(ROOT_INO, names[0].encode())
    opened = await reader.fs.open(found.ino, os.O_RDONLY)
    source = Path(sys.argv[2]) / names[0]
    source.unlink()
    source.write_bytes(b"other")
    try:
        data = await reader.fs.read(opened.fh, 0, found.size)
    except OSError as error:
        return {"error": errno.errorcode[error.errno or 0]}
    return {"data": len(data)}


CASES: dict[str, Callable[[Reader, FetchProcess], Awaitable[dict[str, Any]]]] = {
    case.__name__: case
    for case in (reads_all, child_is_killed, child_is_stopped, child_is_silent, file_is_replaced)
}


async def main(case: str, fs: Filesystem, process: FetchProcess) -> None:
    await fs.start()
    reader = Reader(fs)
    seen = await CASES[case](reader, process)
    seen |= {
        "digests": reader.digests,
        "num_reads_here": Volume.num_reads_here,
        "fetched_bytes": fs.cache_statistics().fetched_bytes,
    }
    await fs.stop()
    seen["is_all_put_back"] = process.memory.try_take(len(process.memory.view)) is not None
    with trio.fail_after(30):
        while Path(f"/proc/{process.pid}").exists():
            await trio.sleep(0.01)
    print(json.dumps(seen))


if __name__ == "__main__":
    case, source, folder = sys.argv[1:]
    volume = Volume(Path(source))
    volume.is_silent = case == "child_is_silent"
    settings = MountSettings(
        source=f"file://{source}",
        state_dir=Path(folder) / "state",
        cache_dir=Path(folder) / "cache",
        memory_bytes=32 << 20,
        free_disk_floor_bytes=0,
        entry_timeout_seconds=60,
        attr_timeout_seconds=60,
        open_timeout_seconds=60,
        directory_timeout_seconds=60,
    )
    process = fork_fetch_process(volume, settings.memory_bytes, ())
    assert process is not None
    trio.run(main, case, Filesystem(volume, settings, None, process), process)
