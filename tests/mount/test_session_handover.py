"""A mount that another process serves: an ordinary user without capabilities, over two sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_fuse.session.handover import HandoverError, Keeper, reclaim, request_handover
from trainmount_fuse.session.mounting import (
    MountError,
    abort,
    connection_of,
    find_mount,
    mount_fuse,
    unmount,
)

NOBODY = 65534
TOY = str(Path(__file__).with_name("session_toy_holder.py"))


def _wait_until(condition, what):
    deadline = time.monotonic() + 60
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true"
        time.sleep(0.02)
    return value


class Pod:
    """What is in a mount pod: `serve`, as a user without rights."""

    def __init__(self, nobody, folder: Path, fault: str = "none") -> None:
        self.log = folder / "serve.log"
        command = [*nobody.prefix, nobody.python, TOY, fault, "serve"]
        command += ["--keeper", str(folder / "keeper"), "--reclaim", str(folder / "reclaim")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **nobody.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def daemons(self) -> list[int]:
        pid = self.process.pid
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            return [int(child) for child in children]
        return []

    def serving(self) -> int:
        return self.log.read_text().count(" serving ")

    def kill_daemon(self) -> None:
        before = self.serving()
        os.kill(self.daemons()[0], signal.SIGKILL)
        _wait_until(lambda: self.serving() > before, "a successor")

    def clean(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pods(nobody, open_path) -> Iterator[list[Pod]]:
    started: list[Pod] = []
    yield started
    for pod in started:
        pod.clean()


@pytest.fixture
def mountpoint(open_path) -> Iterator[Path]:
    folder = open_path / "mnt"
    folder.mkdir()
    yield folder
    while find_mount(folder) is not None:
        unmount(folder, lazy=True)


@pytest.fixture
def keeper(open_path, mountpoint) -> Iterator[Keeper]:
    connection = mount_fuse(mountpoint, name="toy", allow_other=True, read_only=False)
    one = Keeper(
        open_path / "keeper",
        connection,
        {"settings": {}, "environment": {"STAMP": "one"}},
        allowed_uids=frozenset({NOBODY}),
    )
    one.start()
    yield one
    one.close()


def test_a_user_without_capabilities_serves_a_mount_and_survives_kills(
    keeper, nobody, pods, open_path, mountpoint, read_at_random
):
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    status = Path(f"/proc/{pods[0].daemons()[0]}/status").read_text()
    assert f"Uid:\t{NOBODY}" in status
    assert "CapEff:\t0000000000000000" in status
    reader = read_at_random(mountpoint / "f")
    for _ in range(3):
        reader.wait_for_more()
        pods[0].kill_daemon()
    reader.wait_for_more()
    reader.finish()


def test_a_replaced_pod_goes_on_with_the_mount(
    keeper, nobody, pods, open_path, mountpoint, read_at_random
):
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    reader = read_at_random(mountpoint / "f")
    reader.wait_for_more()
    pods[0].process.kill()
    _wait_until(lambda: not keeper.is_ready(), "the keeper's notice")
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    reader.wait_for_more()
    reader.finish()


def test_the_keeper_is_replaced_under_load(nobody, pods, open_path, mountpoint, read_at_random):
    keepers = [_start_keeper(open_path, mountpoint)]
    try:
        pods.append(Pod(nobody, open_path))
        assert _wait_kept(open_path, keepers[0])["role"] == "first"
        reader = read_at_random(mountpoint / "f")
        reader.wait_for_more()
        keepers[0].kill()
        keepers[0].wait()
        reader.wait_for_more()
        pods[0].kill_daemon()
        reader.wait_for_more()
        keepers.append(_start_keeper(open_path, mountpoint))
        assert _wait_kept(open_path, keepers[1])["role"] == "successor"
        pods[0].kill_daemon()
        reader.wait_for_more()
        # The new keeper's descriptor is as good as the old one's: a new pod gets it.
        pods[0].process.kill()
        pods.append(Pod(nobody, open_path))
        _wait_until(lambda: pods[1].log.read_text().count(" serving ") >= 4, "the new pod")
        reader.wait_for_more()
        reader.finish()
    finally:
        for one in keepers:
            one.kill()
            one.wait()


def _start_keeper(folder: Path, mountpoint: Path) -> subprocess.Popen[bytes]:
    program = str(Path(__file__).with_name("session_keeper.py"))
    return subprocess.Popen([sys.executable, program, str(mountpoint), str(folder), str(NOBODY)])


def _wait_kept(folder: Path, process: subprocess.Popen[bytes]) -> dict[str, object]:
    def kept() -> dict[str, object] | None:
        assert process.poll() is None
        with contextlib.suppress(FileNotFoundError):
            document: dict[str, object] = json.loads((folder / "ready").read_text())
            return document if document["pid"] == process.pid else None
        return None

    return _wait_until(kept, "the keeper")


def test_new_credentials_reach_the_daemon_without_an_error_for_anybody(
    keeper, nobody, pods, open_path, mountpoint, read_at_random
):
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    assert (mountpoint / "stamp-one").exists()
    reader = read_at_random(mountpoint / "f")
    reader.wait_for_more()
    keeper.update_configuration({"settings": {}, "environment": {"STAMP": "sesame-1234"}})
    _wait_until((mountpoint / "stamp-sesame-1234").exists, "a daemon with the new credentials")
    reader.wait_for_more()
    reader.finish()
    # They are in no argument, in no environment that others can read, and in no log.
    for pid in (pods[0].process.pid, *pods[0].daemons()):
        for name in ("cmdline", "environ"):
            assert b"sesame" not in Path(f"/proc/{pid}/{name}").read_bytes()
    assert "sesame" not in pods[0].log.read_text()


def test_a_pod_that_is_told_to_stop_leaves_the_mount_to_the_next_one(
    keeper, nobody, pods, open_path, mountpoint
):
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    pods[0].process.terminate()
    assert pods[0].process.wait(60) == 0
    pods.append(Pod(nobody, open_path))
    assert keeper.wait_ready(60)
    assert (mountpoint / "f").exists()


def test_a_server_that_gives_up_leaves_an_aborted_mount_and_says_why(
    keeper, nobody, pods, open_path, mountpoint
):
    pods.append(Pod(nobody, open_path, fault="start"))
    assert not keeper.wait_ready(60)
    assert "keeps dying" in str(keeper.failure)
    assert pods[0].process.wait(60) == 1
    done = subprocess.run(
        [sys.executable, "-c", f"import os; os.listdir({str(mountpoint)!r})"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "not connected" in done.stderr


def test_another_user_gets_no_descriptor(keeper, open_path):
    # This process is not the user that the keeper expects.
    with pytest.raises(HandoverError, match=f"user {os.getuid()} may not serve this mount"):
        request_handover(open_path / "keeper", 10)


def test_one_server_at_a_time(open_path, mountpoint):
    connection = mount_fuse(mountpoint, name="toy", allow_other=True, read_only=False)
    keeper = Keeper(open_path / "keeper", connection, {}, allowed_uids=None)
    keeper.start()
    try:
        first = request_handover(open_path / "keeper", 10)
        assert (first.role, first.init_request) == ("first", connection.init_request)
        with pytest.raises(HandoverError, match="another process serves it"):
            request_handover(open_path / "keeper", 0.5)
        os.close(first.fd)
        first.connection.close()
        second = request_handover(open_path / "keeper", 10)
        os.close(second.fd)
        second.connection.close()
    finally:
        keeper.close()


def test_nobody_to_ask_is_an_error_in_time(open_path):
    with pytest.raises(HandoverError, match="nobody listens"):
        request_handover(open_path / "keeper", 0.2)
    with pytest.raises(HandoverError, match="nobody listens"):
        reclaim(open_path / "reclaim", 0.2)


def test_the_connection_of_a_path_where_nothing_is_mounted_is_an_error(tmp_path):
    with pytest.raises(MountError, match="nothing is mounted"):
        connection_of(tmp_path, 0, b"")


def test_abort_leaves_the_mount_and_frees_whoever_waits(mountpoint):
    connection = mount_fuse(mountpoint, name="toy", allow_other=True, read_only=False)
    waiting = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.listdir({str(mountpoint)!r})"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert abort(connection)
        assert "not connected" in waiting.communicate(timeout=60)[1]
        assert find_mount(mountpoint) is not None
    finally:
        os.close(connection.fd)
