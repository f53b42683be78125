"""The CSI project's own suite against the driver, whole."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_csi.mounts import LinuxMounter

WAIT_SECONDS = 60
BINARY_VARIABLE = "TRAINMOUNT_CSI_SANITY"


def binary() -> str | None:
    """Where csi-sanity is: named by the variable, on PATH, or built by the test cluster's rig."""
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        return named
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    built = sorted(cache.glob("trainmount/**/csi-sanity"))
    found = (str(path) for path in built if os.access(path, os.X_OK))
    return shutil.which("csi-sanity") or next(found, None)


pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
    pytest.mark.skipif(binary() is None, reason=f"needs csi-sanity; set {BINARY_VARIABLE}"),
]


@pytest.fixture
def place() -> Iterator[Path]:
    # Short, because the path of a Unix socket may have 107 bytes.
    path = Path(tempfile.mkdtemp(prefix="csi-", dir="/tmp")).resolve()
    yield path
    left = [e.mount_point for e in LinuxMounter().entries() if e.mount_point.is_relative_to(path)]
    for mount_point in reversed(left):
        LinuxMounter().unmount(mount_point, lazy=True)
    shutil.rmtree(path)
    assert left == []


@pytest.fixture
def endpoint(place: Path) -> Iterator[str]:
    address = f"unix://{place}/root/csi.sock"
    command = [sys.executable, "-m", "trainmount_csi", "--endpoint", address, "--node-id", "n"]
    command += ["--root", str(place / "root"), "--daemons", "process"]
    log_path = place / "plugin.log"
    with log_path.open("wb") as log:
        plugin = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (place / "root" / "csi.sock").exists():
            assert plugin.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)
        yield address
    finally:
        plugin.terminate()
        assert plugin.wait(WAIT_SECONDS) == 0, log_path.read_text()


def test_the_driver_passes_csi_sanity_whole(place: Path, endpoint: str) -> None:
    (place / "store").mkdir()
    parameters = place / "parameters.yaml"
    parameters.write_text(f'source: "file://{place}/store"\n')
    executable = binary()
    assert executable is not None
    done = subprocess.run(
        [
            executable,
            f"--csi.endpoint={endpoint}",
            f"--csi.testvolumeparameters={parameters}",
            f"--csi.mountdir={place}/target",
            f"--csi.stagingdir={place}/staging",
            "--ginkgo.no-color",
        ],
        capture_output=True,
        text=True,
        cwd=place,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    summary = re.search(r"Ran (\d+) of \d+ Specs", done.stdout)
    assert summary is not None
    # Fewer would mean that the driver had stopped announcing what it can do.
    assert int(summary[1]) >= 32, done.stdout[-2000:]
    # The suite deletes what it made.
    assert [p.name for p in (place / "store").iterdir() if not p.name.startswith(".")] == []
