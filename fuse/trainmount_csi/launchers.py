"""Starting and stopping the process that serves a mount. Called by the daemons.

`Launcher` is the protocol; `ProcessLauncher` starts a plain process, for machines without an API
server and for tests; `mount_pods.PodLauncher` starts a pod.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Final, Protocol

from trainmount_csi.daemon_spec import DaemonFolder

__all__ = ["Launcher", "ProcessLauncher", "serve_command"]

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05


class Launcher(Protocol):
    """Runs one supervisor a daemon. Every method may be called from any thread, for one daemon by
    one at a time."""

    owner_uid: int
    """Who the supervisor runs as, and whom its folder belongs to."""

    serves_node_directories: bool
    """A `file://` source means the same directory to the supervisor as to the plugin."""

    changed: threading.Event
    """Set by the launcher when a supervisor may have gone; cleared by who looks."""

    def ensure(self, folder: DaemonFolder) -> None:
        """Start a supervisor unless one runs. Does not wait until it serves.

        Raises:
            Unavailable: it cannot be started now.
        """
        ...

    def is_running(self, folder: DaemonFolder) -> bool:
        """A supervisor exists that may hold the mount's descriptor."""
        ...

    def stop(self, folder: DaemonFolder, timeout_seconds: float) -> bool:
        """Ask for an ordered end, in which files not yet uploaded are; wait and tell whether it is
        over.

        May be called again to go on waiting.
        """
        ...

    def describe(self, folder: DaemonFolder) -> str:
        """How far the supervisor has come, in words for a pod's event."""
        ...

    def close(self) -> None:
        """Free what the launcher itself holds; supervisors go on."""
        ...


def serve_command(folder: DaemonFolder) -> list[str]:
    """Arguments for the Python that runs the supervisor. They hold no credential."""
    addresses = ["--keeper", str(folder.keeper_address), "--reclaim", str(folder.reclaim_address)]
    return ["-m", "trainmount_fuse", "serve", *addresses]


class ProcessLauncher:
    """Supervisors as plain processes of the plugin's own user, which outlive the plugin."""

    serves_node_directories = True

    def __init__(self) -> None:
        self.owner_uid = os.getuid()
        self.changed = threading.Event()
        self._lock = threading.Lock()
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by pid; guarded by _lock
        self._watched: set[int] = set()  # pids that have a thread; guarded by _lock

    def ensure(self, folder: DaemonFolder) -> None:
        running = self._pid(folder)
        if running is not None:
            # Perhaps one of an earlier plugin process, of which nothing is known yet.
            self._watch(running)
            return
        process = subprocess.Popen(
            [sys.executable, *serve_command(folder)],
            stdin=subprocess.DEVNULL,
            # A session of its own: a signal to the plugin's terminal is not for it.
            start_new_session=True,
            close_fds=True,
            env=_environment_without_credentials(),
        )
        with self._lock:
            self._children[process.pid] = process
        identity = {"pid": process.pid, "start_ticks": _start_ticks(process.pid)}
        partial = folder.pid_path.with_suffix(".partial")
        partial.write_text(json.dumps(identity), encoding="utf-8")
        partial.replace(folder.pid_path)
        self._watch(process.pid)
        logger.info("supervisor started", extra={"daemon": folder.daemon_id, "pid": process.pid})

    def is_running(self, folder: DaemonFolder) -> bool:
        return self._pid(folder) is not None

    def stop(self, folder: DaemonFolder, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        pid = self._pid(folder)
        if pid is not None:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                return True
        while self._pid(folder) is not None:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def describe(self, folder: DaemonFolder) -> str:
        pid = self._pid(folder)
        return "its process has ended" if pid is None else f"its process {pid} is starting"

    def close(self) -> None:
        self.changed.set()

    def _watch(self, pid: int) -> None:
        """Have `changed` set when the process ends, by one thread a process."""
        with self._lock:
            if pid in self._watched:
                return
            self._watched.add(pid)
        threading.Thread(
            target=self._await_end, args=(pid,), name="supervisor", daemon=True
        ).start()

    def _await_end(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                poller = select.poll()
                poller.register(descriptor, select.POLLIN)
                poller.poll()
            finally:
                os.close(descriptor)
        with self._lock:
            self._watched.discard(pid)
        self.changed.set()

    def _pid(self, folder: DaemonFolder) -> int | None:
        """The living supervisor, also one that an earlier plugin process started."""
        try:
            identity = json.loads(folder.pid_path.read_text(encoding="utf-8"))
            pid, start_ticks = int(identity["pid"]), identity["start_ticks"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with self._lock:
            child = self._children.get(pid)
            if child is not None and child.poll() is not None:
                del self._children[pid]
        # A pid alone may belong to another process by now.
        return pid if start_ticks is not None and _start_ticks(pid) == start_ticks else None


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None where it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, so count from its end; see proc_pid_stat(5).
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _environment_without_credentials() -> dict[str, str]:
    # What the plugin itself was started with is not the identity of any volume.
    return {key: value for key, value in os.environ.items() if not key.startswith("DATABRICKS_")}
