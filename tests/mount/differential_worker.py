"""Does each operation it is told twice, on a mount and on a tmpfs, and tells what both said.

    differential_worker.py MOUNT_ROOT TMPFS_ROOT

Reads one JSON list a line, `[operation, argument, ...]`, and writes one JSON object a line with
what `Program` saw in the first root ("mount") and in the second ("tmpfs"). Run by
test_differential.py, twice at a time: two programs on one machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import mmap
import os
import random
import stat
import sys
import time
from pathlib import Path
from typing import Any

RENAME_NOREPLACE = 1
AT_FDCWD = -100
_libc = ctypes.CDLL(None, use_errno=True)


def content(seed: int, size: int) -> bytes:
    """Bytes that no two seeds share."""
    return random.Random(seed).randbytes(size)


def digest(data: bytes) -> list[Any]:
    return [len(data), hashlib.sha256(data).hexdigest()[:16]]


class Program:
    """One program's descriptors in one root; each public method is one operation."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._slots: dict[int, int] = {}

    def run(self, operation: str, *arguments: Any) -> dict[str, Any]:
        """The result or the error's name, and what is seen of the path and the slot afterwards."""
        began_ns = time.time_ns()
        try:
            result = ["ok", getattr(self, f"do_{operation}")(*arguments)]
        except OSError as error:
            result = ["error", errno.errorcode.get(error.errno or 0, repr(error))]
        except (ValueError, KeyError) as error:
            result = ["refused", type(error).__name__]
        paths = [one for one in arguments if isinstance(one, str)]
        slots = [one for one in arguments[:1] if type(one) is int]
        return {
            "result": result,
            "paths": {path: self._status(self._path(path)) for path in paths},
            "slots": {one: self._status(self._slots[one]) for one in slots if one in self._slots},
            "times": [began_ns, time.time_ns()],
        }

    def do_open(self, slot: int, path: str, flags: int, mode: int) -> None:
        if slot in self._slots:
            raise KeyError(slot)
        self._slots[slot] = os.open(self._path(path), flags, mode)

    def do_close(self, slot: int) -> None:
        os.close(self._slots.pop(slot))

    def do_dup(self, slot: int, into: int) -> None:
        if into in self._slots:
            raise KeyError(into)
        self._slots[into] = os.dup(self._slots[slot])

    def do_read(self, slot: int, size: int) -> list[Any]:
        return digest(os.read(self._slots[slot], size))

    def do_pread(self, slot: int, offset: int, size: int) -> list[Any]:
        return digest(os.pread(self._slots[slot], size, offset))

    def do_write(self, slot: int, seed: int, size: int) -> int:
        return os.write(self._slots[slot], content(seed, size))

    def do_pwrite(self, slot: int, offset: int, seed: int, size: int) -> int:
        return os.pwrite(self._slots[slot], content(seed, size), offset)

    def do_seek(self, slot: int, offset: int, whence: int) -> int:
        if stat.S_ISDIR(os.fstat(self._slots[slot]).st_mode):
            raise ValueError("what a position in a directory means is each filesystem's affair")
        return os.lseek(self._slots[slot], offset, whence)

    def do_ftruncate(self, slot: int, size: int) -> None:
        was = os.fstat(self._slots[slot]).st_size
        os.ftruncate(self._slots[slot], size)
        if was == size:
            os.utime(self._slots[slot])

    def do_truncate(self, name: str, size: int) -> None:
        path = self._path(name)
        was = path.stat().st_size
        os.truncate(path, size)
        if was == size:
            os.utime(path)

    def do_fsync(self, slot: int) -> None:
        os.fsync(self._slots[slot])

    def do_fdatasync(self, slot: int) -> None:
        os.fdatasync(self._slots[slot])

    def do_forget_pages(self, slot: int) -> None:
        os.posix_fadvise(self._slots[slot], 0, 0, os.POSIX_FADV_DONTNEED)

    def do_copy_range(self, slot: int, into: int, size: int) -> int:
        return os.copy_file_range(self._slots[slot], self._slots[into], size)

    def do_flock(self, slot: int, kind: int) -> None:
        fcntl.flock(self._slots[slot], kind | fcntl.LOCK_NB)

    def do_lock_range(self, slot: int, kind: int, start: int, size: int) -> None:
        fcntl.lockf(self._slots[slot], kind | fcntl.LOCK_NB, size, start)

    def do_map_read(self, slot: int, offset: int, size: int) -> list[Any]:
        with self._mapped(slot, mmap.PROT_READ) as mapped:
            return digest(mapped[offset : offset + size])

    def do_map_write(self, slot: int, offset: int, seed: int, size: int, syncs: bool) -> None:
        with self._mapped(slot, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            self._put(mapped, offset, content(seed, size))
            if syncs:
                mapped.flush()

    def do_map_write_after_close(self, slot: int, offset: int, seed: int, size: int) -> None:
        with self._mapped(slot, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
            os.close(self._slots.pop(slot))
            self._put(mapped, offset, content(seed, size))

    def do_put(self, path: str, seed: int, size: int) -> None:
        """A whole file, as most programs write one."""
        with self._path(path).open("wb", buffering=0) as file:
            file.write(content(seed, size))

    def do_append(self, path: str, seed: int, size: int) -> None:
        with self._path(path).open("ab", buffering=0) as file:
            file.write(content(seed, size))

    def do_get(self, path: str) -> list[Any]:
        return digest(self._path(path).read_bytes())

    def do_rename(self, old: str, new: str) -> None:
        self._path(old).rename(self._path(new))

    def do_rename_noreplace(self, old: str, new: str) -> None:
        ends = [os.fsencode(self._path(one)) for one in (old, new)]
        if _libc.renameat2(AT_FDCWD, ends[0], AT_FDCWD, ends[1], RENAME_NOREPLACE):
            raise OSError(ctypes.get_errno(), old)

    def do_unlink(self, path: str) -> None:
        self._path(path).unlink()

    def do_mkdir(self, path: str, mode: int) -> None:
        self._path(path).mkdir(mode)

    def do_rmdir(self, path: str) -> None:
        self._path(path).rmdir()

    def do_list(self, path: str) -> list[Any]:
        with os.scandir(self._path(path)) as entries:
            return sorted([one.name, one.is_dir(follow_symlinks=False)] for one in entries)

    def do_stat(self, path: str) -> None:
        self._path(path).stat()

    def do_access(self, path: str, mode: int) -> bool:
        return os.access(self._path(path), mode)

    def do_chmod(self, path: str, mode: int) -> None:
        self._path(path).chmod(mode)

    def do_utime(self, path: str, seconds: int) -> None:
        os.utime(self._path(path), ns=(seconds * 10**9, seconds * 10**9 + 123_000_000))

    def do_tree(self) -> dict[str, Any]:
        """Everything below the root, with contents, and the bytes behind every descriptor."""
        seen: dict[str, Any] = {}
        for folder, folders, files in os.walk(self._root):
            for name in (*folders, *files):
                path = Path(folder, name)
                held = None if name in folders else digest(path.read_bytes())
                seen[str(path.relative_to(self._root))] = [self._status(path)[:4], held]
        for slot, fd in self._slots.items():
            with contextlib.suppress(OSError):
                seen[f"descriptor {slot}"] = digest(os.pread(fd, 1 << 24, 0))
        return seen

    def _path(self, name: str) -> Path:
        return self._root / name

    @contextlib.contextmanager
    def _mapped(self, slot: int, protection: int) -> Any:
        with mmap.mmap(self._slots[slot], 0, mmap.MAP_SHARED, protection) as mapped:
            yield mapped

    @staticmethod
    def _put(mapped: mmap.mmap, offset: int, data: bytes) -> None:
        data = data[: max(0, len(mapped) - offset)]
        mapped[offset : offset + len(data)] = data

    @staticmethod
    def _status(target: Path | int) -> list[Any]:
        """Type, permissions, size and links (of a file), time of change in ns, or the error."""
        try:
            status = os.fstat(target) if isinstance(target, int) else target.stat()
        except OSError as error:
            return [errno.errorcode[error.errno or 0]]
        is_file = stat.S_ISREG(status.st_mode)
        return [
            stat.filemode(status.st_mode),
            status.st_size if is_file else 0,
            status.st_nlink if is_file else 0,
            status.st_uid,
            status.st_mtime_ns if is_file else 0,
        ]


def main() -> int:
    os.umask(0o022)
    # The tmpfs first, so that a time of the mount is never before the one that it is compared with.
    programs = {"tmpfs": Program(Path(sys.argv[2])), "mount": Program(Path(sys.argv[1]))}
    for line in sys.stdin:
        operation = json.loads(line)
        seen = {name: program.run(*operation) for name, program in programs.items()}
        print(json.dumps(seen), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
