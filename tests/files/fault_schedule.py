"""Clients at random on a few paths, on a wire that breaks at random, and what may be seen of it.

Each content names the write that made it, and no two have the same size, so that whatever is read
can be judged: it must be one whole version, of a write that began before the read ended and that no
acknowledged later one had replaced before the read began.
"""

from __future__ import annotations

import io
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf
from time import monotonic
from typing import Final

from tests.files.conftest import OPTIONS, ROOT, TOKEN
from tests.files.fault_table import BODIES, JSON, PRESIGNED, STORES, fault_named
from tests.files.faulty_wire import FaultyWire, Rule

from trainmount_files import ByteRange, InexactRange, NotFound, PreconditionFailed, Unavailable
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.retry import RetryPolicy
from trainmount_files.transfer import open_writer, upload_stream

__all__ = ["Schedule"]

PATHS: Final = ("a/one", "a/two", "three")

BREAKS: Final = {
    "reset": None,
    "hang-up": None,
    "hang-up-in-head": None,
    "lost-reply": None,
    "garbage-when-done": None,
    "early-hints": None,
    "503": None,
    "500-done": None,
    "cut-0": BODIES | JSON,
    "cut-third": BODIES,
    "cut-undated": BODIES,
    "shifted": BODIES,
    "ignored-range": BODIES,
    "gzip": BODIES,
    "html-instead": JSON,
    "expired-azure": PRESIGNED,
    "upload-cut-middle": STORES,
}


@dataclass
class _Write:
    """A write or, with no content, a delete."""

    began: float
    ended: float = inf
    """When it was acknowledged; never where that is in doubt."""
    had_no_effect: bool = False


@dataclass
class _History:
    """What was done to one path; guarded by the schedule's lock."""

    writes: dict[int, _Write] = field(default_factory=dict)
    """Number of the write -> write; deletes too. 0 is the absence before everything."""
    deletes: set[int] = field(default_factory=set)


class Schedule:
    """One run. `problems` says what was seen and must not have been."""

    def __init__(self, wire: FaultyWire, seed: int) -> None:
        self._wire = wire
        self._seed = seed
        self._lock = threading.Lock()
        # All guarded by the lock.
        self._last = 0
        self._paths = {path: _History({0: _Write(-inf, -inf)}, {0}) for path in PATHS}
        self.problems: list[str] = []
        self.num_reads = 0
        self.num_writes = 0
        self.num_failures = 0

    def run(self, num_clients: int, num_steps: int, probability: float) -> None:
        rules = [
            Rule(
                fault_named(name).deed,
                routes=routes,
                probability=probability,
                cut_upload=fault_named(name).cut_upload,
            )
            for name, routes in BREAKS.items()
        ]
        self._wire.set(*rules)
        threads = [
            threading.Thread(target=self._client, args=(number, num_steps), name=f"client-{number}")
            for number in range(num_clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._wire.set()
        self._converge()

    def _open(self) -> FilesApiVolume:
        options = replace(
            OPTIONS,
            multipart_threshold_bytes=16 << 10,
            retry=RetryPolicy(
                deadline_seconds=2, first_delay_seconds=0.005, max_delay_seconds=0.05
            ),
        )
        return FilesApiVolume(ROOT, Credentials(host=self._wire.url, token=TOKEN), options)

    def _client(self, number: int, num_steps: int) -> None:
        chance = random.Random(self._seed * 1000 + number)
        volume = self._open()
        for _ in range(num_steps):
            path = chance.choice(PATHS)
            try:
                self._step(volume, path, chance)
            except Exception as error:
                with self._lock:
                    self.problems.append(f"client {number}, {path}: {error!r}")
        volume.close()

    def _step(self, volume: FilesApiVolume, path: str, chance: random.Random) -> None:
        what = chance.random()
        if what < 0.5:
            self._read(volume, path)
        elif what < 0.6:
            self._write(path, lambda _: volume.delete(path), is_delete=True)
        elif what < 0.75:
            self._write(path, lambda data: volume.put(path, data))
        elif what < 0.85:
            self._write(path, lambda data: upload_stream(volume, path, io.BytesIO(data)))
        else:

            def in_parts(data: bytes) -> None:
                with open_writer(volume, path, part_bytes=9_000, parallelism=2) as writer:
                    writer.write(data)

            self._write(path, in_parts)

    def _write(
        self, path: str, write: Callable[[bytes], object], *, is_delete: bool = False
    ) -> None:
        with self._lock:
            self._last += 1
            number = self._last
            record = self._paths[path].writes[number] = _Write(monotonic())
            if is_delete:
                self._paths[path].deletes.add(number)
        try:
            write(_content(number))
        except NotFound:
            if not is_delete:
                # Stored, and deleted by another client before its version could be asked for.
                return
            record.had_no_effect = True
        except Unavailable:
            with self._lock:
                self.num_failures += 1
        else:
            with self._lock:
                self.num_writes += 1
                record.ended = monotonic()

    def _read(self, volume: FilesApiVolume, path: str) -> None:
        began = monotonic()
        number: int | None = None
        try:
            found = volume.stat(path)
            data = bytearray(found.size_bytes)
            half = found.size_bytes // 2
            for piece in (ByteRange(0, half), ByteRange(half, found.size_bytes)):
                view = memoryview(data)[piece.start : piece.end]
                volume.read_into(path, piece, view, version=found.version)
            number = int.from_bytes(data[:8], "big")
            if data != _content(number):
                raise AssertionError(f"{len(data)} bytes that nobody has written")
        except NotFound:
            pass
        except (InexactRange, PreconditionFailed, Unavailable):
            # Replaced between the pieces, or too many faults in a row, of which three may be other
            # ranges than the one that was asked for: an error, not wrong bytes.
            return
        with self._lock:
            self.num_reads += 1
            problem = self._judge(self._paths[path], number, began)
            if problem:
                self.problems.append(f"{path}: {problem}")

    def _judge(self, history: _History, number: int | None, began: float) -> str:
        """What is wrong with having seen write `number`, or nothing at all."""
        if number is not None:
            if number not in history.writes or number in history.deletes:
                return f"write {number} is none of this path"
            return self._replaced(history, number, began)
        reasons = [
            self._replaced(history, delete, began)
            for delete in history.deletes
            if not history.writes[delete].had_no_effect
        ]
        return "" if "" in reasons else "the file is missing"

    def _replaced(self, history: _History, number: int, began: float) -> str:
        seen = history.writes[number]
        for other, write in history.writes.items():
            if write.began > seen.ended and write.ended < began:
                return f"write {number} was seen after {other} had replaced it"
        return ""

    def _converge(self) -> None:
        """With the faults gone, everything works and shows the last acknowledged state."""
        volume = self._open()
        for path in PATHS:
            self._read(volume, path)
            self._write(path, lambda data, path=path: volume.put(path, data))  # type: ignore[misc]
            self._read(volume, path)
        volume.close()


def _content(number: int) -> bytes:
    """The bytes of write `number`; each has another size, some are small, some take parts."""
    size = (200 if number % 3 == 0 else 30_000) + number
    return number.to_bytes(8, "big") + random.Random(number).randbytes(size - 8)
