"""Mounts for tests: processes of the real command line, ended and cleaned up whatever a test
leaves."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainmount_fuse.session.mounting import MountError, find_mount, unmount

DEADLINE_SECONDS = 60.0
"""Far above what anything here takes; a test that gets there has found something that never
happens."""

FUSE_DEVICE = Path("/dev/fuse")
NOBODY = 65534


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[..., Any]:
    """`wait_until(condition, what)` polls until the condition is true and returns what it said."""
    return wait_until


def wait_until(condition: Callable[[], Any], what: str = "a condition") -> Any:
    """Poll until `condition` is true and return what it said."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true in {DEADLINE_SECONDS:g} s")
        time.sleep(0.02)


@dataclass
class MountProcess:
    """A holder in the foreground, and what it says of itself."""

    mountpoint: Path
    folder: Path
    """Beside the mount: ready file, log, cache, state."""

    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def ready_file(self) -> Path:
        return self.folder / "ready.json"

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> dict[str, Any]:
        assert self.process is not None
        process = self.process
        wait_until(lambda: self.ready_file.exists() or process.poll() is not None, "the mount")
        assert process.poll() is None, self.log
        return self.ready()

    def ready(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.ready_file.read_text(encoding="utf-8"))
        return document

    def status(self) -> dict[str, Any]:
        """What `trainmount status` says of it; nothing while a successor takes no commands yet."""
        command = [sys.executable, "-m", "trainmount_cli", "status", str(self.mountpoint)]
        done = subprocess.run(
            [*command, "-o", "json"], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            return {}
        (found,) = json.loads(done.stdout)["data"]["mounts"]
        status: dict[str, Any] = found
        return status

    def kill_daemon(self) -> None:
        """Kill the daemon like the out-of-memory killer does, and wait until its successor
        answers."""
        pid = self.ready()["daemon_pid"]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.ready()["daemon_pid"] != pid, "a successor")

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_SECONDS)

    def is_mounted(self) -> bool:
        return find_mount(self.mountpoint) is not None

    def clean(self) -> None:
        """End what is left, whatever state it is in."""
        process = self.process
        if process is not None and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DEADLINE_SECONDS)
            process.kill()
            process.wait()
        while self.is_mounted():
            with contextlib.suppress(MountError):
                unmount(self.mountpoint, lazy=True)


@pytest.fixture(scope="session", autouse=True)
def _fuse_device() -> None:
    if not FUSE_DEVICE.exists():
        pytest.skip("needs /dev/fuse")


@pytest.fixture
def start_mount(tmp_path: Path) -> Iterator[Callable[..., MountProcess]]:
    """`start_mount(source, *options, prefix=(), environment={})` mounts at `tmp_path/mnt` and
    waits until it answers.

    `wait=False` returns at once; `python` is the interpreter, `name` the folder's name, `root` its
    parent. With `toy` a fault of session_toy_holder.py, that is what is mounted.
    """
    with make_mounts(tmp_path) as start:
        yield start


@contextlib.contextmanager
def make_mounts(folder: Path) -> Iterator[Callable[..., MountProcess]]:
    """What `start_mount` is, below `folder`."""
    started: list[MountProcess] = []

    def start(
        source: str,
        *options: str,
        name: str = "mnt",
        prefix: Sequence[str] = (),
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        wait: bool = True,
        root: Path = folder,
        toy: str | None = None,
    ) -> MountProcess:
        mountpoint = root / name
        files = root / f"{name}.files"
        files.mkdir(exist_ok=True)
        mountpoint.mkdir(exist_ok=True)
        program = ["-m", "trainmount_fuse"]
        if toy is not None:
            program = [str(Path(__file__).with_name("session_toy_holder.py")), toy]
        command = [*prefix, python, *program, "mount", source, str(mountpoint)]
        command += ["--foreground", "--ready-file", str(files / "ready.json")]
        command += ["--cache-dir", str(files / "cache"), "--state-dir", str(files / "state")]
        mount = MountProcess(mountpoint, files, [*command, *options], environment or {})
        started.append(mount)
        mount.start()
        if wait:
            mount.wait_ready()
        return mount

    try:
        yield start
    finally:
        for mount in started:
            mount.clean()


@contextlib.contextmanager
def _device_mode(wanted: int) -> Iterator[None]:
    mode = FUSE_DEVICE.stat().st_mode & 0o777
    if mode == wanted:
        yield
        return
    if os.getuid() != 0:
        pytest.skip(f"/dev/fuse has not mode {wanted:o}, and only root can change that")
    FUSE_DEVICE.chmod(wanted)
    try:
        yield
    finally:
        FUSE_DEVICE.chmod(mode)


@pytest.fixture
def open_fuse_device() -> Iterator[None]:
    """/dev/fuse as distributions have it: everybody may open it."""
    with _device_mode(0o666):
        yield


@pytest.fixture
def closed_fuse_device() -> Iterator[None]:
    """/dev/fuse for root only."""
    with _device_mode(0o600):
        yield


@dataclass(frozen=True)
class Unprivileged:
    """How to run Python as an ordinary user."""

    prefix: tuple[str, ...]
    python: str
    environment: dict[str, str]

    def run(
        self, *arguments: str, timeout: float = DEADLINE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, self.python, *arguments],
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )


