"""Mounts without root: in a user namespace, and through fusermount3."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from trainmount_fuse.session.commands import ask_holder
from trainmount_fuse.session.mounting import find_mount
from trainmount_fuse.session.registry import find_record

NOBODY = 65534


@pytest.fixture
def place(open_path) -> Path:
    for name in ("volume", "mnt", "mnt.files"):
        (open_path / name).mkdir()
        os.chown(open_path / name, NOBODY, NOBODY)
    return open_path


def test_an_ordinary_user_mounts_in_a_namespace_of_their_own_and_survives_kills(
    start_mount, nobody, place, open_fuse_device, read_at_random
):
    if subprocess.run([*nobody.prefix, "unshare", "--user", "true"], check=False).returncode:
        pytest.skip("this kernel gives ordinary users no namespace")
    mount = start_mount(
        f"file://{place}/volume",
        prefix=(*nobody.prefix, "unshare", "--user", "--map-root-user", "--mount"),
        python=nobody.python,
        environment=nobody.environment,
        root=place,
        toy="none",
    )
    # Nobody outside the namespace sees the mount, so the reader goes in.
    pid = str(mount.process.pid)
    inside = (*nobody.prefix, "nsenter", "--user", "--mount", "--preserve-credentials", "-t", pid)
    assert find_mount(mount.mountpoint) is None
    enter = (*inside, "env", *_assignments(nobody), nobody.python)
    reader = read_at_random(mount.mountpoint / "f", prefix=enter, root=place)
    for _ in range(2):
        reader.wait_for_more()
        mount.kill_daemon()
    reader.wait_for_more()
    reader.finish()
    assert mount.stop() == 0


def _assignments(nobody) -> list[str]:
    return [f"{name}={value}" for name, value in nobody.environment.items()]


def test_an_ordinary_user_mounts_through_fusermount3(start_mount, nobody, place, open_fuse_device):
    if shutil.which("fusermount3") is None:
        pytest.skip("needs fusermount3")
    mount = start_mount(
        f"file://{place}/volume",
        prefix=nobody.prefix,
        python=nobody.python,
        environment=nobody.environment,
        root=place,
        toy="none",
    )
    found = find_mount(mount.mountpoint)
    assert found is not None
    assert found.filesystem_type == "fuse.trainmount"
    # Root's commands find it, and are told that it works with less.
    record = find_record(mount.mountpoint)
    assert record is not None
    assert (record.holder_pid, record.uid) == (mount.process.pid, NOBODY)
    status = ask_holder(record, {"want": "status"})
    assert status["mounted_by"] == "fusermount3"
    assert status["kernel"]["read_ahead_kib"] == 128
    assert "by='fusermount3'" in mount.log
    command = [*nobody.prefix, "cat", str(mount.mountpoint / "f")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as reading:
        assert reading.stdout is not None
        assert reading.stdout.read(16) == (0).to_bytes(8, "little") + (8).to_bytes(8, "little")
        mount.kill_daemon()
        assert len(reading.stdout.read(1 << 20)) == 1 << 20
        reading.send_signal(signal.SIGKILL)
    assert mount.stop() == 0
    assert not mount.is_mounted()
