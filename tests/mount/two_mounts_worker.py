"""Writes, replaces and reads a few files of one mount until told to stop, and logs each operation.

    two_mounts_worker.py ROOT LOCKS LOG NUMBER SEED LENGTHS

Run by test_two_mounts.py, several times a mount. A file's content is one version number, repeated;
versions are NUMBER plus a multiple of 1,000, so no two are the same. Programs of one mount take
turns at a file by flock on LOCKS/NAME, as they would on one disk; programs of two mounts know
nothing of each other. LOG gets one JSON object an operation, with times of the machine's monotonic
clock in nanoseconds. With LENGTHS "unique" no two versions are of equal length.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("one", "two")
WORD_BYTES = 8
LENGTHS = (8, 8, 8, 4096, 4096, 300_000, 2_000_000)
"""Equal ones often, since versions of equal length are the hard ones."""


class Program:
    def __init__(self, root: Path, locks: Path, number: int, seed: int, *, is_unique: bool) -> None:
        self._root = root
        self._locks = locks
        self._random = random.Random(seed)
        self._next_version = 1000 + number
        self._number = number
        self._is_unique = is_unique
        self._held: tuple[str, int, dict[str, Any]] | None = None

    def step(self) -> dict[str, Any]:
        name = self._random.choice(NAMES)
        what = self._random.choices(
            (self.read, self.overwrite, self.replace, self.hold, self.read_held), (8, 3, 2, 1, 2)
        )[0]
        with self._turn(name, shared=what in (self.read, self.hold, self.read_held)):
            record: dict[str, Any] = {"name": name, "began": time.monotonic_ns()}
            try:
                record |= what(name)
            except OSError as error:
                record |= {"what": what.__name__, "error": errno.errorcode[error.errno or 0]}
            record["ended"] = time.monotonic_ns()
        return record

    def read(self, name: str) -> dict[str, Any]:
        fd = os.open(self._root / name, os.O_RDONLY)
        opened = time.monotonic_ns()
        try:
            return {"what": "read", "opened": opened, "seen": self._seen(fd)}
        finally:
            os.close(fd)

    def overwrite(self, name: str) -> dict[str, Any]:
        version, length = self._new_version()
        try:
            fd = os.open(self._root / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self._write(fd, version, length)
            finally:
                os.close(fd)
        except OSError as error:
            return self._failed("write", version, length, error)
        return {"what": "write", "version": version, "length": length}

    def replace(self, name: str) -> dict[str, Any]:
        """A file beside it, renamed over it."""
        version, length = self._new_version()
        part = self._root / f"{name}.{self._number}.part"
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self._write(fd, version, length)
            finally:
                os.close(fd)
            part.rename(self._root / name)
        except OSError as error:
            return self._failed("write", version, length, error)
        return {"what": "write", "version": version, "length": length}

    def hold(self, name: str) -> dict[str, Any]:
        """Open a file for `read_held`."""
        if self._held is not None:
            os.close(self._held[1])
            self._held = None
        began = time.monotonic_ns()
        fd = os.open(self._root / name, os.O_RDONLY)
        self._held = (name, fd, {"open_began": began})
        return {"what": "hold"}

    def read_held(self, name: str) -> dict[str, Any]:
        if self._held is None or self._held[0] != name:
            return {"what": "nothing"}
        _, fd, times = self._held
        return {"what": "read_held", "seen": self._seen(fd), **times}

    def _seen(self, fd: int) -> dict[str, Any]:
        """Every version in the file with the number of its words, in order; and fstat's size."""
        size = os.fstat(fd).st_size
        data = bytearray()
        while piece := os.pread(fd, 1 << 20, len(data)):
            data += piece
        runs: list[list[int]] = []
        for (word,) in struct.iter_unpack("<Q", data[: len(data) // WORD_BYTES * WORD_BYTES]):
            if runs and runs[-1][0] == word:
                runs[-1][1] += 1
            else:
                runs.append([word, 1])
        return {"length": len(data), "size": size, "runs": runs[:5]}

    def _write(self, fd: int, version: int, length: int) -> None:
        data = memoryview(struct.pack("<Q", version) * (length // WORD_BYTES))
        while data:
            data = data[os.write(fd, data[: 1 << 17]) :]

    def _new_version(self) -> tuple[int, int]:
        self._next_version += 1000
        length = self._random.choice(LENGTHS)
        if self._is_unique:
            length += WORD_BYTES * self._next_version
        return self._next_version, length

    def _failed(self, what: str, version: int, length: int, error: OSError) -> dict[str, Any]:
        name = errno.errorcode[error.errno or 0]
        return {"what": what, "version": version, "length": length, "error": name}

    @contextmanager
    def _turn(self, name: str, *, shared: bool) -> Iterator[None]:
        with (self._locks / name).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield


def main() -> int:
    root, locks, log_path, number, seed, lengths = sys.argv[1:]
    is_unique = lengths == "unique"
    program = Program(Path(root), Path(locks), int(number), int(seed), is_unique=is_unique)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    with Path(log_path).open("w") as log:
        while not ended.is_set():
            log.write(json.dumps(program.step()) + "\n")
            log.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
