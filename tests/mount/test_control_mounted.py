"""Commands on real mounts: what they tell, what they do, and that no command waits for a daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest

METRIC = re.compile(r"^(\w+)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


def _trainmount(
    *arguments: object, stdin: str | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainmount_cli", *map(str, arguments)]
    return subprocess.run(
        command, input=stdin, cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )


def _plain(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trainmount_fuse", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def _metrics(mountpoint: object) -> dict[str, float]:
    done = _trainmount("status", mountpoint, "--metrics")
    assert done.returncode == 0, done.stderr
    return {name: float(value) for name, value in METRIC.findall(done.stdout)}


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def volume(tmp_path):
    folder = tmp_path / "volume"
    (folder / "d").mkdir(parents=True)
    for name, size in (("d/a", 3_000_000), ("d/b", 100_000), ("other", 50_000)):
        (folder / name).write_bytes(os.urandom(size))
    return folder


def test_what_is_warm_is_read_with_0_bytes_from_the_store(start_mount, volume):
    mount = start_mount(volume.as_uri())
    done = _trainmount("warm", mount.mountpoint / "d", "--mount", mount.mountpoint, "-o", "json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)["data"]["mounts"]
    assert (result["num_done"], result["num_bytes"]) == (2, 3_100_000)
    before = _metrics(mount.mountpoint)["trainmount_cache_fetched_bytes_total"]
    assert before == 3_100_000
    for name in ("d/a", "d/b"):
        assert (mount.mountpoint / name).read_bytes() == (volume / name).read_bytes()
    assert _metrics(mount.mountpoint)["trainmount_cache_fetched_bytes_total"] == before
    # Kept over a successor.
    mount.kill_daemon()
    assert (mount.mountpoint / "d/a").read_bytes() == (volume / "d/a").read_bytes()
    assert _metrics(mount.mountpoint)["trainmount_cache_fetched_bytes_total"] == 0


def test_lists_and_patterns_and_what_is_missing(start_mount, volume):
    mount = start_mount(volume.as_uri())
    place = ("--mount", mount.mountpoint)
    done = _trainmount("warm", "--list", "-", *place, stdin="d/a\nother\n\n")
    assert (done.returncode, done.stdout) == (0, "2 files in the cache, 3.0 MB\n")
    done = _trainmount("warm", f"{volume.as_uri()}/d/*", "nothing*", *place)
    assert done.returncode == 1
    assert done.stdout == "2 files in the cache, 3.1 MB; 1 failed\n"
    assert done.stderr == f"trainmount: {mount.mountpoint}/nothing*: nothing matches it\n"
    done = _plain("evict", "**", *place)
    assert (done.returncode, done.stdout.split(",")[0]) == (0, "3 files looked at")
    done = _trainmount("warm", *place)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_paths_are_relative_as_in_a_shell(start_mount, volume):
    mount = start_mount(volume.as_uri())
    for pattern in ("../other", "./a", "../d//b"):
        done = _trainmount("warm", pattern, cwd=mount.mountpoint / "d")
        assert (done.returncode, done.stdout.split(",")[0]) == (0, "1 file in the cache")


def test_a_path_in_a_volume_that_is_mounted_twice_asks_for_the_mount(start_mount, volume):
    for name in ("one", "two"):
        start_mount(volume.as_uri(), name=name)
    done = _trainmount("evict", f"{volume.as_uri()}/d")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "name the mount (--mount), several have it: " in done.stderr


@pytest.mark.parametrize("run", [_trainmount, _plain])
def test_a_path_on_no_mount_is_one_line_and_exit_code_2(tmp_path, run):
    for command in ("status", "warm"):
        done = run(command, tmp_path / "nowhere")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_status_tells_of_daemon_and_session(start_mount, volume):
    mount = start_mount(volume.as_uri())
    mount.kill_daemon()
    done = _trainmount("status", mount.mountpoint, "-o", "json")
    assert done.returncode == 0, done.stderr
    (status,) = json.loads(done.stdout)["data"]["mounts"]
    assert status["mountpoint"] == str(mount.mountpoint)
    assert status["daemon_pid"] == mount.ready()["daemon_pid"]
    assert status["session"]["num_deaths"] == 1
    assert status["session"]["survives_daemon"] is True
    assert (status["num_dirty_files"], status["files"]) == (0, [])
    text = _plain("status", mount.mountpoint).stdout
    assert text.startswith(f"{volume.as_uri()} on {mount.mountpoint}\n")
    assert "1 restart, survives its daemon" in text


def test_status_answers_while_the_daemon_stands_still(start_mount, volume):
    mount = start_mount(volume.as_uri())
    pid = mount.ready()["daemon_pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        done = _trainmount("status", mount.mountpoint, "-o", "json")
    finally:
        os.kill(pid, signal.SIGCONT)
    (status,) = json.loads(done.stdout)["data"]["mounts"]
    # What the daemon would tell is missing, or a successor told it.
    assert status["session"]["holder_pid"] == mount.ready()["holder_pid"]
    assert done.returncode == (1 if "error" in status else 0)


def test_refresh_shows_at_once_what_others_changed(start_mount, volume):
    mount = start_mount(volume.as_uri(), "--metadata-timeout", "3600", "--negative-timeout", "3600")
    other, new = mount.mountpoint / "other", mount.mountpoint / "d/new"
    assert (other.stat().st_size, new.exists()) == (50_000, False)
    assert _names(mount.mountpoint / "d") == ["a", "b"]
    (volume / "other").write_bytes(b"short")
    (volume / "d/new").write_bytes(b"new")
    assert (other.stat().st_size, new.exists()) == (50_000, False)
    assert _trainmount("refresh", other).returncode == 0
    assert (other.stat().st_size, new.exists()) == (5, False)
    assert _trainmount("refresh", "--mount", mount.mountpoint).returncode == 0
    assert new.read_bytes() == b"new"
    assert _names(mount.mountpoint / "d") == ["a", "b", "new"]
    assert other.read_bytes() == b"short"


_WRITER = """
import sys
file = open(sys.argv[1], "wb", buffering=0)
file.write(b"so far")
print("written", flush=True)
sys.stdin.read()
"""


def test_flush_brings_open_files_to_the_store(start_mount, volume):
    mount = start_mount(volume.as_uri())
    # Not this process: its children would close copies of the descriptor, which uploads as well.
    with subprocess.Popen(
        [sys.executable, "-c", _WRITER, mount.mountpoint / "open"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        assert not (volume / "open").exists()
        assert "dirty     open (6 B)" in _plain("status", mount.mountpoint).stdout
        done = _trainmount("flush", mount.mountpoint)
        assert (done.returncode, done.stdout) == (0, "1 file uploaded\n")
        assert (volume / "open").read_bytes() == b"so far"
        assert _plain("flush", mount.mountpoint).stdout == "everything is uploaded\n"


def test_attributes_tell_version_state_and_cached_bytes(start_mount, volume):
    mount = start_mount(volume.as_uri())
    path = mount.mountpoint / "d/b"
    path.read_bytes()
    found = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    assert found.pop("user.trainmount.version")
    assert found == {
        "user.trainmount.path": b"d/b",
        "user.trainmount.state": b"clean",
        "user.trainmount.cached_bytes": b"100000",
    }
    folder = mount.mountpoint / "d"
    assert {name: os.getxattr(folder, name) for name in os.listxattr(folder)} == {
        "user.trainmount.path": b"d"
    }
    with (mount.mountpoint / "fresh").open("wb", buffering=0) as file:
        file.write(b"x")
        assert os.getxattr(file.name, "user.trainmount.state") == b"dirty"
        assert "user.trainmount.cached_bytes" not in os.listxattr(file.name)
    with pytest.raises(OSError, match="not supported"):
        os.setxattr(path, "user.mine", b"1")


def test_a_warm_whose_daemon_dies_goes_on_with_the_successor(start_mount, files_server):
    for number in range(400):
        (files_server.volume / str(number)).write_bytes(b"%d" % number * 1000)
    mount = start_mount(files_server.source, environment=files_server.environment())
    answers: list[subprocess.CompletedProcess[str]] = []
    place = ("--mount", mount.mountpoint)
    thread = threading.Thread(target=lambda: answers.append(_plain("warm", "**", *place)))
    thread.start()
    for _ in range(3):
        mount.kill_daemon()
    thread.join()
    (done,) = answers
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("400 files in the cache")


def _free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def _server(port: int) -> socket.socket | None:
    """Where somebody has the port, None."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:
        return None


