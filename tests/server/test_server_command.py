"""`python -m trainmount_files.server`: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import urllib3

from trainmount_files.server.__main__ import main


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


def test_a_missing_argument_is_one_line() -> None:
    line = refusal("--token", "t")

    assert line == (
        "trainmount: the following arguments are required: DIR; see trainmount serve --help\n"
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


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["--min-part-bytes", "-1"], "min_part_bytes must be at least 0, got -1"),
        (["--max-put-bytes", "0"], "max_put_bytes must be greater than 0, got 0"),
        (["--tls-cert", "x"], "tls_certificate and tls_key must be given together"),
        (["--endpoint", "x"], "endpoints must be of io-offload, files-2.0, files-3.0; got x"),
        (["--token", "a b"], "token must be printable ASCII without spaces, and not empty"),
        (
            ["--tls-cert", "/none/c", "--tls-key", "/none/k"],
            "/none/c and /none/k are no certificate and key: No such file or directory",
        ),
        (["--grants", "/none"], "grants file /none cannot be read: No such file or directory"),
        (["--faults", "/none"], "faults file /none cannot be read: No such file or directory"),
        (
            ["--ready-file", "/none/ready"],
            "ready file /none/ready cannot be written: No such file or directory",
        ),
    ],
)
def test_a_value_that_cannot_be_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    line: str,
) -> None:
    monkeypatch.setenv("TRAINMOUNT_SERVE_TOKEN", "t")

    assert main([str(tmp_path), *options]) == 2

    assert capsys.readouterr().err == f"trainmount serve: {line}\n"


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])

    assert ended.value.code == 0
    named = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert named == {
        "--admin",
        "--endpoint",
        "--faults",
        "--grants",
        "--help",
        "--host",
        "--implicit-directories",
        "--max-put-bytes",
        "--max-url-lifetime-seconds",
        "--min-part-bytes",
        "--no-fsync",
        "--port",
        "--ready-file",
        "--resumable",
        "--tls-cert",
        "--tls-key",
        "--token",
        "--upload-lifetime-seconds",
        "--volume",
    }


def test_grants_and_volumes_come_from_the_command_line(
    tmp_path: Path, start_process: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    grants = tmp_path / "grants.json"
    entry = {"user": "ann", "token": "of-ann", "volumes": ["*.*.*"], "privileges": ["READ VOLUME"]}
    grants.write_text(json.dumps([entry]))

    _, url = start_process("--grants", str(grants), "--volume", "second.s.v")

    def ask(token: str, method: str, volume: str) -> int:
        target = f"{url}/api/2.0/fs/directories/Volumes/{volume}"
        headers = {"Authorization": f"Bearer {token}"}
        return urllib3.request(method, target, headers=headers).status

    for volume in ("main/default/data", "second/s/v"):
        assert ask("of-ann", "GET", volume) == 200
        assert ask("of-ann", "PUT", f"{volume}/new") == 403
        assert ask("of-nobody", "GET", volume) == 401
