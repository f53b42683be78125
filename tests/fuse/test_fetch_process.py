"""Small files that a process beside the daemon fetches: the right bytes, whatever becomes of it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("fetch_program.py")
SIZES = (1, 4096, 100_000, 300_000, 1 << 20)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(60):
        data = os.urandom(SIZES[number % len(SIZES)])
        (folder / f"sample-{number:02}").write_bytes(data)
    return folder


def digests(source: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in source.iterdir()}


def run(case: str, source: Path) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), case, str(source), str(source.parent / "mount")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    seen: dict[str, Any] = json.loads(ended.stdout)
    # Whatever happened, nothing is left of it; the program waits until the process has gone.
    assert seen["is_all_put_back"]
    return seen


def test_files_are_fetched_by_the_process_each_once(source: Path) -> None:
    seen = run("reads_all", source)
    assert seen["digests"] == digests(source)
    assert seen["num_reads_here"] == 0
    assert seen["fetched_bytes"] == sum(path.stat().st_size for path in source.iterdir())
    assert seen["is_ready"]


def test_without_the_process_its_daemon_fetches(source: Path) -> None:
    seen = run("child_is_killed", source)
    assert seen["digests"] == digests(source)
    assert seen["num_reads_here"] > 0
    assert not seen["is_ready"]


def test_a_process_that_does_not_answer_is_given_up(source: Path) -> None:
    seen = run("child_is_stopped", source)
    assert seen["digests"] == digests(source)
    assert not seen["is_ready"]


def test_the_end_of_the_mount_waits_for_no_file_that_the_process_waits_for(source: Path) -> None:
    seen = run("child_is_silent", source)
    assert seen["waited"]
    assert seen["errors"] == ["EIO"]


def test_what_the_process_is_refused_is_told_as_if_the_daemon_had_asked(source: Path) -> None:
    assert run("file_is_replaced", source)["error"] == "ESTALE"
