"""The driver as a process, with real mounts: publish, use, lose any process, unpublish, leave
nothing.

Needs root and /dev/fuse. Supervisors are plain processes here; what they do is the same in a pod.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from trainmount_csi.daemon_spec import DaemonFolder, daemon_folders
from trainmount_csi.mounts import LinuxMounter
from trainmount_csi.wire import csi_pb2, csi_pb2_grpc

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
)

WAIT_SECONDS = 60
TOKEN = "dapi-of-the-test"
PATTERN = bytes(range(256)) * 4096 * 8  # 8 MiB

READER = """
import os, random, sys
path, expected = sys.argv[1], bytes(range(256)) * 16
fd = os.open(path, os.O_RDONLY)
size = os.fstat(fd).st_size
while True:
    offset = 4096 * random.randrange(size // 4096)
    # Out of the kernel's cache, so that the daemon is asked.
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    data = os.pread(fd, 4096, offset)
    assert data == expected, (offset, len(data))
    os.write(1, b".")
"""


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {WAIT_SECONDS} s: {what}"
        time.sleep(0.02)


class Plugin:
    """One driver process at a root; `start` again after `kill` is a restart of the container."""

    def __init__(self, root: Path, *, command_prefix: tuple[str, ...] = ()) -> None:
        self.root = root
        self.log = root.parent / "plugin.log"
        self._prefix = command_prefix
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix://{self.root}/csi.sock"

    def start(self) -> None:
        command = [sys.executable, "-m", "trainmount_csi", "--endpoint", self.endpoint]
        command += ["--node-id", "n", "--root", str(self.root), "--daemons", "process"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*self._prefix, *command], stdout=log, stderr=log)
        wait_until(self._answers, "the driver answers")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with grpc.insecure_channel(self.endpoint) as channel:
            try:
                csi_pb2_grpc.IdentityStub(channel).Probe(csi_pb2.ProbeRequest(), timeout=2)
            except grpc.RpcError:
                return False
        return True

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(WAIT_SECONDS)

    def call(self, method: str, request: Any, timeout: float = WAIT_SECONDS) -> Any:
        with grpc.insecure_channel(self.endpoint) as channel:
            return getattr(csi_pb2_grpc.NodeStub(channel), method)(request, timeout=timeout)

    def publish(self, target: Path, source: str, **changes: Any) -> None:
        mode = csi_pb2.VolumeCapability.AccessMode(mode=5)
        mount = csi_pb2.VolumeCapability.MountVolume()
        values: dict[str, Any] = {
            "volume_id": "v",
            "target_path": str(target),
            "volume_capability": csi_pb2.VolumeCapability(mount=mount, access_mode=mode),
            "volume_context": {"source": source},
        }
        self.call("NodePublishVolume", csi_pb2.NodePublishVolumeRequest(**{**values, **changes}))

    def unpublish(self, target: Path) -> None:
        request = csi_pb2.NodeUnpublishVolumeRequest(volume_id="v", target_path=str(target))
        self.call("NodeUnpublishVolume", request)

    def statistics(self, target: Path) -> Any:
        request = csi_pb2.NodeGetVolumeStatsRequest(volume_id="v", volume_path=str(target))
        return self.call("NodeGetVolumeStats", request)

    def folders(self) -> list[DaemonFolder]:
        return list(daemon_folders(self.root))

    def supervisor_pid(self) -> int:
        (folder,) = self.folders()
        return int(json.loads(folder.pid_path.read_text())["pid"])

    def daemon_pid(self) -> int:
        supervisor = self.supervisor_pid()
        children: list[int] = []

        def is_started() -> bool:
            tasks = Path(f"/proc/{supervisor}/task").glob("*/children")
            children[:] = [int(pid) for task in tasks for pid in task.read_text().split()]
            return bool(children)

        wait_until(is_started, "the supervisor has a daemon")
        return children[0]

    def num_descriptors(self) -> int:
        assert self.process is not None
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def clean_up(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        pids = []
        for folder in self.folders():
            with contextlib.suppress(OSError, ValueError):
                pids.append(int(json.loads(folder.pid_path.read_text())["pid"]))
        for entry in reversed(mounts_below(self.root.parent)):
            LinuxMounter().unmount(Path(entry), lazy=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def mounts_below(path: Path) -> list[str]:
    return [
        str(entry.mount_point)
        for entry in LinuxMounter().entries()
        if entry.mount_point.is_relative_to(path)
    ]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.fixture
def place() -> Iterator[Path]:
    # Short, because the path of a Unix socket may have 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp")).resolve()
    (path / "root").mkdir()
    yield path
    assert mounts_below(path) == []
    shutil.rmtree(path)


@pytest.fixture
def plugin(place: Path) -> Iterator[Plugin]:
    plugin = Plugin(place / "root")
    plugin.start()
    yield plugin
    plugin.clean_up()


@pytest.fixture
def store(place: Path) -> Path:
    path = place / "store"
    path.mkdir()
    (path / "pattern").write_bytes(PATTERN)
    return path


class Volumes:
    """A Files API server over a directory that holds the volume main.default.data."""

    def __init__(self, place: Path) -> None:
        self.directory = place / "volumes"
        self.volume = self.directory / "main" / "default" / "data"
        self.volume.mkdir(parents=True)
        self.port = 0
        self._ready_file = place / "server.url"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "trainmount_files.server", str(self.directory)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--token", TOKEN]
        command += ["--ready-file", str(self._ready_file)]
        self._ready_file.unlink(missing_ok=True)
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(self._ready_file.exists, "the server is ready")
        self.port = int(self._ready_file.read_text().strip().rpartition(":")[2].strip("/"))

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(WAIT_SECONDS)
            self._process = None

    @property
    def secrets(self) -> dict[str, str]:
        return {"DATABRICKS_HOST": f"http://127.0.0.1:{self.port}", "DATABRICKS_TOKEN": TOKEN}


@pytest.fixture
def volumes(place: Path) -> Iterator[Volumes]:
    volumes = Volumes(place)
    volumes.start()
    yield volumes
    volumes.stop()


class Reader:
    """A program that reads a file of the pattern through the daemon until it is stopped."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", READER, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.num_reads = 0
        self._thread = threading.Thread(target=self._count)
        self._thread.start()

    def _count(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), 4096):
            self.num_reads += len(chunk)

    def assert_goes_on(self) -> None:
        seen = self.num_reads

        def is_further() -> bool:
            assert self._process.poll() is None, self._process.communicate()[1].decode()
            return self.num_reads > seen + 20

        wait_until(is_further, "the reader goes on")

    def stop(self) -> None:
        assert self._process.poll() is None, self._process.communicate()[1].decode()
        self._process.kill()
        self._process.wait(WAIT_SECONDS)
        self._thread.join()
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()


