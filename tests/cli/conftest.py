"""`trainmount` as a program, with a state directory of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainmount_cli.app import main

DEADLINE_SECONDS = 90.0


class Trainmount:
    """Runs commands; ends what they leave running when the test is over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "XDG_STATE_HOME": str(folder / "state"),
            "HOME": str(folder),
            "KUBECONFIG": str(folder / "no-kubeconfig"),
        }

    def __call__(
        self, *arguments: str, status: int | None = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end and compare the exit status; None is any."""
        done = subprocess.run(
            self.command(*arguments),
            env={**self.environment, **environment},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert "Traceback" not in done.stderr, done.stderr
        assert status in (None, done.returncode), done
        return done

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "trainmount_cli", *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def data(self, *arguments: str) -> dict[str, Any]:
        """The data of a JSON envelope."""
        document = json.loads(self(*arguments, "-o", "json").stdout)
        assert document["v"] == 1
        data = document["data"]
        assert isinstance(data, dict)
        return data

    def write_job(self, command: str, *others: dict[str, Any], **spec: Any) -> str:
        """A file with a job of one node, unless `spec` says otherwise."""
        job = {
            "apiVersion": "trainmount.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "trial"},
            "spec": {
                "experimentName": "trial",
                "compute": {"numAccelerators": 1, "acceleratorsPerNode": 1},
                "command": command,
                **spec,
            },
        }
        path = self.folder / "job.yaml"
        path.write_text(yaml.safe_dump_all([*others, job]))
        return str(path)

    def run_folders(self) -> list[Path]:
        return sorted((self.folder / "state/trainmount/runs").glob("*"))

    def status(self) -> dict[str, Any]:
        """`status.json` of the only run; empty before it is there."""
        for folder in self.run_folders():
            if (folder / "status.json").exists():
                document = json.loads((folder / "status.json").read_text())
                assert isinstance(document, dict)
                return document
        return {}


def wait_until(condition: Callable[[], Any], what: str = "the condition") -> Any:
    """What the condition gave, once that is true."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.05)
    return value


@pytest.fixture
def trainmount(tmp_path: Path) -> Iterator[Trainmount]:
    program = Trainmount(tmp_path)
    yield program
    for folder in program.run_folders():
        if (folder / "status.json").exists():
            status = json.loads((folder / "status.json").read_text())
            pid = status["pids"].get("supervisor")
            command = Path(f"/proc/{pid}/cmdline")
            if pid and command.exists() and str(folder).encode() in command.read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def in_process(
    trainmount: Trainmount, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A command without a process of its own, for those that refuse before they start anything."""

    def call(
        *arguments: str, status: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        for name, value in {**trainmount.environment, **environment}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(trainmount.folder)
        monkeypatch.setattr(sys, "argv", ["trainmount", *arguments])
        capsys.readouterr()
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        else:
            code = 0
        printed = capsys.readouterr()
        done = subprocess.CompletedProcess(arguments, code, printed.out, printed.err)
        assert code == status, done
        return done

    return call


@pytest.fixture
def until() -> Callable[..., Any]:
    return wait_until
