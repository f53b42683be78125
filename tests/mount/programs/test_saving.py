"""Checkpoints saved by the usual libraries, on a mount as on a disk."""

from __future__ import annotations

import contextlib
import csv
import errno
import hashlib
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trainmount_fuse.session.mounting import find_mount

MAPPED_MIB = int(os.environ.get("TRAINMOUNT_TEST_MAPPED_MIB", "64"))
"""In CI a share; a long run maps 256."""


@pytest.mark.quotes(
    "safetensors, `torch.save`, DCP | what is saved is what is loaded; DCP also by two nodes",
)
def test_every_way_to_save_gives_back_the_same_tensors(places, run):
    lines = places.both(lambda folder: run("save_program.py", folder)).splitlines()
    digests = [line.split() for line in lines[:5]]
    assert [way for way, _ in digests] == ["safetensors", "torch", "mapped", "dcp", "consolidated"]
    assert len({digest for _, digest in digests}) == 1
    on_disk = (places.on_disk / "model.safetensors").read_bytes()
    assert (places.volume / "model.safetensors").read_bytes() == on_disk
    assert not (places.volume / "model.pt.tmp").exists()


@pytest.fixture
def nodes(start_mount, files_server):
    """Two mounts of one volume."""
    environment = files_server.environment()
    return [
        start_mount(files_server.source, name=f"node{number}", environment=environment).mountpoint
        for number in range(2)
    ]


def on_nodes(folders: list[Path], action: str) -> list[tuple[int, str]]:
    """Exit code and output of one rank a folder, at the same time."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(__file__).with_name("two_nodes_program.py")

    def rank(number: int) -> tuple[int, str]:
        environment = {"RANK": str(number), "WORLD_SIZE": str(len(folders))}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        done = subprocess.run(
            [sys.executable, program, action, folders[number] / "step-1"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr * bool(done.returncode)

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(rank, range(len(folders))))


@pytest.mark.quotes(
    "safetensors, `torch.save`, DCP | what is saved is what is loaded; DCP also by two nodes",
)
def test_a_checkpoint_of_two_nodes_is_whole_for_both_and_for_one(nodes, files_server):
    names = "['.metadata', '__0_0.distcp', '__1_0.distcp']"
    expected = [(0, f"{rank} {names} True\n") for rank in range(2)]
    assert on_nodes(nodes, "save") == expected
    assert on_nodes(nodes, "load") == [(0, "0 True\n"), (0, "1 True\n")]
    assert on_nodes(nodes[1:], "load") == [(0, "0 True\n")]
    (files_server.volume / "step-1/__1_0.distcp").unlink()
    code, output = on_nodes(nodes[:1], "load")[0]
    assert code == 1
    assert "__1_0.distcp" in output


class Waits(threading.Thread):
    """Looks how long threads of this process wait where no signal reaches them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_seconds = 0.0
        self._ends = threading.Event()

    def run(self) -> None:
        since: dict[tuple[str, str], float] = {}
        while not self._ends.wait(0.05):
            now, waiting = time.monotonic(), {}
            for task in Path("/proc/self/task").iterdir():
                with contextlib.suppress(OSError):
                    lines = (task / "status").read_text().splitlines()
                    fields = dict(line.split(":\t") for line in lines if ":\t" in line)
                    if fields["State"].startswith("D"):
                        # The same number of switches is the same wait.
                        key = (task.name, fields["voluntary_ctxt_switches"])
                        waiting[key] = since.get(key, now)
                        self.longest_seconds = max(self.longest_seconds, now - waiting[key])
            since = waiting

    def __enter__(self) -> Waits:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join()