def test_a_job_outlives_its_daemon_and_the_plugin_and_leaves_nothing(
    place: Path, plugin: Plugin, volumes: Volumes
) -> None:
    (volumes.volume / "pattern").write_bytes(PATTERN)
    target = place / "pods" / "p1" / "mount"
    source = "/Volumes/main/default/data"
    plugin.publish(target, source, secrets=volumes.secrets)
    descriptors = plugin.num_descriptors()
    (target / "written").write_bytes(b"through the target")
    assert (volumes.volume / "written").read_bytes() == b"through the target"
    assert (target / "pattern").read_bytes() == PATTERN

    reader = Reader(target / "pattern")
    reader.assert_goes_on()
    os.kill(plugin.daemon_pid(), signal.SIGKILL)
    reader.assert_goes_on()

    plugin.kill()
    reader.assert_goes_on()
    supervisor = plugin.supervisor_pid()
    table = mounts_below(place)
    plugin.start()
    reader.assert_goes_on()
    daemon = plugin.daemon_pid()
    for _ in range(3):
        plugin.publish(target, source, secrets=volumes.secrets)
    assert mounts_below(place) == table
    assert (plugin.supervisor_pid(), plugin.daemon_pid()) == (supervisor, daemon)
    os.kill(daemon, signal.SIGKILL)
    reader.assert_goes_on()
    reader.stop()

    # A second pod shares the mount, and keeps it when the first goes.
    other = place / "pods" / "p2" / "mount"
    plugin.publish(other, source, secrets=volumes.secrets)
    assert len(plugin.folders()) == 1
    plugin.unpublish(target)
    assert (other / "written").read_bytes() == b"through the target"
    plugin.unpublish(other)
    assert mounts_below(place) == []
    assert plugin.folders() == []
    assert not target.exists()
    assert not is_alive(supervisor)
    assert TOKEN not in plugin.log.read_text()
    # The first publication's own two (the descriptor and the keeper's socket) are gone again.
    wait_until(lambda: plugin.num_descriptors() <= descriptors - 2, "descriptors are closed")


