"""`trainmount run --local` with volumes: real mounts that only the run sees, as root and as an
ordinary user, through the death of what serves them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DEADLINE_SECONDS = 120.0
MOUNT_POINT = "/Volumes/testing/default/trial"

JOB = """\
apiVersion: trainmount.dev/v1alpha1
kind: TrainingJob
metadata: {name: trial}
spec:
  experimentName: trial
  compute: {numAccelerators: 2, acceleratorsPerNode: 1}
  command: |-
    cd /Volumes/testing/default/trial
    echo "attempt $TRAINMOUNT_ATTEMPT" > attempt-$TRAINMOUNT_ATTEMPT-$NODE_RANK
    cat attempt-$TRAINMOUNT_ATTEMPT-$NODE_RANK
    touch FOLDER/up-$TRAINMOUNT_ATTEMPT-$NODE_RANK
    while [ ! -e FOLDER/go-$TRAINMOUNT_ATTEMPT ]; do
      date > busy-$NODE_RANK; cat busy-$NODE_RANK > /dev/null; sleep 0.1
    done
    cat attempt-0-*
  checkpoint: {graceSeconds: 5}
  volumes: [{path: /Volumes/testing/default/trial}]
"""


class LocalRun:
    """`trainmount` in a folder of the test's own, as some user."""

    def __init__(self, folder: Path, prefix: tuple[str, ...], **environment: str) -> None:
        self.folder = folder
        self._prefix = prefix
        self._environment = {**os.environ, **environment, "XDG_STATE_HOME": str(folder / "state")}
        self.job = folder / "job.yaml"
        self.job.write_text(JOB.replace("FOLDER", str(folder)))
        self.job.chmod(0o644)

    def __call__(self, *arguments: str, status: int = 0) -> str:
        done = subprocess.run(
            [*self._prefix, "-m", "trainmount_cli", *arguments, "--local"],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert done.returncode == status, done
        return done.stdout

    def status(self) -> dict[str, Any]:
        document = json.loads(self("get", "trial", "-o", "json"))["data"]
        assert isinstance(document, dict)
        return document

    def is_up(self, attempt: int) -> bool:
        return all((self.folder / f"up-{attempt}-{rank}").exists() for rank in (0, 1))

    def let_go(self, attempt: int) -> None:
        (self.folder / f"go-{attempt}").touch()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def event_reasons(run: LocalRun) -> list[str]:
    (events,) = run.folder.glob("state/trainmount/runs/*/events.jsonl")
    return [json.loads(line)["reason"] for line in events.read_text().splitlines()]


def stop(run: LocalRun) -> None:
    for path in run.folder.glob("state/trainmount/runs/*/status.json"):
        pid = json.loads(path.read_text())["pids"].get("supervisor")
        command = Path(f"/proc/{pid}/cmdline")
        if pid and command.exists() and str(run.folder).encode() in command.read_bytes():
            os.kill(pid, signal.SIGKILL)


def drive(run: LocalRun) -> None:
    """Start it, kill the daemon, the server and the supervisor, resume, and look at the result."""
    run("run", "-f", str(run.job))
    wait_until(lambda: run.is_up(0))
    assert not Path(MOUNT_POINT).exists()
    pids = run.status()["pids"]
    assert pids["mounts"][0]["path"] == MOUNT_POINT
    os.kill(pids["mounts"][0]["daemon"], signal.SIGKILL)
    wait_until(lambda: "DaemonRestarted" in event_reasons(run))
    os.kill(pids["server"], signal.SIGKILL)
    wait_until(lambda: "ServerRestarted" in event_reasons(run))
    assert run.status()["status"] == "RUNNING"
    assert run.status()["attempt_number"] == 0
    os.kill(run.status()["pids"]["supervisor"], signal.SIGKILL)
    wait_until(lambda: run.status()["status"] == "INTERRUPTED")
    run.let_go(1)

    printed = run("run", "--resume", "trial", "--watch")

    assert printed.count("] attempt 1") == 2
    # What the first attempt wrote is there for the second.
    assert printed.count("] attempt 0") == 4
    assert run.status()["status"] == "SUCCESS"
    data = run.folder / "state/trainmount/volumes/testing/default/trial"
    assert (data / "attempt-1-0").read_text() == "attempt 1\n"


def test_a_run_of_root_goes_on_through_the_death_of_daemon_server_and_supervisor(
    tmp_path: Path,
) -> None:
    run = LocalRun(tmp_path, (sys.executable,))
    try:
        drive(run)
    finally:
        stop(run)


@pytest.mark.usefixtures("open_fuse_device")
def test_a_run_of_an_ordinary_user_goes_on_just_the_same(nobody: Any, open_path: Path) -> None:
    # `env` stands between, because setpriv itself may still start what the user may not.
    prefix = (*nobody.prefix, "env", nobody.python)
    run = LocalRun(open_path, prefix, **nobody.environment)
    try:
        drive(run)
    finally:
        stop(run)


def test_a_lost_mount_costs_an_attempt_and_no_retry(tmp_path: Path) -> None:
    run = LocalRun(tmp_path, (sys.executable,))
    try:
        run("run", "-f", str(run.job))
        wait_until(lambda: run.is_up(0))
        os.kill(run.status()["pids"]["mounts"][0]["holder"], signal.SIGKILL)
        wait_until(lambda: run.is_up(1))
        run.let_go(1)
        run("logs", "trial", "-f")
        status = run.status()
        assert (status["status"], status["retries"], status["interruptions"]) == ("SUCCESS", 0, 1)
    finally:
        stop(run)
