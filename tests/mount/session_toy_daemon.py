"""A daemon over a file system that needs no store, for the tests of the session. A supervisor's
child runs it.

The root has one file `f` whose every 8-byte word is its own offset, and `slow`, the same with late
answers. `fault`: `none`; `start` ends before it answers; `read` ends when somebody reads; `hang`
stands still when somebody reads, `hang-idle` when a file was closed and nobody waits.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import trio

from trainmount_fuse.attributes import Attributes, DirEntry, OpenFile, StatFs
from trainmount_fuse.session.daemon import run_daemon

SIZE = 1 << 30
NAMES = {b"f": 2, b"slow": 3}


class ToyFilesystem:
    """The calls of `Filesystem` that reading takes."""

    is_read_only = False

    def __init__(self, fault: str, configuration: dict[str, Any]) -> None:
        self._fault = fault
        # Only the first daemon hangs.
        self._hung = os.environ.get("TOY_HUNG", "")
        self._stamp = configuration.get("environment", {}).get("STAMP", "")

    async def start(self) -> None:
        if self._fault == "start":
            os._exit(3)

    async def stop(self) -> None:
        return

    def give_up_reads(self) -> None:
        pass

    async def ask_store(self) -> None:
        return

    async def lookup(self, parent_ino: int, name: bytes) -> Attributes:
        if name == b"stamp-" + self._stamp.encode():
            return await self.getattr(4, None)
        if name not in NAMES:
            raise OSError(errno.ENOENT, "no such file")
        return await self.getattr(NAMES[name], None)

    async def forget(self, inodes: list[tuple[int, int]]) -> None:
        return

    async def getattr(self, ino: int, fh: int | None) -> Attributes:
        if ino == 1:
            return Attributes(1, mode=stat.S_IFDIR | 0o755)
        return Attributes(ino, mode=stat.S_IFREG | 0o444, size=SIZE)

    async def open(self, ino: int, flags: int) -> OpenFile:
        return OpenFile(fh=ino, direct_io=True)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        if self._fault == "read":
            os._exit(4)
        if self._fault == "hang":
            self._stand_still()
        # So that a kill finds requests in flight.
        await trio.sleep(0.3 if fh == 3 else 0.005)
        end = min(offset + size, SIZE)
        return b"".join(struct.pack("<Q", word) for word in range(offset, end, 8))

    async def flush(self, fh: int) -> None:
        return

    async def release(self, fh: int) -> None:
        if self._fault == "hang-idle":
            self._stand_still()

    async def opendir(self, ino: int) -> int:
        return ino

    async def readdir(self, fh: int, start_id: int) -> Iterable[DirEntry]:
        entries = [
            DirEntry(name, await self.getattr(ino, None), number)
            for number, (name, ino) in enumerate(NAMES.items(), 1)
        ]
        return entries[start_id:]

    async def releasedir(self, fh: int) -> None:
        return

    def _stand_still(self) -> None:
        if not Path(self._hung).exists():
            Path(self._hung).touch()
            while True:
                time.sleep(1)

    async def statfs(self) -> StatFs:
        return StatFs(4096, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 255)

    async def getxattr(self, ino: int, name: bytes) -> bytes:
        raise OSError(errno.ENODATA, "no such attribute")


def serve_toy(fault: str, control_fd: int) -> int:
    """What a supervisor's child runs."""
    return run_daemon(control_fd, lambda configuration: ToyFilesystem(fault, configuration))
