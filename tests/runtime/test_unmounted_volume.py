"""The same loader and checkpoints where the volume is not mounted: straight through the client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from trainmount.data import DataLoader, UCVolumeDataset, UCVolumeReader, UCVolumeWriter
from trainmount.data.cache import FileCache
from trainmount.data.manifest import Entry
from trainmount.errors import DataError, MissingFile
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


def test_paths_lead_to_local_copies_that_stay_until_the_next_batch(
    served: Path, tmp_path: Path, make_files: Callable[[Path, int], list[str]]
) -> None:
    make_files(served / "train", 24)
    dataset = UCVolumeDataset(
        f"{VOLUME}/train", shuffle=True, cache_size_bytes=60, cache_dir=str(tmp_path)
    )
    loader = DataLoader(dataset, 4, num_workers=2)
    delivered = []
    for batch in loader:
        for path in batch:
            name = Path(path).name.partition("-")[2]
            assert Path(path).read_bytes() == (served / "train" / name).read_bytes()
            delivered.append(name)
    assert sorted(delivered) == [f"f{number:03d}" for number in range(24)]
    left = sum(path.stat().st_size for path in tmp_path.glob("*/*"))
    assert left <= 60
    # The position does not depend on how the files are reached.
    mounted = DataLoader(UCVolumeDataset(str(served / "train"), shuffle=True), 4, num_workers=0)
    mounted.load_state_dict(loader.state_dict())
    assert [Path(path).name for path in next(iter(mounted))] != delivered[:4]
    assert mounted.epoch == 1


def test_bytes_and_streams_need_no_more_than_one_copy(
    served: Path, tmp_path: Path, make_files: Callable[[Path, int], list[str]]
) -> None:
    names = make_files(served / "stream", 6)
    options = {"cache_size_bytes": 0, "cache_dir": str(tmp_path)}
    contents = list(UCVolumeDataset(f"{VOLUME}/stream", item="bytes", **options))
    assert contents == [(served / "stream" / name).read_bytes() for name in names]
    assert list(tmp_path.glob("*/*")) == []
    for path in UCVolumeDataset(f"{VOLUME}/stream", **options):
        assert len(Path(path).read_bytes()) == Path(path).stat().st_size
        assert len(list(tmp_path.glob("*/*-f*"))) <= 2


def test_a_file_that_is_gone_and_a_directory_that_never_was_are_told(
    served: Path, make_files: Callable[[Path, int], list[str]]
) -> None:
    make_files(served / "gone", 3)
    dataset = UCVolumeDataset(f"{VOLUME}/gone", item="bytes")
    (served / "gone" / "f001").unlink()
    with pytest.raises(MissingFile, match="/gone/f001 was listed and is gone"):
        list(dataset)
    with pytest.raises(DataError, match=f"cannot list {VOLUME}/never"):
        UCVolumeDataset(f"{VOLUME}/never")


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


# The cache alone


def _read(entry: Entry) -> bytes:
    return b"." * entry.size_bytes


def test_what_is_held_is_never_deleted_and_the_longest_unused_goes_first(tmp_path: Path) -> None:
    cache = FileCache(25, tmp_path)
    cache.open()
    entries = [Entry(f"f{number}", 10) for number in range(5)]
    cache.hold([*entries, entries[0]])
    paths = [Path(cache.path(entry, _read)) for entry in entries]
    cache.release(entries[:3])
    assert [path.exists() for path in paths] == [True] * 5  # f0 is held once more
    cache.release(entries[3:])
    assert [path.exists() for path in paths] == [True, False, False, True, True]
    cache.release(entries[:1])
    assert [path.exists() for path in paths] == [True, False, False, False, True]
    assert cache.held() == []


def test_a_cache_whose_owner_was_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from trainmount.data.cache import FileCache;"
        "cache = FileCache(10, Path(sys.argv[1])); cache.open(); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    living = FileCache(10, tmp_path)
    abandoned = set(tmp_path.iterdir())
    assert len(abandoned) == 1
    living.open()
    owned = set(tmp_path.iterdir())
    assert len(owned) == 1
    assert not owned & abandoned
    FileCache(10, tmp_path).open()
    assert owned <= set(tmp_path.iterdir())


def test_a_path_is_local_unless_its_volume_is_not_mounted(tmp_path: Path) -> None:
    assert is_local(str(tmp_path))
    assert is_local("relative")
    assert is_local("file:///tmp")
    assert not is_local(VOLUME)
    assert not is_local("dbfs:/Volumes/main/default/runtime")
