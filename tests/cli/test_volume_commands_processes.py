"""`trainmount cp` as a process: what a terminal and a log see of it, and Ctrl-C in the middle."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.server.settings import ServerSettings

TOKEN = "dapi-0123456789abcdef"
ROOT = "/Volumes/main/default/data"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    (tmp_path / "served").mkdir()
    settings = ServerSettings(
        directory=tmp_path / "served", token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as running:
        yield running


@pytest.fixture
def environment(server: LocalServer, trainmount: Any) -> dict[str, str]:
    return {**trainmount.environment, "DATABRICKS_HOST": server.url, "DATABRICKS_TOKEN": TOKEN}


def write_files(root: Path, num_files: int, size_bytes: int) -> Path:
    root.mkdir(parents=True)
    for number in range(num_files):
        (root / f"f{number:03}").write_bytes(b"x" * size_bytes)
    return root


def test_a_log_holds_no_bar_and_the_output_is_one_envelope(
    trainmount: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    source = write_files(tmp_path / "src", 60, 100)

    with (tmp_path / "log").open("wb") as log:
        done = subprocess.run(
            trainmount.command("cp", "-r", str(source), f"{ROOT}/t", "-o", "json"),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            check=True,
        )

    assert json.loads(done.stdout)["data"]["copied"] == 60
    assert done.stdout.count(b"\n") == 1
    # Under ten seconds: not one line yet.
    assert (tmp_path / "log").read_bytes() == b""


def test_on_a_terminal_the_bar_is_on_standard_error_and_names_cannot_act(
    trainmount: Any, environment: dict[str, str], server: LocalServer, tmp_path: Path
) -> None:
    source = write_files(tmp_path / "src", 30, 100)
    (source / "evil\x1b[2Jname").symlink_to("nowhere")
    server.inject(Fault(route="put_file", latency_ms=100))
    terminal, inside = pty.openpty()
    process = subprocess.Popen(
        trainmount.command("cp", "-r", str(source), f"{ROOT}/t"),
        env={**environment, "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=inside,
    )
    os.close(inside)
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:
            break
    output, _ = process.communicate()
    os.close(terminal)

    assert process.returncode == 0
    assert output == b"30 files copied, 3.0 kB; 1 skipped\n"
    assert b"copied" in shown and b"/30 files" in shown and b"\x1b[" in shown
    assert b"evil\\x1b[2Jname: skipped: a symbolic link" in shown


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_copy_and_leaves_no_half_of_a_file(
    trainmount: Any,
    environment: dict[str, str],
    server: LocalServer,
    tmp_path: Path,
    way: str,
    number: signal.Signals,
) -> None:
    size = 2_000_000
    served = tmp_path / "served/main/default/data"
    if way == "up":
        source, target = str(write_files(tmp_path / "src", 64, size)), f"{ROOT}/t"
        place = served / "t"
    else:
        write_files(served / "t", 64, size)
        source, target = f"{ROOT}/t", str(tmp_path / "dst")
        place = tmp_path / "dst"
    server.inject(Fault(latency_ms=150))
    process = subprocess.Popen(
        trainmount.command("cp", "-r", "-j", "8", source, target),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not place.exists() or len(list(place.iterdir())) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)

    process.send_signal(number)
    began = time.monotonic()
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert (output, errors) == ("", "trainmount: cp was interrupted\n")
    # Bounded, on however busy a machine: what was left would have taken longer at any speed.
    assert time.monotonic() - began < 20
    there = [path.stat().st_size for path in place.iterdir()]
    assert 3 <= len(there) < 64
    assert set(there) == {size}
    assert server.statistics()["open_uploads"] == 0


def test_ctrl_c_ends_a_copy_that_a_dead_server_holds(
    trainmount: Any, environment: dict[str, str], server: LocalServer, tmp_path: Path
) -> None:
    source = write_files(tmp_path / "src", 20, 1000)
    server.inject(Fault(route="put_file", latency_ms=600_000))
    process = subprocess.Popen(
        trainmount.command("cp", "-r", str(source), f"{ROOT}/t", "-o", "json"),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not server.statistics()["requests"].get("put_file", 0) >= 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)

    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == 130
    assert json.loads(output)["error"]["code"] == "CANCELLED"
    assert errors == ""


@pytest.mark.parametrize(
    "arguments", [("ls", ROOT), ("cp", f"{ROOT}/f", "-"), ("ls", ROOT, "-ojson")]
)
def test_an_output_that_is_full_closed_or_no_longer_read_is_no_traceback(
    trainmount: Any, environment: dict[str, str], tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "served/main/default/data/f").write_bytes(bytes(1 << 20))
    command = " ".join(trainmount.command(*arguments))

    def end(redirected: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", f"{command} {redirected}"],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stderr

    full = "trainmount: standard output cannot be written: no space left on device\n"
    assert end("> /dev/full") == (1, full)
    assert end(">&-") == (0, "")
    assert end("| true; exit ${PIPESTATUS[0]}") == (0, "")