def test_a_read_only_pod_cannot_write_where_another_can(
    place: Path, plugin: Plugin, store: Path
) -> None:
    reader, writer = place / "r", place / "w"
    plugin.publish(reader, f"file://{store}", readonly=True)
    plugin.publish(writer, f"file://{store}")
    assert len(plugin.folders()) == 1
    with pytest.raises(OSError, match="Read-only file system"):
        (reader / "new").write_bytes(b"x")
    (writer / "new").write_bytes(b"x")
    assert (store / "new").read_bytes() == b"x"
    with pytest.raises(grpc.RpcError) as caught:
        plugin.publish(reader, f"file://{store}")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    plugin.unpublish(reader)
    plugin.unpublish(writer)


def test_a_wrong_token_and_a_missing_volume_are_one_clear_line_before_any_mount(
    place: Path, plugin: Plugin, volumes: Volumes
) -> None:
    target = place / "t"
    wrong = {**volumes.secrets, "DATABRICKS_TOKEN": "dapi-wrong"}
    source = "/Volumes/main/default/data"
    missing = "/Volumes/main/default/nothing"
    code = grpc.StatusCode
    for secrets, name, expected, words in (
        (wrong, source, code.UNAUTHENTICATED, "does not take the token"),
        (volumes.secrets, missing, code.NOT_FOUND, f"{missing} at http://127.0.0.1"),
        ({}, source, code.INVALID_ARGUMENT, "nodePublishSecretRef"),
        (volumes.secrets, "s3:/nowhere", code.INVALID_ARGUMENT, "must be s3://bucket"),
        (volumes.secrets, "ftp://nowhere", code.INVALID_ARGUMENT, "must be /Volumes["),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            plugin.publish(target, name, secrets=secrets)
        assert caught.value.code() is expected
        message = caught.value.details() or ""
        assert words in message
        assert "\n" not in message
        assert "dapi-" not in message
    assert plugin.folders() == []
    assert not target.exists()
    assert "dapi-" not in plugin.log.read_text()


def test_unpublish_is_an_error_while_busy_and_fine_any_number_of_times(
    place: Path, plugin: Plugin, store: Path
) -> None:
    target = place / "t"
    plugin.publish(target, f"file://{store}")
    with (target / "pattern").open("rb"):
        with pytest.raises(grpc.RpcError) as caught:
            plugin.unpublish(target)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "in use" in (caught.value.details() or "")
        assert str(target) in mounts_below(place)
    plugin.unpublish(target)
    plugin.unpublish(target)
    # As after a crash between the unmount and the removal of the directory.
    target.mkdir()
    plugin.unpublish(target)
    assert not target.exists()
    plugin.publish(target, f"file://{store}")
    assert (target / "pattern").read_bytes() == PATTERN
    plugin.unpublish(target)
    # What is not ours is not emptied.
    target.mkdir()
    (target / "data").write_text("x")
    with pytest.raises(grpc.RpcError):
        plugin.unpublish(target)
    assert (target / "data").read_text() == "x"


def test_a_supervisor_that_dies_is_replaced_under_a_reader(
    place: Path, plugin: Plugin, store: Path
) -> None:
    target = place / "t"
    plugin.publish(target, f"file://{store}")
    reader = Reader(target / "pattern")
    reader.assert_goes_on()
    supervisor = plugin.supervisor_pid()
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: plugin.supervisor_pid() != supervisor, "a new supervisor")
    reader.assert_goes_on()
    reader.stop()
    plugin.unpublish(target)
    assert plugin.folders() == []


