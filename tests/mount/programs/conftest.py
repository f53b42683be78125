"""Programs run twice, on a mount of a volume and on a local disk, and must say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.environments import streaming_python

PROGRAM_SECONDS = 240


@dataclass(frozen=True)
class Places:
    """Two folders that a program must not be able to tell apart."""

    mount: Any
    on_mount: Path
    on_disk: Path
    volume: Path
    """What the store has of the mount."""

    def both(self, run: Callable[[Path], Any]) -> Any:
        """What `run` says of the mount, which must be what it says of the disk."""
        expected = run(self.on_disk)
        assert run(self.on_mount) == expected
        return expected


@pytest.fixture
def places(start_mount: Callable[..., Any], files_server: Any, tmp_path: Path) -> Places:
    """A mount over the local Files API, and a folder on the disk."""
    mount = start_mount(files_server.source, environment=files_server.environment())
    on_disk = tmp_path / "disk"
    on_disk.mkdir()
    return Places(mount, mount.mountpoint, on_disk, files_server.volume)


def run(
    *command: str | Path, environment: dict[str, str] | None = None, python: str = sys.executable
) -> str:
    """What a program of this folder, or a command, prints; fails where it fails."""
    first, *rest = (str(one) for one in command)
    is_ours = first.endswith("_program.py")
    start = [python, str(Path(__file__).parent / first)] if is_ours else [first]
    done = subprocess.run(
        [*start, *rest],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(name="run")
def _run() -> Callable[..., str]:
    """`run(program, *arguments, environment={}, python=...)`."""
    return run


@pytest.fixture(name="streaming_python", scope="session")
def _streaming_python() -> str:
    """An interpreter that has MosaicML's streaming."""
    return streaming_python()
