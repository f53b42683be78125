"""The folder of a run: everything that is known about it, for whoever comes later.

    $XDG_STATE_HOME/trainmount/        (~/.local/state/trainmount)
      volumes/                         the default data directory: catalog/schema/volume
      runs/<run-id>/
        spec.json                      {"v", "manifest", "dataDirectory"}: what `--resume` starts
        from status.json                    below; replaced in one step
        events.jsonl                   {"ts", "reason", "message", "attempt"} a line
        lock                           held by the supervisor while it lives
        code/  parameters.yaml         CODE_SOURCE_PATH and HYPERPARAMETERS_PATH
        logs/attempt-<n>/node-<rank>.log, logs/server.log, logs/mount-<n>.log, logs/supervisor.log
        mounts/<n>/                    state and cache of a mount

`status.json` is the status of a TrainingJob (`conditions`, `attempts`, `retries`, …, as in a
cluster) with these fields besides. Process ids are the machine's:

    {"v": 1, "runId": "digits-20260102-030405", "jobName": "digits",
     "dataDirectory": "…/trainmount/volumes",
     "server": {"url": "http://127.0.0.1:40001"},
     "pids": {
       "supervisor": 101,              kill -9 of it ends everything of the run at once
       "init": 102,                    first process of the run's namespaces
       "server": 103,                  the Files API server
       "mounts": [{"path": "/Volumes/main/default/digits", "holder": 104, "daemon": 105}],
       "nodes": [{"rank": 0, "pid": 106}, {"rank": 1, "pid": 107}]}}

A node's pid is the bash that runs `command`; the launcher and its ranks are below it. `nodes` is
empty between attempts, `pids` after the end. Each of `attempts` has `nodes`: [{"rank", "exitCode"}]
besides.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from trainmount_cli.errors import CliError

__all__ = ["RunFolder", "RunStore", "default_data_directory", "remove", "write_whole"]

_RUN_ID: Final = re.compile(r"[a-z0-9][-a-z0-9.]*")
# A reader that asks whether somebody lives holds the lock for a moment.
_LOCK_SECONDS: Final = 2.0

_NODE_LOG: Final = re.compile(r"node-(\d+)\.log")


class RunFolder:
    """One run. Written by its supervisor alone once that lives; read by anybody."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = path / "code"
        self.parameters = path / "parameters.yaml"
        self.logs = path / "logs"
        self.scratch_root = path / "root"

    @property
    def run_id(self) -> str:
        return self.path.name

    def read_spec(self) -> dict[str, Any]:
        return _read(self.path / "spec.json")

    def write_spec(self, document: dict[str, Any]) -> None:
        write_whole(self.path / "spec.json", json.dumps(document, indent=1))

    def read_status(self) -> dict[str, Any]:
        """Empty before the supervisor wrote it for the first time."""
        try:
            return _read(self.path / "status.json")
        except FileNotFoundError:
            return {}

    def write_status(self, document: dict[str, Any]) -> None:
        write_whole(self.path / "status.json", json.dumps(document, indent=1))

    def append_event(self, reason: str, message: str, attempt: int | None) -> None:
        event = {"ts": _now(), "reason": reason, "message": message, "attempt": attempt}
        line = json.dumps(event) + "\n"
        # One write of a short line: a reader never sees half of it.
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(line)

    def read_events(self) -> list[dict[str, Any]]:
        try:
            text = (self.path / "events.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    def attempt_logs(self, attempt: int) -> Path:
        return self.logs / f"attempt-{attempt}"

    def node_logs(self, attempt: int) -> dict[int, Path]:
        """Log files by node rank; a node that never started has none."""
        try:
            files = list(self.attempt_logs(attempt).iterdir())
        except FileNotFoundError:
            return {}
        matches = ((_NODE_LOG.fullmatch(file.name), file) for file in files)
        return {int(match[1]): file for match, file in sorted(matches, key=str) if match}

    def num_attempts(self) -> int:
        """Attempts that have logs."""
        return sum(1 for _ in self.logs.glob("attempt-*"))

    def lock(self) -> int | None:
        """Become the supervisor: a descriptor to keep, or None while another one lives."""
        fd = self._open_lock()
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(fd, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                os.close(fd)
                return None
            time.sleep(0.05)
        return fd

    def is_alive(self) -> bool:
        """Whether a supervisor lives. Says nothing about how far it is."""
        fd = self._open_lock()
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _open_lock(self) -> int:
        return os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


class RunStore:
    """All runs of this user."""

    def __init__(self, state: Path | None = None) -> None:
        self.state = state or _state_directory()
        self._runs = self.state / "runs"

    def create(self, job_name: str) -> RunFolder:
        """A new empty folder, named after the job and the time."""
        base = f"{job_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._runs.mkdir(parents=True, exist_ok=True)
        for suffix in ("", *(f"-{number}" for number in range(2, 1000))):
            with contextlib.suppress(FileExistsError):
                # Logs may hold what a program prints, and programs print secrets.
                (self._runs / f"{base}{suffix}").mkdir(mode=0o700)
                folder = RunFolder(self._runs / f"{base}{suffix}")
                folder.logs.mkdir()
                folder.scratch_root.mkdir()
                return folder
        raise CliError(f"too many runs of {job_name} in one second", code="CONFLICT")

    def find(self, name: str) -> RunFolder:
        """By run id, or the newest run of a job by its name. Raises CliError."""
        if _RUN_ID.fullmatch(name):
            if (self._runs / name / "spec.json").exists():
                return RunFolder(self._runs / name)
            newest = next(self._of_job(name), None)
            if newest is not None:
                return newest
        hint = "see `trainmount list --local`"
        raise CliError(f"there is no run or job {name!r} on this machine; {hint}", code="NOT_FOUND")

    def all(self) -> list[RunFolder]:
        """Newest first."""
        folders = [RunFolder(spec.parent) for spec in self._runs.glob("*/spec.json")]
        return sorted(
            folders, key=lambda folder: (folder.path / "spec.json").stat().st_mtime_ns, reverse=True
        )

    def live_run_of(self, job_name: str) -> RunFolder | None:
        return next((f for f in self._of_job(job_name) if f.is_alive()), None)

    def _of_job(self, job_name: str) -> Iterator[RunFolder]:
        return (folder for folder in self.all() if _job_name(folder) == job_name)


def default_data_directory() -> Path:
    """Where the volumes of runs live unless `--data` says otherwise."""
    return _state_directory() / "volumes"


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def remove(folder: RunFolder) -> None:
    """Forget a run that never started."""
    shutil.rmtree(folder.path, ignore_errors=True)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _state_directory() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "trainmount"


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def _job_name(folder: RunFolder) -> str:
    name = folder.read_spec()["manifest"]["metadata"]["name"]
    assert isinstance(name, str)
    return name


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