@pytest.fixture(scope="session")
def nobody() -> Iterator[Unprivileged]:
    """User 65534 with no group and no capability, and an interpreter that this user can run."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv to become another user")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [one for one in sys.path if one]
    for python in (sys.executable, f"/usr/bin/{version}"):
        if (user := _unprivileged(python, places)) is not None:
            yield user
            return
    # Neither the interpreter nor the checkout may be reached: they are shown at places that can.
    with _shown_to_everybody([sys.base_prefix, *places]) as (base, *shown):
        user = _unprivileged(f"{base}/bin/{version}", shown, LD_LIBRARY_PATH=f"{base}/lib")
        assert user is not None, "user 65534 can run no interpreter that has pyfuse3"
        yield user


def _unprivileged(python: str, places: Sequence[str], **variables: str) -> Unprivileged | None:
    """None if the user cannot run `python`, or cannot import the mount from `places`."""
    prefix = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
    environment = {
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": "/nonexistent",
        **variables,
    }
    # `env` stands between, because setpriv itself may still start what the user may not.
    probe = Unprivileged((*prefix, "env"), python, environment)
    with contextlib.suppress(OSError):
        if probe.run("-c", "import pyfuse3, trio, trainmount_fuse").returncode == 0:
            return Unprivileged(prefix, python, environment)
    return None


@contextlib.contextmanager
def _shown_to_everybody(folders: Sequence[str]) -> Iterator[list[str]]:
    """Bind mounts of `folders` below a folder that everybody may enter."""
    view = Path(tempfile.mkdtemp(prefix="trainmount-view-"))
    view.chmod(0o755)
    mounted: list[Path] = []
    shown: list[str] = []
    try:
        for number, folder in enumerate(folders):
            if not Path(folder).is_dir():
                shown.append(folder)
                continue
            place = view / str(number)
            place.mkdir()
            subprocess.run(["mount", "--bind", folder, str(place)], check=True)
            mounted.append(place)
            shown.append(str(place))
        yield shown
    finally:
        for place in reversed(mounted):
            subprocess.run(["umount", "--lazy", str(place)], check=True)
        shutil.rmtree(view)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that everybody may enter and write, unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="trainmount-test-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


class FilesServer:
    """The local Files API, with the volume main.default.data; may go and come back."""

    source = "/Volumes/main/default/data"

    def __init__(self, folder: Path) -> None:
        self._store = folder / "store"
        self._ready = folder / "url"
        self._port = 0
        self.process: subprocess.Popen[bytes] | None = None
        self.volume = self._store / "main/default/data"
        """What is in the volume, beside the mount."""
        self.volume.mkdir(parents=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def environment(self, token: str = "right") -> dict[str, str]:
        """For a process that uses it."""
        return {"DATABRICKS_HOST": self.url, "DATABRICKS_TOKEN": token}

    def start(self, *options: str, token: str = "right") -> None:
        """Serve, at the same address as before."""
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "trainmount_files.server", str(self._store)]
        command += ["--port", str(self._port), "--token", token, "--ready-file", str(self._ready)]
        self.process = process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        wait_until(lambda: self._ready.exists() or process.poll() is not None, "the server")
        self._port = int(self._ready.read_text().strip().rpartition(":")[2])

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def files_server(tmp_path: Path) -> Iterator[FilesServer]:
    """A Files API that answers."""
    server = FilesServer(tmp_path)
    server.start()
    yield server
    server.stop()


class Counted:
    """A program of this folder that works until its standard input ends, and counts what went
    well."""

    def __init__(self, program: str, where: Path, counter: Path, prefix: Sequence[str]) -> None:
        self._counter = counter
        counter.write_bytes(bytes(8))
        counter.chmod(0o666)
        path = str(Path(__file__).with_name(program))
        self.process = subprocess.Popen(
            [*prefix, path, str(where), str(counter)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def count(self) -> int:
        return int.from_bytes(self._counter.read_bytes(), "little")

    def wait_for_more(self, more: int = 50) -> None:
        """Wait until `more` further pieces of work went well."""
        goal = self.count + more
        wait_until(lambda: self.count >= goal or self.process.poll() is not None, "further work")
        assert self.process.poll() is None, self.process.communicate()[0]

    def finish(self) -> str:
        """End it and return what it said; fails where anything in it failed or was wrong."""
        output, _ = self.process.communicate("", timeout=DEADLINE_SECONDS)
        assert self.process.returncode == 0, output
        return output

    def clean(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def run_counted(tmp_path: Path) -> Iterator[Callable[..., Counted]]:
    """`run_counted(program, where)` starts session_reader.py or session_writer.py.

    `prefix` is a command that starts Python, `root` a folder that this user may write.
    """
    running: list[Counted] = []

    def start(
        program: str,
        where: Path,
        prefix: Sequence[str] = (sys.executable,),
        root: Path = tmp_path,
    ) -> Counted:
        running.append(Counted(program, where, root / f"counter-{len(running)}", prefix))
        return running[-1]

    yield start
    for one in running:
        one.clean()


@pytest.fixture
def read_at_random(run_counted: Callable[..., Counted]) -> Callable[..., Counted]:
    """`read_at_random(file)` checks a file whose every 8-byte word is its own offset."""
    return functools.partial(run_counted, "session_reader.py")