@contextlib.contextmanager
def background_limited(mount, folder: Path, num_requests: int) -> Iterator[None]:
    """Let the kernel have so many requests under way that no program waits for by itself, such as
    those of read-ahead and of pages."""
    minor = find_mount(mount.mountpoint).device_minor
    folder.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "fusectl", str(folder)], check=True)
    try:
        knobs = folder / str(minor)
        (knobs / "max_background").write_text(f"{num_requests}\n")
        (knobs / "congestion_threshold").write_text(f"{num_requests}\n")
        assert (knobs / "max_background").read_text() == f"{num_requests}\n"
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_eight_threads_fault_in_the_pages_of_eight_shards(places, files_server, tmp_path):
    """Of a slow store, and with more pages asked for than the kernel lets be asked for at once."""
    if os.getuid() != 0:
        pytest.skip("needs root to set what the kernel lets be under way")
    expected = {}
    for number in range(8):
        tensor = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(number))
        save_file({"weight": tensor}, places.volume / f"shard-{number}.safetensors")
        expected[number] = hashlib.sha256(tensor.numpy()).hexdigest()
    faults = tmp_path / "faults.json"
    slow = [{"route": route, "latency_ms": 30} for route in ("presigned_get", "get_file")]
    faults.write_text(json.dumps(slow))
    files_server.stop()
    files_server.start("--faults", str(faults))
    together = threading.Barrier(8)

    def load(number: int) -> tuple[int, str]:
        path = places.on_mount / f"shard-{number}.safetensors"
        with safe_open(path, framework="pt") as shard:
            together.wait()
            return number, hashlib.sha256(shard.get_tensor("weight").numpy()).hexdigest()

    with (
        background_limited(places.mount, tmp_path / "fusectl", 2),
        Waits() as waits,
        ThreadPoolExecutor(8) as threads,
    ):
        assert dict(threads.map(load, range(8))) == expected
    assert waits.longest_seconds < 5


@pytest.mark.quotes(
    "`np.memmap` | windows read by eight workers; written, flushed and opened again",
)
def test_a_written_memory_map_is_there_when_it_is_opened_again(places):
    shape = (MAPPED_MIB, 1 << 18)
    path = places.on_mount / "activations.bin"
    written = np.memmap(path, dtype=np.uint32, mode="w+", shape=shape)
    for row in range(shape[0]):
        written[row] = np.arange(shape[1], dtype=np.uint32) + row
    written.flush()
    del written
    again = np.memmap(path, dtype=np.uint32, mode="r", shape=shape)
    for row in (0, 1, MAPPED_MIB // 2, MAPPED_MIB - 1):
        assert np.array_equal(again[row], np.arange(shape[1], dtype=np.uint32) + row)
    del again
    stored = np.memmap(places.volume / "activations.bin", dtype=np.uint32, mode="r", shape=shape)
    assert int(stored.sum(dtype=np.uint64)) == sum(
        (shape[1] - 1) * shape[1] // 2 + row * shape[1] for row in range(shape[0])
    )


def test_a_file_of_another_disk_is_moved_by_a_copy_that_is_whole_when_it_is_there(places, tmp_path):
    source = tmp_path / "epoch=3.ckpt"
    content = os.urandom(1 << 20)
    source.write_bytes(content)
    target = places.on_mount / source.name
    with pytest.raises(OSError) as refused:
        source.rename(target)
    assert refused.value.errno == errno.EXDEV
    assert not target.exists()
    shutil.move(source, target)
    assert not source.exists()
    assert (places.volume / source.name).read_bytes() == content


def test_a_table_that_grows_by_a_row_at_a_time_has_all_rows_in_the_store(places):
    path = places.on_mount / "metrics.csv"
    for step in range(5):
        with path.open("a", newline="") as file:
            csv.writer(file).writerow([step, step / 4])
    rows = (places.volume / "metrics.csv").read_text().splitlines()
    assert rows == ["0,0.0", "1,0.25", "2,0.5", "3,0.75", "4,1.0"]


def test_a_map_whose_upload_fails_tells_the_program(start_mount, files_server, tmp_path):
    faults = tmp_path / "faults.json"
    faults.write_text("[]")
    files_server.stop()
    files_server.start("--faults", str(faults))
    environment = files_server.environment()
    mount = start_mount(files_server.source, environment=environment)
    path = mount.mountpoint / "lost.bin"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        faults.write_text('[{"route": "put_file", "status": 403}]')
        mapped[:4] = b"new!"
        with pytest.raises(PermissionError):
            mapped.flush()
        with pytest.raises(PermissionError):
            os.fsync(file.fileno())
        faults.write_text("[]")
        mapped.flush()
    assert (files_server.volume / "lost.bin").read_bytes() == b"new!" + bytes((1 << 20) - 4)
