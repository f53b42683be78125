"""What a run needs besides its nodes: the Files API server over the data directory, and a mount for
each volume. Called by `agent`.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_cli.local.children import Children
from trainmount_cli.local.processes import ProcessTable
from trainmount_cli.local.progress import Progress
from trainmount_cli.local.store import RunFolder

__all__ = ["ServiceError", "Services", "WantedMount"]

_START_SECONDS: Final = 120.0
"""For a server or a mount to be ready, on a machine that is busy with something else."""

_STOP_SECONDS: Final = 150.0
"""For a mount to upload what was written; above the 120 seconds it gives itself."""

_MAX_SERVER_STARTS: Final = 20

_POLL_SECONDS: Final = 0.1


class ServiceError(Exception):
    """The server or a mount does not start; one line, taken from its own log."""


@dataclass(frozen=True, kw_only=True)
class WantedMount:
    """One volume of the job."""

    path: Path
    source: str
    read_only: bool


class Services:
    """The server and the mounts, from `start` to `stop`."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        children: Children,
        table: ProcessTable,
        progress: Progress,
        data: Path,
        volumes: Sequence[str],
        mounts: Sequence[WantedMount],
    ) -> None:
        """`volumes`: `catalog.schema.volume` names to create in `data`."""
        self._folder = folder
        self._children = children
        self._table = table
        self._progress = progress
        self._data = data
        self._volumes = volumes
        self._mounts = [
            _Mount(number, wanted, folder.path / "mounts" / str(number))
            for number, wanted in enumerate(mounts)
        ]
        self._token = secrets.token_urlsafe(24)
        self._server_pid = 0
        self._server_starts = 0

    @property
    def environment(self) -> dict[str, str]:
        """With which a program reaches the server; overrides whatever account the user has."""
        return {
            "DATABRICKS_HOST": self._progress.server_url,
            "DATABRICKS_TOKEN": self._token,
            "DATABRICKS_AUTH_TYPE": "pat",
            "DATABRICKS_CONFIG_FILE": os.devnull,
        }

    @property
    def pids(self) -> set[int]:
        """Of the server and the holders, in this namespace."""
        return {self._server_pid, *(mount.pid for mount in self._mounts)} - {0}

    def start(self) -> None:
        """Server first, then every mount. Raises ServiceError."""
        self._start_server(port=0)
        for mount in self._mounts:
            self._start_mount(mount)
        self._await_mounts(self._mounts)

    def tend(self) -> str | None:
        """Start again what died and note new process ids. Called every moment.

        Returns a sentence if a mount was lost, so that the attempt cannot go on; `mend` is next.

        Raises:
            ServiceError: the server does not stay up.
        """
        if not self._children.is_running(self._server_pid):
            port = int(self._progress.server_url.rpartition(":")[2])
            self._start_server(port=port)
            self._progress.note(
                "ServerRestarted", "the Files API server died and was started again"
            )
        for mount in self._mounts:
            if not self._children.is_running(mount.pid):
                return f"the mount of {mount.wanted.path} was lost"
            if mount.has_news():
                self._note_mounts()
                self._progress.note(
                    "DaemonRestarted",
                    f"the daemon of {mount.wanted.path} died; a new one serves on",
                )
        return None

    def mend(self) -> None:
        """Mount again what was lost. No process of an attempt may live. Raises ServiceError."""
        lost = [mount for mount in self._mounts if not self._children.is_running(mount.pid)]
        for mount in lost:
            self._start_mount(mount)
        self._await_mounts(lost)

    def stop(self) -> list[str]:
        """Unmount, which uploads what was written, then end the server.

        Returns a sentence for every mount that did not end well; its files wait in the run's
        folder.
        """
        for mount in self._mounts:
            self._signal(mount.pid, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_SECONDS
        problems = []
        for mount in self._mounts:
            while mount.pid and self._children.is_running(mount.pid):
                if time.monotonic() > deadline:
                    self._signal(mount.pid, signal.SIGKILL)
                self._children.wait(_POLL_SECONDS)
            code = self._children.exit_codes.get(mount.pid, 0)
            if code != 0:
                problems.append(
                    f"{mount.wanted.path} was not unmounted in order (exit code {code}): "
                    f"files not uploaded wait in {mount.folder}"
                )
        self._signal(self._server_pid, signal.SIGTERM)
        deadline = time.monotonic() + _START_SECONDS
        while self._server_pid and self._children.is_running(self._server_pid):
            self._children.wait(_POLL_SECONDS)
            if time.monotonic() > deadline:
                break  # the namespace ends it
        return problems

    def _start_server(self, *, port: int) -> None:
        if self._server_starts >= _MAX_SERVER_STARTS:
            raise ServiceError("the Files API server keeps dying; see logs/server.log")
        self._server_starts += 1
        ready = self._folder.path / "server.url"
        ready.unlink(missing_ok=True)
        log = self._folder.logs / "server.log"
        command = [sys.executable, "-m", "trainmount_files.server", str(self._data)]
        command += ["--port", str(port), "--ready-file", str(ready)]
        for volume in self._volumes:
            command += ["--volume", volume]
        # In the environment: an argument is for everybody to read.
        environment = {**os.environ, "TRAINMOUNT_SERVE_TOKEN": self._token}
        self._server_pid = self._children.start(
            command, log=log, environment=environment, directory=self._folder.path
        )
        self._await(self._server_pid, ready, log)
        self._progress.server_url = ready.read_text(encoding="utf-8").strip()
        self._progress.pids["server"] = self._table.outer_pid(self._server_pid)

    def _start_mount(self, mount: _Mount) -> None:
        mount.ready.unlink(missing_ok=True)
        mount.folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "trainmount_fuse", "mount"]
        command += [mount.wanted.source, str(mount.wanted.path), "--foreground"]
        command += ["--state-dir", str(mount.folder / "state")]
        command += ["--cache-dir", str(mount.folder / "cache")]
        command += ["--ready-file", str(mount.ready)]
        if mount.wanted.read_only:
            command.append("--read-only")
        mount.pid = self._children.start(
            command,
            log=mount.log(self._folder),
            environment={**os.environ, **self.environment},
            directory=self._folder.path,
        )

    def _await_mounts(self, mounts: Sequence[_Mount]) -> None:
        for mount in mounts:
            self._await(mount.pid, mount.ready, mount.log(self._folder))
            mount.has_news()
        self._note_mounts()

    def _note_mounts(self) -> None:
        outer = {pid: process.outer_pid for pid, process in self._table.descendants().items()}
        self._progress.pids["mounts"] = [
            {
                "path": str(mount.wanted.path),
                "holder": outer.get(mount.pid),
                "daemon": outer.get(mount.daemon_pid),
            }
            for mount in self._mounts
        ]

    def _await(self, pid: int, ready: Path, log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not ready.exists():
            if not self._children.is_running(pid):
                raise ServiceError(_last_line(log))
            if time.monotonic() > deadline:
                raise ServiceError(f"not ready after {_START_SECONDS:.0f} s; see {log}")
            if self._children.is_stopping:
                raise ServiceError("stopped before it was ready")
            self._children.wait(_POLL_SECONDS)

    def _signal(self, pid: int, number: signal.Signals) -> None:
        if pid and self._children.is_running(pid):
            os.kill(pid, number)


class _Mount:
    """One mount and what its ready file said last."""

    def __init__(self, number: int, wanted: WantedMount, folder: Path) -> None:
        self.wanted = wanted
        self.folder = folder
        """State, cache and ready file; kept, since files not uploaded wait here."""
        self.ready = folder / "ready.json"
        self.pid = 0
        """The holder's."""
        self.daemon_pid = 0
        self._number = number

    def log(self, run: RunFolder) -> Path:
        return run.logs / f"mount-{self._number}.log"

    def has_news(self) -> bool:
        """Read the ready file; whether another daemon serves than before."""
        try:
            document: Mapping[str, Any] = json.loads(self.ready.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return False  # no daemon just now
        before, self.daemon_pid = self.daemon_pid, int(document["daemon_pid"])
        return self.daemon_pid != before


def _last_line(log: Path) -> str:
    """What a program said last: its one line, or the end of its traceback."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    line = lines[-1] if lines else "it ended without a word"
    return line.removeprefix("trainmount: ").removeprefix("trainmount serve: ")
