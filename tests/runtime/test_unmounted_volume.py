"""The same checkpoints where the volume is not mounted: straight through the client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainmount.data import UCVolumeReader, UCVolumeWriter
from trainmount.locations import is_local

VOLUME = "/Volumes/main/default/runtime"
START_DEADLINE_SECONDS = 60


@pytest.fixture(scope="module")
def served(tmp_path_factory: Any) -> Iterator[Path]:
    """The directory behind `VOLUME`, served by a local Files API server."""
    root = tmp_path_factory.mktemp("served")
    directory = root / "main" / "default" / "runtime"
    directory.mkdir(parents=True)
    ready = root.parent / "url"
    arguments = [
        "--host",
        "127.0.0.1",
        "--port",
        "0",
        "--token",
        "secret",
        "--ready-file",
        str(ready),
    ]
    patch = pytest.MonkeyPatch()
    with subprocess.Popen(
        [sys.executable, "-m", "trainmount_files.server", str(root), *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as server:
        deadline = time.monotonic() + START_DEADLINE_SECONDS
        while not ready.exists():
            assert server.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        patch.setenv("DATABRICKS_HOST", ready.read_text().strip())
        patch.setenv("DATABRICKS_TOKEN", "secret")
        patch.setenv("DATABRICKS_CONFIG_FILE", os.devnull)
        yield directory
        patch.undo()
        server.terminate()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_checkpoints_are_streamed_committed_verified_and_removed(served: Path) -> None:
    writer = UCVolumeWriter(f"{VOLUME}/saved", thread_count=2, keep_last=1)
    for number in (1.0, 2.0):
        # More than a part of an upload, so that the shard goes up as several.
        dcp.save(
            {"big": torch.full((5, 1 << 20), number), "small": torch.ones(3)}, storage_writer=writer
        )
    assert sorted(path.name for path in (served / "saved").iterdir()) == [writer.generation]
    state = {"big": torch.zeros(5, 1 << 20), "small": torch.zeros(3)}
    dcp.load(state, storage_reader=UCVolumeReader(f"{VOLUME}/saved"))
    assert torch.equal(state["big"], torch.full((5, 1 << 20), 2.0))
    assert torch.equal(state["small"], torch.ones(3))
    shard = served / "saved" / writer.generation / "r00000-000.bin"
    content = bytearray(shard.read_bytes())
    content[3_000_000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointException, match=r"r00000-000.bin is damaged: big does not match"):
        dcp.load(state, storage_reader=UCVolumeReader(f"{VOLUME}/saved"))


def test_a_path_is_local_unless_its_volume_is_not_mounted(tmp_path: Path) -> None:
    assert is_local(str(tmp_path))
    assert is_local("relative")
    assert is_local("file:///tmp")
    assert not is_local(VOLUME)
    assert not is_local("dbfs:/Volumes/main/default/runtime")
