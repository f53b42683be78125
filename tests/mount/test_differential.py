"""The same operations on a mount and on a tmpfs: after each of them both say the same.

Two programs take turns on a mount of the local Files API, whose server fails on purpose, whose
daemon is killed, and whose cache is smaller than the files. In CI a share; all of it:

    TRAINMOUNT_DIFFERENTIAL_STEPS=10000 pytest tests/mount/test_differential.py

A difference is reported with the smallest part of the schedule that still shows it, to be pasted
into ONCE_DIFFERENT. What may differ, and why, stands in differential_schedule.EXEMPT.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.mount.differential_schedule import Step, draw, shrink

NUM_STEPS = int(os.environ.get("TRAINMOUNT_DIFFERENTIAL_STEPS", "500"))
STEPS_A_MOUNT = 1000
"""A mount gives up after 60 deaths in ten minutes, so a long run takes several."""

PATIENCE_SECONDS = 100.0
"""Far above what an operation takes with every fault there is; then it hangs."""

REST_SECONDS = 1.1
"""Longer than anything is believed without asking the store."""

FIRST_SET_TIME, LAST_SET_TIME = 1_000_000_000, 1_001_000_000
"""Times that a program has set are in this range, in seconds: nothing else is."""


ONCE_DIFFERENT: list[list[Step]] = [
    [
        [0, "mkdir", "e", 0o755],
        [0, "put", "e/a", 1, 9000],
        [1, "open", 1, "e/a", os.O_RDWR | os.O_APPEND, 0o644],
        [1, "map_write_after_close", 1, 1, 2, 5000],
        [0, "unlink", "a"],
        [1, "tree"],
    ],
]


class World:
    """A mount, the store behind it, a tmpfs beside it, and two programs on both."""

    def __init__(self, mount: Any, server: Any, tmpfs: Path) -> None:
        self._mount = mount
        self._server = server
        self._tmpfs = tmpfs
        self._staging = mount.folder / "state/staging"
        self._programs: list[subprocess.Popen[str]] = []
        self._roots: tuple[Path, Path] = (tmpfs, tmpfs)
        self._killing: threading.Thread | None = None
        self.num_kills = 0
        self.num_done = 0
        self.worst_seconds = 0.0

    def run(self, steps: list[Step]) -> str:
        """Do them in an empty folder; what differed first, or ""."""
        name = self._mount.mountpoint.name
        self._roots = (self._mount.mountpoint / name, self._tmpfs / name)
        for root in self._roots:
            root.mkdir()
        self._programs = [self._start_program() for _ in range(2)]
        try:
            for step in steps:
                self.num_done += 1
                if problem := self._do(step):
                    return f"{step}: {problem}"
            return self._finish(name)
        finally:
            self._settle()
            for program in self._programs:
                program.kill()
                program.communicate()

    def _do(self, step: Step) -> str:
        who, *rest = step
        if who != "control":
            answer = self._ask(self._programs[who], rest)
            if answer is None:
                # Else nothing ends the program, which waits for the mount.
                self._mount.clean()
                return "no answer"
            return difference(answer)
        what, *arguments = rest
        if what == "faults":
            self._put_faults(arguments[0])
        elif what == "kill":
            self._kill(arguments[0])
        elif what == "rest":
            time.sleep(REST_SECONDS)
        else:
            self._programs[arguments[0]].kill()
            self._programs[arguments[0]].communicate()
            self._programs[arguments[0]] = self._start_program()
        return ""

    def _ask(self, program: subprocess.Popen[str], operation: Step) -> dict[str, Any] | None:
        assert program.stdin is not None
        assert program.stdout is not None
        began = time.monotonic()
        program.stdin.write(json.dumps(operation) + "\n")
        program.stdin.flush()
        if not select.select([program.stdout], [], [], PATIENCE_SECONDS)[0]:
            return None
        line = program.stdout.readline()
        self.worst_seconds = max(self.worst_seconds, time.monotonic() - began)
        answer: dict[str, Any] | None = json.loads(line) if line else None
        return answer

    def _start_program(self) -> subprocess.Popen[str]:
        program = str(Path(__file__).with_name("differential_worker.py"))
        return subprocess.Popen(
            [sys.executable, program, *map(str, self._roots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _put_faults(self, rules: list[dict[str, Any]]) -> None:
        request = urllib.request.Request(
            f"{self._server.url}/admin/faults",
            json.dumps({"faults": rules}).encode(),
            {"Authorization": "Bearer right", "Content-Type": "application/json"},
            method="PUT",
        )
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 200

    def _kill(self, delay_seconds: float) -> None:
        """So long after now, whatever is under way then; the next kill waits for the successor."""
        self._settle()
        pid = self._mount.ready()["daemon_pid"]

        def kill() -> None:
            time.sleep(delay_seconds)
            os.kill(pid, signal.SIGKILL)

        self._killing = threading.Thread(target=kill)
        self._killing.start()
        self._killed_pid = pid
        self.num_kills += 1

    def _settle(self) -> None:
        if self._killing is None:
            return
        self._killing.join()
        self._killing = None
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._mount.ready()["daemon_pid"] == self._killed_pid:
            assert time.monotonic() < deadline, "no successor"
            time.sleep(0.01)

    def _finish(self, name: str) -> str:
        """After the programs have ended, the store has what the tmpfs has, and nothing is left."""
        self._settle()
        self._put_faults([])
        for program in self._programs:
            program.communicate(timeout=PATIENCE_SECONDS)
        expected = contents(self._roots[1])
        if self.num_kills:
            # An open that a kill left unanswered is done again, its first handle is nobody's, and
            # what is written through a mapping after the last close waits for the end of the mount.
            assert self._mount.stop() == 0
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            # What was written through a mapping goes up after its program has ended.
            stored = contents(self._server.volume / name)
            staged = self._staged()
            if stored == expected and staged == []:
                return ""
            if time.monotonic() > deadline:
                return f"the store has {stored} and not {expected}; staged: {staged}"
            time.sleep(0.05)

    def _staged(self) -> list[str]:
        """What is left here that the store should have, or should not be left at all."""
        if self.num_kills == 0:
            return sorted(path.name for path in self._staging.iterdir())
        with contextlib.closing(sqlite3.connect(self._staging.with_name("journal.db"))) as journal:
            rows = journal.execute("SELECT path FROM staged WHERE state IN ('dirty', 'failed')")
            return [path for (path,) in rows]


def contents(root: Path) -> dict[str, str | None]:
    """Every path below the root with the digest of its bytes; None for a directory."""
    return {
        str(path.relative_to(root)): None
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
    }


def difference(answer: dict[str, Any]) -> str:
    """What the mount said that the tmpfs did not; "" if they agree."""
    mount, tmpfs = answer["mount"], answer["tmpfs"]
    if mount["result"] != tmpfs["result"]:
        return f"the mount says {mount['result']}, the tmpfs {tmpfs['result']}"
    for kind in ("paths", "slots"):
        for key, seen in mount[kind].items():
            expected = tmpfs[kind][key]
            if seen[:4] != expected[:4]:
                return f"{key!r} is {seen} on the mount, {expected} on the tmpfs"
            if problem := _time_problem(seen[4:], expected[4:], mount["times"][1]):
                return f"{key!r}: {problem}"
    return ""


def _time_problem(seen: list[int], expected: list[int], now_ns: int) -> str:
    """A time that a program has set is exact; another is that of the change or of the upload."""
    if seen == expected:
        return ""
    (seen_ns,), (expected_ns,) = seen, expected
    if FIRST_SET_TIME <= expected_ns // 10**9 < LAST_SET_TIME:
        return f"mtime {seen_ns} and not {expected_ns}, which was set"
    if expected_ns // 10**9 * 10**9 <= seen_ns <= now_ns:
        return ""
    return f"mtime {seen_ns} is not between {expected_ns} and now, {now_ns}"


@pytest.fixture
def tmpfs() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="trainmount-tmpfs-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def make_world(
    start_mount: Callable[..., Any], files_server: Any, tmpfs: Path
) -> Callable[..., World]:
    """`make_world(*options)` is a new mount with an empty cache of 4 MiB."""
    files_server.stop()
    files_server.start("--admin", "--no-fsync")
    numbers = itertools.count()
    mounts: list[Any] = []

    def make(*options: str) -> World:
        for mount in mounts:
            mount.clean()
        mount = start_mount(
            files_server.source,
            "--cache-size",
            "4Mi",
            *options,
            name=f"mnt-{next(numbers)}",
            environment=files_server.environment(),
        )
        mounts[:] = [mount]
        return World(mount, files_server, tmpfs)

    return make


def check(make_world: Callable[..., World], steps: list[Step], max_tries: int = 80) -> World:
    """Do the steps on a new mount; fails with the smallest part of them that differs."""
    world = make_world()
    problem = world.run(steps)
    if not problem:
        return world
    print(problem, flush=True)
    smallest_problem = problem

    def still_fails(candidate: list[Step]) -> bool:
        nonlocal smallest_problem
        found = make_world().run(candidate)
        smallest_problem = found or smallest_problem
        return bool(found)

    done = steps[: world.num_done]
    told = "\n".join(f"    {step!r}," for step in shrink(done, still_fails, max_tries))
    raise AssertionError(
        f"{problem}\nThe smallest schedule that differs, then by {smallest_problem}:\n[\n{told}\n]"
    )


@pytest.mark.timeout(300 + NUM_STEPS)
def test_a_mount_and_a_tmpfs_agree_through_faults_kills_and_a_full_cache(
    make_world: Callable[..., World],
) -> None:
    num_done = num_kills = 0
    worst_seconds = 0.0
    for seed in itertools.count(1):
        num_steps = min(STEPS_A_MOUNT, NUM_STEPS - num_done)
        if num_steps <= 0:
            break
        share = num_steps / STEPS_A_MOUNT
        steps = draw(
            seed,
            num_steps,
            num_faults=int(60 * share),
            num_kills=int(16 * share),
            num_rests=int(10 * share),
        )
        world = check(make_world, steps)
        num_done += num_steps
        num_kills += world.num_kills
        worst_seconds = max(worst_seconds, world.worst_seconds)
    print(f"{num_done} steps, {num_kills} kills, longest step {worst_seconds:.2f} s")


def test_schedules_that_once_differed_agree(make_world: Callable[..., World]) -> None:
    for steps in ONCE_DIFFERENT:
        check(make_world, steps)