def _scraped(address: str) -> str:
    """Empty where nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics") as answer:
            return answer.read().decode()
    except OSError:
        return ""


def test_a_port_for_metrics_that_is_lost_later_costs_the_metrics_and_not_the_mount(
    start_mount, volume, wait_until
):
    address = _free_address()
    port = int(address.rpartition(":")[2])
    mount = start_mount(volume.as_uri(), "--metrics-port", address)
    wait_until(lambda: _scraped(address), "metrics")
    # Somebody has the port before the successor is there.
    holder, daemon = mount.ready()["holder_pid"], mount.ready()["daemon_pid"]
    os.kill(holder, signal.SIGSTOP)
    os.kill(daemon, signal.SIGKILL)
    with wait_until(lambda: _server(port), "the end of its sockets"):
        os.kill(holder, signal.SIGCONT)
        wait_until(lambda: mount.ready()["daemon_pid"] != daemon, "a successor")
        assert (mount.mountpoint / "d/a").read_bytes() == (volume / "d/a").read_bytes()
        wait_until(lambda: "the port for metrics cannot be had; trying on" in mount.log, "a line")
    wait_until(lambda: _scraped(address), "metrics")
    # One that is asked for of a mount that serves is looked at before.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        other = f"127.0.0.1:{taken.getsockname()[1]}"
        done = _plain("remount", mount.mountpoint, "--metrics-port", other)
    assert done.returncode == 1
    assert done.stderr == (
        f"trainmount: not remounted, all is as before: cannot answer Prometheus at {other}: "
        "address already in use; name another port (--metrics-port), or end the program that has "
        "it\n"
    )
    done = _plain("remount", mount.mountpoint, "--metrics-port", f"localhost:{port}")
    assert (done.returncode, done.stderr) == (0, "")
    wait_until(lambda: _scraped(address), "metrics")
    assert mount.stop() == 0


def test_prometheus_finds_the_numbers_and_the_log_no_secret(start_mount, files_server):
    (files_server.volume / "file").write_bytes(os.urandom(9 << 20))
    address = _free_address()
    mount = start_mount(
        files_server.source,
        *("--verbose", "--log-format", "json", "--metrics-port", address),
        environment=files_server.environment(),
    )
    (mount.mountpoint / "file").read_bytes()
    (mount.mountpoint / "mine").write_bytes(os.urandom(9 << 20))
    with pytest.raises(FileNotFoundError):
        (mount.mountpoint / "missing").stat()
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text = answer.read().decode()
    assert 'trainmount_request_errors_total{operation="lookup",errno="ENOENT"}' not in text
    assert re.search(r'duration_seconds_count\{operation="write"\} \d', text)
    files_server.stop()
    mount.stop()
    log = mount.log
    assert all(json.loads(line)["level"] for line in log.splitlines())
    for secret in ("right", "Bearer", "signature", "X-Amz", "/presigned"):
        assert secret not in log
