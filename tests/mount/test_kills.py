"""The daemon is killed again and again while programs train, save and write: none of their system
calls fails, nothing that was acknowledged is lost, nothing is torn.

In CI some kills; all of them, with the longest time that any single call or round took:

    TRAINMOUNT_TEST_KILLS=50 pytest -s tests/mount/test_kills.py
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.mount.conftest import wait_until
from tests.mount.kills_worker import WORD_BYTES

NUM_KILLS = int(os.environ.get("TRAINMOUNT_TEST_KILLS", "3"))
"""Of each kind. A mount gives up after 60 deaths in ten minutes."""

pytestmark = pytest.mark.timeout(300 + 20 * NUM_KILLS)


class Work:
    """kills_worker.py at work."""

    def __init__(self, *arguments: object) -> None:
        program = str(Path(__file__).with_name("kills_worker.py"))
        self.process = subprocess.Popen(
            [sys.executable, program, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.num_rounds = 0
        self._last = ""
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def wait_for_more(self, more: int = 1) -> None:
        goal = self.num_rounds + more
        wait_until(
            lambda: self.num_rounds >= goal or self.process.poll() is not None, "another round"
        )
        assert self.process.poll() is None, "a system call failed or something was wrong"

    def finish(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.join()
        assert self.process.wait() == 0
        figures: dict[str, Any] = json.loads(self._last)
        return figures

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._last = line
            if line.strip().isdigit():
                self.num_rounds = int(line)


@pytest.fixture
def work() -> Iterator[Callable[..., Work]]:
    started: list[Work] = []

    def start(*arguments: object) -> Work:
        started.append(Work(*arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()


@pytest.fixture
def mount(start_mount: Callable[..., Any], files_server: Any) -> Any:
    return start_mount(
        files_server.source, "--cache-size", "16Mi", environment=files_server.environment()
    )


def _kill_often(mount: Any, work: Work, rounds_between: int = 1) -> None:
    """At moments that no schedule of the programs explains."""
    dice = random.Random(NUM_KILLS)
    work.wait_for_more()
    for _ in range(NUM_KILLS):
        threading.Event().wait(dice.random() / 2)
        mount.kill_daemon()
        work.wait_for_more(rounds_between)


def test_epochs_of_a_data_loader_notice_no_kill(
    mount: Any, files_server: Any, work: Callable[..., Work]
) -> None:
    folder = files_server.volume / "samples"
    folder.mkdir()
    expected = 0
    for number in range(40):
        # More than the cache, so that each epoch asks the store.
        data = random.Random(number).randbytes(1 << 20 if number % 2 else 30_000)
        (folder / f"{number:04}").write_bytes(data)
        expected += int.from_bytes(hashlib.sha256(data).digest()[:7], "little")
    training = work("epochs", mount.mountpoint / "samples")
    _kill_often(mount, training)
    figures = training.finish()
    assert figures["sums"] == [expected]
    print(f"epochs: {NUM_KILLS} kills, worst pause of a read {figures['worst_seconds']:.2f} s")


@pytest.mark.quotes(
    "**Whole.** A path has the old file, no file or the whole new one, in the store and for every "
    "node, whoever dies.",
)
def test_checkpoints_are_whole_through_kills_and_whatever_looks_sees_the_old_or_the_new(
    mount: Any, files_server: Any, work: Callable[..., Work]
) -> None:
    saving = work("checkpoints", mount.mountpoint)
    _kill_often(mount, saving)
    figures = saving.finish()
    assert figures["last"] >= NUM_KILLS and figures["num_seen"] > 0
    print(f"checkpoints: {NUM_KILLS} kills, {figures}")


Content = tuple[str, int]
"""The word that a file repeats, in hexadecimal, and its length in bytes."""

NOTHING: Content = ("", 0)


def _acknowledged(log: Path) -> dict[str, list[Content]]:
    """What each file may have: the acknowledged content first, then those begun since."""
    allowed: dict[str, list[Content]] = {}
    for line in log.read_text().splitlines():
        what, name, word, length = json.loads(line)
        if what == "begin":
            allowed.setdefault(name, [NOTHING]).append((word, length))
        else:
            allowed[name] = [(word, length)]
    return allowed


def _content(path: Path) -> Content:
    data = path.read_bytes() if path.exists() else b""
    word = data[:WORD_BYTES]
    is_whole = data == word * (len(data) // WORD_BYTES) + word[: len(data) % WORD_BYTES]
    return (word.hex() if is_whole else "a mixture", len(data))


def _wrong(volume: Path, allowed: dict[str, list[Content]]) -> dict[str, Content]:
    """Files that have neither what was acknowledged nor, where one was begun since, a part of it:
    what a disk has after a power cut.
    """
    found = {name: _content(volume / name) for name in allowed}
    return {
        name: (word, length)
        for name, (word, length) in found.items()
        if (word, length) != allowed[name][0]
        and not any(length <= whole and word in ("", one) for one, whole in allowed[name][1:])
    }


def test_writes_that_were_acknowledged_are_in_the_store_after_kills(
    mount: Any, files_server: Any, work: Callable[..., Work], tmp_path: Path
) -> None:
    log = tmp_path / "acknowledged"
    writing = work("writes", mount.mountpoint, log)
    _kill_often(mount, writing, rounds_between=3)
    figures = writing.finish()
    allowed = _acknowledged(log)
    assert {name: [_content(files_server.volume / name)] for name in allowed} == allowed
    print(
        f"writes: {NUM_KILLS} kills, {writing.num_rounds} files, longest"
        f" {figures['worst_seconds']:.2f} s"
    )


@pytest.mark.quotes(
    "`close`, `fsync` | whatever happens to this node",
)
def test_after_a_power_cut_the_next_mount_sends_what_was_acknowledged(
    mount: Any, files_server: Any, work: Callable[..., Work], tmp_path: Path
) -> None:
    log = tmp_path / "acknowledged"
    writing = work("writes", mount.mountpoint, log)
    for _ in range(max(2, NUM_KILLS // 10)):
        writing.wait_for_more(12)
        daemon = mount.ready()["daemon_pid"]
        for pid in (mount.process.pid, daemon):
            os.kill(pid, signal.SIGKILL)
        mount.process.wait()
        # Its programs are lost with the machine.
        writing.kill()
        assert _wrong(files_server.volume, _acknowledged(log)) == {}
        mount.ready_file.unlink()
        mount.start()
        mount.wait_ready()
        writing = work("writes", mount.mountpoint, log)
    writing.wait_for_more(12)
    writing.finish()
    assert mount.stop() == 0
    assert _wrong(files_server.volume, _acknowledged(log)) == {}
