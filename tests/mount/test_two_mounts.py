"""Two mounts of one volume: what a program sees is what close-to-open promises.

Programs on both write, replace and read the same files at random, and log. Afterwards each read is
judged: it saw one whole version, of a write that began before the read ended, and that no write had
replaced which was over before the read's open began.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import pytest
from tests.mount.two_mounts_worker import NAMES, WORD_BYTES

PROGRAMS_A_MOUNT = 2
NUM_OPERATIONS = int(os.environ.get("TRAINMOUNT_HISTORY_OPERATIONS", "400"))
"""In CI a share; a long run has 20,000."""


@dataclass(frozen=True)
class Write:
    version: int
    length: int
    began: float
    ended: float
    """When it was acknowledged; never for one that failed, which may or may not have happened."""


def problem_of_read(record: dict[str, Any], writes: dict[int, Write]) -> str:
    """ "" if the read can be explained."""
    seen, began = record["seen"], record.get("open_began", record["began"])
    if seen["length"] == 0 and seen["size"] == 0:
        # Where O_TRUNC and close are two requests of a file, the empty one is a version too.
        return "an empty file, which nobody made"
    if len(seen["runs"]) != 1:
        return "parts of several versions"
    version = seen["runs"][0][0]
    write = writes.get(version)
    if write is None:
        return "a version that nobody wrote"
    if not seen["length"] == seen["size"] == write.length:
        return f"a version that is {write.length} bytes long, cut or grown"
    if write.began > record["ended"]:
        return "a version from the future"
    later = [one for one in writes.values() if one.began > write.ended and one.ended < began]
    return "a version that another had replaced before" if later else ""


def judge(records: list[dict[str, Any]]) -> list[str]:
    """What no order of the writes explains."""
    problems = []
    for name in NAMES:
        mine = [one for one in records if one["name"] == name]
        writes = {
            one["version"]: Write(
                one["version"],
                one["length"],
                one["began"],
                inf if "error" in one else one["ended"],
            )
            for one in mine
            if one["what"] == "write"
        }
        for record in mine:
            if "seen" in record and (problem := problem_of_read(record, writes)):
                problems.append(f"{record}: {problem}")
            allowed = {"read_held": {"ESTALE"}, "write": {"ESTALE"}, "read": set(), "hold": set()}
            if record.get("error", "ESTALE") not in allowed.get(record["what"], set()) | {"ESTALE"}:
                problems.append(f"{record}: an error that nothing explains")
    return problems


class Pair:
    """Mounts `a` and `b`, and the directory behind both."""

    def __init__(self, mounts: list[Any], volume: Path, folder: Path, lengths: str) -> None:
        """`lengths` as two_mounts_worker.py takes it."""
        self.mounts = mounts
        self.volume = volume
        self._folder = folder
        self._lengths = lengths
        self._logs: list[Path] = []

    def run(self, num_operations: int) -> list[dict[str, Any]]:
        programs = []
        for mount in self.mounts:
            locks = mount.folder / "locks"
            locks.mkdir(exist_ok=True)
            for _ in range(PROGRAMS_A_MOUNT):
                number = len(programs)
                log = self._folder / f"history-{number}"
                self._logs.append(log)
                program = str(Path(__file__).with_name("two_mounts_worker.py"))
                arguments = [mount.mountpoint, locks, log, number, number, self._lengths]
                programs.append(
                    subprocess.Popen(
                        [sys.executable, program, *map(str, arguments)], stdin=subprocess.PIPE
                    )
                )
        while self._num_done() < num_operations:
            assert [one.poll() for one in programs] == [None] * len(programs)
            threading.Event().wait(0.05)
        for one in programs:
            one.communicate()
            assert one.returncode == 0
        return [json.loads(line) for log in self._logs for line in log.read_text().splitlines()]

    def _num_done(self) -> int:
        return sum(log.read_bytes().count(b"\n") for log in self._logs if log.exists())


@pytest.fixture(params=["files-api", "directory"])
def pair(request: Any, start_mount: Callable[..., Any], files_server: Any, tmp_path: Path) -> Pair:
    # Versions of the Files API are lengths and whole seconds: two writes of one second that are of
    # equal length cannot be told apart while a program here has the file open.
    source, environment, lengths = files_server.source, files_server.environment(), "unique"
    if request.param == "directory":
        source, environment, lengths = files_server.volume.as_uri(), {}, "equal"
    mounts = [start_mount(source, name=name, environment=environment) for name in ("a", "b")]
    return Pair(mounts, files_server.volume, tmp_path, lengths)


def _content(version: int, length: int) -> bytes:
    return struct.pack("<Q", version) * (length // WORD_BYTES)


@pytest.mark.timeout(300 + NUM_OPERATIONS)
@pytest.mark.quotes(
    "**Closed is stored.** What `close` or `fsync` has acknowledged is in the store, and no later "
    "`open` gives an older version.",
    "No read mixes two versions.",
)
def test_every_read_of_two_mounts_is_of_one_whole_version_that_was_not_replaced(pair: Pair) -> None:
    for name in NAMES:
        (pair.volume / name).write_bytes(_content(1, 4096))
    records = pair.run(NUM_OPERATIONS)
    first = {"what": "write", "version": 1, "length": 4096, "began": -1, "ended": -1}
    print(Counter((one["what"], one.get("error", "")) for one in records))
    problems = judge([first | {"name": name} for name in NAMES] + records)
    assert problems == [], Counter(one.rpartition(": ")[2] for one in problems)
    for name in NAMES:
        stored = (pair.volume / name).read_bytes()
        assert [(mount.mountpoint / name).read_bytes() == stored for mount in pair.mounts] == [
            True,
            True,
        ]


def test_new_bytes_of_equal_length_are_seen_by_the_next_open_on_the_other_mount(pair: Pair) -> None:
    a, b = (mount.mountpoint / "f" for mount in pair.mounts)
    for number in range(30):
        a.write_bytes(_content(number, 4096))
        assert b.read_bytes() == _content(number, 4096), number


def test_two_that_overwrite_at_once_leave_one_of_both_whole(pair: Pair) -> None:
    versions = [_content(1, 3_000_000), _content(2, 5_600_000)]
    for _ in range(3):
        start = threading.Barrier(2)

        def write(mount: Any, content: bytes, start: threading.Barrier = start) -> None:
            with (mount.mountpoint / "f").open("wb", buffering=0) as file:
                for offset in range(0, len(content), 1 << 20):
                    file.write(content[offset : offset + (1 << 20)])
                start.wait()

        threads = [
            threading.Thread(target=write, args=pair_of)
            for pair_of in zip(pair.mounts, versions, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stored = (pair.volume / "f").read_bytes()
        assert stored in versions
        assert [(mount.mountpoint / "f").read_bytes() == stored for mount in pair.mounts] == [
            True,
            True,
        ]
