"""What benchmarks work on: a local server over a directory, its mounts, files of known bytes.

All of it is gone when the `with` ends, whatever happened inside. Called by the topics.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from measure import MIB, Sample, Timing, peak_mib_of, processor_seconds_of, reset_peak

from trainmount_fuse.session.mounting import MountError, find_mount, unmount

__all__ = [
    "ROOT",
    "UNCHANGED_DATA",
    "Mount",
    "Reachable",
    "Store",
    "end_process",
    "link_tree",
    "mounted",
    "sample_with",
    "serving",
    "wait_until",
    "write_blocks",
    "write_files",
    "write_names",
]

ROOT: Final = "/Volumes/main/default/benchmark"

UNCHANGED_DATA: Final = ("--read-only", "--metadata-timeout=300", "--open-timeout=300")
"""Options of a mount of data that nobody changes: names are believed for five minutes."""

_TOKEN: Final = "dapi-benchmark-only"  # of a server that lives as long as the benchmark
_DEADLINE_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.005
_NAMES_A_FILE: Final = 30_000
"""Hard links of one file; ext4 allows 65,000."""


class Reachable(Protocol):
    """A store that processes find by their environment."""

    @property
    def environment(self) -> Mapping[str, str]: ...


@dataclass(frozen=True, kw_only=True)
class Store:
    """A running server and the directory that it serves as the volume `ROOT`."""

    url: str
    directory: Path
    faults: Path
    pid: int

    @property
    def environment(self) -> Mapping[str, str]:
        """What the SDK, the client and the mount find the server by."""
        return {"DATABRICKS_HOST": self.url, "DATABRICKS_TOKEN": _TOKEN}

    def set_latency(self, milliseconds: float) -> None:
        """Let every request wait so long before it is served, from now on."""
        rules = [{"latency_ms": milliseconds}] if milliseconds else []
        temporary = self.faults.with_suffix(".new")
        temporary.write_text(json.dumps(rules))
        temporary.replace(self.faults)


@contextmanager
def serving(folder: Path, *, fsync: bool = False) -> Iterator[Store]:
    """A server of its own process over `folder`/served.

    It does not fsync what is uploaded unless told to: the store shall cost as little as it can, so
    that the ratios show the clients.
    """
    folder.mkdir(parents=True)
    served, ready, faults = folder / "served", folder / "ready", folder / "faults.json"
    directory = served / ROOT.removeprefix("/Volumes/")
    directory.mkdir(parents=True)
    faults.write_text("[]")
    command = [sys.executable, "-m", "trainmount_files.server", str(served)]
    command += [] if fsync else ["--no-fsync"]
    command += ["--faults", str(faults), "--ready-file", str(ready)]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "TRAINMOUNT_SERVE_TOKEN": _TOKEN}
        )
    try:
        wait_until(ready.exists, server, folder / "server.log", "the local server")
        url = ready.read_text().strip()
        yield Store(url=url, directory=directory, faults=faults, pid=server.pid)
    finally:
        end_process(server)


@dataclass(kw_only=True)
class Mount:
    """A mount and the process that holds it."""

    path: Path
    folder: Path
    """Its cache, state, log and ready file."""
    command: list[str]
    environment: Mapping[str, str]
    holder: subprocess.Popen[bytes] | None = None

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def daemon_pid(self) -> int:
        return int(json.loads((self.folder / "ready.json").read_text())["daemon_pid"])

    @property
    def pids(self) -> list[int]:
        """The holder and its descendants, of which the daemon is one."""
        assert self.holder is not None
        found = [self.holder.pid]
        for pid in found:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
            found += [int(child) for child in children.split()]
        return found

    def start(self) -> None:
        """Mount; returns when a daemon answers."""
        ready = self.folder / "ready.json"
        ready.unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.holder = subprocess.Popen(
                self.command, stdout=log, stderr=log, env={**os.environ, **self.environment}
            )
        wait_until(ready.exists, self.holder, self.folder / "log", f"the mount at {self.path}")

    def kill_daemon(self) -> None:
        """As the out-of-memory killer does; returns when a successor answers."""
        assert self.holder is not None
        pid = self.daemon_pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self.daemon_pid != pid, self.holder, self.folder / "log", "a successor")

    def kill(self) -> None:
        """End the mount's processes at once; what is at the mountpoint then is dead."""
        assert self.holder is not None
        self.holder.kill()
        self.holder.wait()

    def sample(self, measure: Callable[[], Timing]) -> Sample:
        """Run something on this mount; with the daemon's peak memory and processor time."""
        return sample_with(self.daemon_pid, measure)

    def remove(self) -> None:
        """End it in order, and by force where that does not go."""
        if self.holder is not None:
            end_process(self.holder)
        while find_mount(self.path) is not None:
            with suppress(MountError):
                unmount(self.path, lazy=True)


@contextmanager
def mounted(
    store: Reachable, folder: Path, options: Sequence[str] = (), source: str = ROOT
) -> Iterator[Mount]:
    """A volume of the store, mounted at `folder`/mnt with an empty cache."""
    path = folder / "mnt"
    path.mkdir(parents=True)
    command = [sys.executable, "-m", "trainmount_fuse", "mount", source, str(path), "--foreground"]
    command += ["--ready-file", str(folder / "ready.json")]
    command += ["--cache-dir", str(folder / "cache"), "--state-dir", str(folder / "state")]
    command += options
    mount = Mount(path=path, folder=folder, command=command, environment=store.environment)
    try:
        mount.start()
        yield mount
    finally:
        mount.remove()


def sample_with(daemon_pid: int, measure: Callable[[], Timing]) -> Sample:
    """Run something that a daemon serves; with that daemon's peak memory and processor time."""
    reset_peak(daemon_pid)
    before = processor_seconds_of(daemon_pid)
    timing = measure()
    return Sample(
        seconds=timing.seconds,
        peak_mib=timing.peak_mib,
        daemon_mib=peak_mib_of(daemon_pid),
        daemon_seconds=processor_seconds_of(daemon_pid) - before,
    )


def write_blocks(path: Path, size_bytes: int) -> None:
    """A file of random bytes in which each MiB begins with its own number (`programs.Checker`)."""
    noise = os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size_bytes // MIB):
            file.write(number.to_bytes(8, "little"))
            file.write(noise[8:])
        file.flush()
        os.fsync(file.fileno())


def write_files(directory: Path, num_files: int, size_bytes: int) -> None:
    """Many small files of random bytes."""
    directory.mkdir(parents=True)
    for number in range(num_files):
        (directory / f"sample-{number:06}").write_bytes(os.urandom(size_bytes))


def write_names(directory: Path, num_files: int) -> None:
    """Very many small files. Some thousands share their bytes, as many as a file may have names."""
    directory.mkdir(parents=True)
    paths = [directory / f"sample-{number:08}" for number in range(num_files)]
    for start in range(0, num_files, _NAMES_A_FILE):
        paths[start].write_bytes(b"some bytes")
        for path in paths[start + 1 : start + _NAMES_A_FILE]:
            path.hardlink_to(paths[start])


def link_tree(source: Path, target: Path) -> None:
    """`source` again under another name, with the same bytes on disk and in memory: to a mount or a
    client these are files that it has never seen.
    """
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir()
        else:
            place.hardlink_to(path)


def wait_until(
    condition: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, what: str
) -> None:
    """Poll. Raises RuntimeError with the end of the log where the process ends before."""
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(_POLL_SECONDS)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask it to end, and insist after a while."""
    process.terminate()
    try:
        process.wait(_DEADLINE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