def test_a_mount_that_lost_both_its_processes_is_made_afresh_at_the_next_publish(
    place: Path, plugin: Plugin, store: Path
) -> None:
    target, other = place / "t", place / "u"
    plugin.publish(target, f"file://{store}")
    plugin.publish(other, f"file://{store}")
    supervisor = plugin.supervisor_pid()
    plugin.kill()
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: not is_alive(supervisor), "the supervisor is gone")
    with pytest.raises(OSError) as caught:
        (target / "pattern").read_bytes()
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    plugin.start()
    plugin.publish(target, f"file://{store}")
    assert (target / "pattern").read_bytes() == PATTERN
    plugin.unpublish(other)
    assert (target / "pattern").read_bytes() == PATTERN
    plugin.unpublish(target)
    assert plugin.folders() == []


def test_new_credentials_reach_the_daemon_of_a_published_volume(
    place: Path, plugin: Plugin, volumes: Volumes
) -> None:
    (volumes.volume / "pattern").write_bytes(PATTERN)
    target = place / "t"
    source = "/Volumes/main/default/data"
    plugin.publish(target, source, secrets=volumes.secrets)
    table = mounts_below(place)
    before = plugin.daemon_pid()
    renewed = {**volumes.secrets, "DATABRICKS_TOKEN": "dapi-renewed"}
    plugin.publish(target, source, secrets=renewed)

    def has_successor() -> bool:
        return not is_alive(before) and plugin.daemon_pid() != before

    wait_until(has_successor, "a daemon with the new credentials")
    # The server does not take the new token, which shows that the daemon uses it.
    with pytest.raises(OSError):
        (target / "never-read").read_bytes()
    plugin.publish(target, source, secrets=volumes.secrets)
    wait_until(lambda: readable(target / "pattern"), "the right token works again")
    assert mounts_below(place) == table
    plugin.unpublish(target)
    assert plugin.folders() == []


def readable(path: Path) -> bool:
    try:
        return path.read_bytes() == PATTERN
    except OSError:
        return False


def test_bytes_that_could_not_be_uploaded_outlive_the_unpublish(
    place: Path, plugin: Plugin, store: Path
) -> None:
    # A store that is full, until it is made larger.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "full", str(store)], check=True)
    target = place / "t"
    plugin.publish(target, f"file://{store}")
    content = random.Random(1).randbytes(300_000)
    with pytest.raises(OSError):
        (target / "precious").write_bytes(content)
    plugin.unpublish(target)
    assert mounts_below(place) == [str(store)]
    assert len(plugin.folders()) == 1
    # Neither a restart nor the plugin's own tidying takes it.
    plugin.kill()
    plugin.start()
    assert len(plugin.folders()) == 1
    subprocess.run(["mount", "-o", "remount,size=64m", str(store)], check=True)
    plugin.publish(target, f"file://{store}")
    wait_until((store / "precious").exists, "the bytes are uploaded")
    assert (store / "precious").read_bytes() == content
    plugin.unpublish(target)
    wait_until(lambda: plugin.folders() == [], "the folder is gone")
    LinuxMounter().unmount(store)


def test_statistics_come_back_even_where_the_daemon_hangs(
    place: Path, plugin: Plugin, store: Path
) -> None:
    target = place / "t"
    plugin.publish(target, f"file://{store}")
    answer = plugin.statistics(target)
    assert not answer.volume_condition.abnormal
    assert {usage.unit for usage in answer.usage} == {1, 2}
    assert all(usage.total >= 0 and usage.available >= 0 for usage in answer.usage)
    daemon = plugin.daemon_pid()
    os.kill(daemon, signal.SIGSTOP)
    try:
        assert plugin.statistics(target).volume_condition.abnormal
        # Asking does not keep the volume in use.
        LinuxMounter().unmount(target)
    finally:
        os.kill(daemon, signal.SIGCONT)
    with pytest.raises(grpc.RpcError) as caught:
        plugin.statistics(place / "elsewhere")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    plugin.unpublish(target)


def test_a_node_without_the_device_says_so(place: Path, store: Path) -> None:
    devices = "mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/urandom c 1 9"
    hide = f'mount -t tmpfs none /dev && {devices} && exec "$@"'
    plugin = Plugin(place / "root", command_prefix=("unshare", "--mount", "sh", "-c", hide, "sh"))
    plugin.start()
    try:
        with pytest.raises(grpc.RpcError) as caught:
            plugin.publish(place / "t", f"file://{store}")
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "/dev/fuse is missing" in (caught.value.details() or "")
    finally:
        plugin.clean_up()
