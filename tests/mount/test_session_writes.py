"""What was written is in the volume, whatever happens to the daemon."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_KILLS = 6
STAGING = ".trainmount-staging"
"""The folder in which a directory volume prepares files; no file of anybody's."""


def _tree(folder: Path) -> dict[str, str | None]:
    """What is in a volume, read beside the mount."""
    found: dict[str, str | None] = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if name.split("/")[0] != STAGING:
            content = None if path.is_dir() else path.read_bytes()
            found[name] = None if content is None else hashlib.sha256(content).hexdigest()
    return found


@pytest.fixture
def volume(tmp_path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.mark.quotes(
    "When the daemon dies, hangs or is replaced by `trainmount remount`, no system call fails; "
    "they wait.",
)
def test_six_kills_lose_nothing_that_was_acknowledged_and_fail_no_write(
    start_mount, run_counted, volume
):
    mount = start_mount(f"file://{volume}")
    writer = run_counted("session_writer.py", mount.mountpoint)
    for _ in range(NUM_KILLS):
        writer.wait_for_more(3)
        mount.kill_daemon()
    writer.wait_for_more(3)
    expected = json.loads(writer.finish().splitlines()[-1])
    assert _tree(volume) == expected
    assert mount.stop() == 0
    assert _tree(volume) == expected


def test_a_file_that_is_open_at_a_kill_is_written_to_the_end(start_mount, volume):
    mount = start_mount(f"file://{volume}")
    with (mount.mountpoint / "log").open("ab", buffering=0) as file:
        for number in range(4):
            file.write(b"%d\n" % number * 10_000)
            mount.kill_daemon()
        os.fsync(file.fileno())
        assert (volume / "log").read_bytes() == b"".join(b"%d\n" % n * 10_000 for n in range(4))
    assert mount.stop() == 0


@pytest.mark.quotes(
    "The end of a mount sends them; what it cannot send is named and kept, and the exit status is "
    "74.",
)
def test_sigterm_uploads_what_is_written_and_not_closed(start_mount, volume):
    mount = start_mount(f"file://{volume}")
    program = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(file, b"not closed")
print("written", flush=True)
sys.stdin.read()
os._exit(0)
"""
    path = str(mount.mountpoint / "open")
    with subprocess.Popen(
        [sys.executable, "-c", program, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writing:
        assert writing.stdout is not None
        assert writing.stdout.readline() == "written\n"
        assert not (volume / "open").exists() or (volume / "open").read_bytes() == b""
        assert mount.stop() == 0
        writing.communicate("")
    assert (volume / "open").read_bytes() == b"not closed"
    assert not mount.is_mounted()


def test_what_a_killed_holder_had_not_uploaded_is_uploaded_by_the_next_mount(start_mount, volume):
    mount = start_mount(f"file://{volume}")
    file = os.open(mount.mountpoint / "late", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"written before the machine went down")
    mount.process.kill()
    mount.process.wait()
    # The mount is dead; that is what the program sees, too.
    with contextlib.suppress(OSError):
        os.close(file)
    mount.ready_file.unlink()
    mount.start()
    mount.wait_ready()
    assert (mount.mountpoint / "late").read_bytes() == b"written before the machine went down"
    assert mount.stop() == 0
    assert (volume / "late").read_bytes() == b"written before the machine went down"


def test_the_mount_ends_in_the_background_too_and_its_log_tells(tmp_path, volume):
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "trainmount_fuse", "mount", f"file://{volume}"]
    done = subprocess.run(
        [*command, str(mountpoint)], env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    (mountpoint / "file").write_text("here")
    subprocess.run(["umount", str(mountpoint)], check=True)
    assert (volume / "file").read_text() == "here"
    log = next((tmp_path / "trainmount/log").iterdir())
    assert "serving" in log.read_text()
    _wait_unlocked(next((tmp_path / "trainmount/state").glob("*.lock")))


def _wait_unlocked(lock: Path) -> None:
    """The holder of a mount in the background has ended."""
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)


@pytest.mark.quotes(
    "PyTorch `DataLoader` | epochs of several workers, while the daemon is killed",
)
def test_parallel_readers_of_a_data_loader_notice_no_kill(start_mount, volume, tmp_path):
    for number in range(200):
        (volume / f"{number:03}").write_bytes(number.to_bytes(4, "little") * 5000)
    mount = start_mount(f"file://{volume}")
    program = f"""
import pathlib, sys, warnings
warnings.simplefilter("ignore")
import torch.utils.data

class Files(torch.utils.data.Dataset):
    def __init__(self):
        self.paths = sorted(pathlib.Path({str(mount.mountpoint)!r}).glob("[0-9]*"))
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, index):
        data = self.paths[index].read_bytes()
        assert data == index.to_bytes(4, "little") * 5000, index
        return index

for epoch in range(3):
    loader = torch.utils.data.DataLoader(Files(), batch_size=10, num_workers=2, shuffle=True)
    seen = [int(index) for batch in loader for index in batch]
    assert sorted(seen) == list(range(200))
    print(epoch, flush=True)
    sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as training:
        assert training.stdout is not None
        assert training.stdin is not None
        for epoch in range(3):
            # Whenever it comes, before the loader starts or in its midst.
            mount.kill_daemon()
            assert training.stdout.readline() == f"{epoch}\n"
            training.stdin.write("\n")
            training.stdin.flush()
        assert training.wait(60) == 0
    assert mount.stop() == 0
