"""Writes, appends, renames and removes files in several threads, until standard input ends. Run by
the tests.

    session_writer.py FOLDER COUNTER

Prints, as JSON, what must be in FOLDER afterwards: {path: SHA-256 of the content, or null for a
directory}. COUNTER gets the number of finished rounds, 8 bytes, little-endian.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import sys
import threading
import traceback
from pathlib import Path

NUM_THREADS = 3


class Writer:
    """One thread's files, which nobody else touches."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder / f"writer-{number}"
        self._random = random.Random(number)
        self._round = 0
        self.expected: dict[str, str | None] = {}

    def start(self) -> None:
        self._folder.mkdir()
        self._expect(self._folder, None)

    def work(self) -> None:
        """One round: a new file in two writes with fsync between, an appended one, a rename, a
        removal."""
        self._round += 1
        path = self._folder / f"file-{self._round}"
        one, two = (self._random.randbytes(self._random.randrange(1, 60_000)) for _ in range(2))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        _write(file, one)
        os.fsync(file)
        _write(file, two)
        os.close(file)
        content = one + two
        if self._round % 2:
            with path.open("ab") as appended:
                appended.write(b"more")
            content += b"more"
        if self._round % 3 == 0:
            # Over an older file, as programs replace their files.
            target = self._folder / f"current-{self._round % 2}"
            path.rename(target)
            path = target
        self._expect(path, content)
        if self._round % 4 == 0:
            folder = self._folder / f"folder-{self._round}"
            folder.mkdir()
            self._expect(folder, None)
        if self._round % 5 == 0:
            gone = self._folder / f"gone-{self._round}"
            gone.write_bytes(b"x" * 100)
            gone.unlink()

    def _expect(self, path: Path, content: bytes | None) -> None:
        digest = None if content is None else hashlib.sha256(content).hexdigest()
        self.expected[str(path.relative_to(self._folder.parent))] = digest


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def main() -> int:
    folder, counter = Path(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY)
    writers = [Writer(folder, number) for number in range(NUM_THREADS)]
    done, lock, rounds = threading.Event(), threading.Lock(), [0]

    def run(writer: Writer) -> None:
        try:
            writer.start()
            while not done.is_set():
                writer.work()
                with lock:
                    rounds[0] += 1
                    os.pwrite(counter, struct.pack("<Q", rounds[0]), 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=run, args=(writer,)) for writer in writers]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    done.set()
    for thread in threads:
        thread.join()
    print(json.dumps({path: digest for one in writers for path, digest in one.expected.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
