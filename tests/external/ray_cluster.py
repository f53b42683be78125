"""A Ray cluster of this machine for tests, in an environment of its own: Ray is half a gigabyte.

The environment is made once by uv into the cache; this tree is on its path. Every process of the
cluster, and every file, is below one folder, and gone at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.environments import environment

__all__ = ["RAY_VERSION", "RayCluster", "running_ray_cluster"]

RAY_VERSION = "2.60.0"
TREE = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("ray_job.py")
START_SECONDS = 120
JOB_SECONDS = 120

_JOB: dict[str, Any] = {
    "how": "ours",
    "id": "uid",
    "options": None,
    "source": "files",
    "plan": "",
    "change": "",
    "names": "",
    "mode": "append",
    "gate": 1000,
    "poison": -1,
    "batch": 50,
    "blocks": 12,
    "v2": False,
    "block_bytes": 1 << 20,
    "log": "",
}


@dataclass(frozen=True)
class RayCluster:
    """One that runs."""

    address: str
    python: Path
    environment: dict[str, str]

    def start(self, *jobs: dict[str, Any]) -> subprocess.Popen[str]:
        """A driver that runs these jobs, one after the other."""
        argument = json.dumps([self.address, [_JOB | job for job in jobs]])
        return subprocess.Popen(
            [str(self.python), str(PROGRAM), argument],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *jobs: dict[str, Any]) -> list[dict[str, str]]:
        """How each of the jobs ended: the kind of its error, empty without, and its text."""
        with self.start(*jobs) as driver:
            try:
                said, errors = driver.communicate(timeout=JOB_SECONDS)
            except BaseException:
                driver.kill()
                raise
        ends = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert len(ends) == len(jobs), errors[-4000:]
        return ends


def ray_python() -> Path:
    """The interpreter of an environment with Ray and what the volumes need."""
    packages = [f"ray[data]=={RAY_VERSION}", *_needed()]
    return environment("ray", RAY_VERSION, packages) / "bin" / "python"


def _needed() -> list[str]:
    project = tomllib.loads((TREE / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["bucket"], *extras["fsspec"]]


@contextmanager
def running_ray_cluster(cpus: int) -> Iterator[RayCluster]:
    """Starts one; ends every process of it and removes its files."""
    python = ray_python()
    # Short: there are sockets below it, whose names are at most 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="tm-ray-", dir="/tmp"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **{name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ},
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join(str(TREE / root) for root in ("operator", "fuse", "runtime")),
        "RAY_USAGE_STATS_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(python), "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    command += [f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={folder / 'ray'}"]
    command += ["--node-ip-address=127.0.0.1", "--include-dashboard=false"]
    command += [f"--object-store-memory={200 << 20}", f"--memory={4 << 30}"]
    with (folder / "log").open("wb") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_SECONDS
        while b"Ray runtime started" not in (folder / "log").read_bytes():
            assert head.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield RayCluster(f"127.0.0.1:{port}", python, environment)
    finally:
        _kill_all_of(folder)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _kill_all_of(folder: Path) -> None:
    """Kill the processes that were started with the environment of this cluster."""
    mark = f"TMPDIR={folder}\0".encode()
    while True:
        found = False
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.05)
