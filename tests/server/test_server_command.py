"""`python -m trainmount_files.server`: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import urllib3


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainmount_files.server", *arguments]


def refusal(*arguments: str) -> str:
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def test_it_says_where_it_serves_and_ends_on_a_signal(tmp_path: Path) -> None:
    arguments = command(str(tmp_path), "--volume", "a.b.c", "--no-fsync")
    environment = {**os.environ, "TRAINMOUNT_SERVE_TOKEN": "secret-of-the-test"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(rf"serving {re.escape(str(tmp_path))} at (http://\S+)\n", line)
        assert match is not None
        target = f"{match[1]}/api/2.0/fs/directories/Volumes/a/b/c"
        headers = {"Authorization": "Bearer secret-of-the-test"}
        assert urllib3.request("HEAD", target, headers=headers).status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_missing_directory_is_one_line(tmp_path: Path) -> None:
    line = refusal(str(tmp_path / "missing"), "--token", "t")

    assert line == (
        f"trainmount serve: {tmp_path}/missing is not a directory; create it or name another\n"
    )


def test_a_busy_port_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refusal(str(tmp_path), "--token", "t", "--port", str(port))

    assert re.fullmatch(rf"trainmount serve: cannot listen at 127\.0\.0\.1:{port}: .*\n", line)


def test_a_malformed_volume_name_is_one_line(tmp_path: Path) -> None:
    line = refusal(str(tmp_path), "--token", "t", "--volume", "../../etc")

    assert line == "trainmount serve: volume must be CATALOG.SCHEMA.VOLUME, got '../../etc'\n"


def test_a_faults_file_that_is_not_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "faults").write_text("[{")

    line = refusal(str(tmp_path), "--token", "t", "--faults", str(tmp_path / "faults"))

    assert line.startswith(f"trainmount serve: faults file {tmp_path}/faults is not JSON: ")
