"""What somebody who mounts for the first time gets wrong: one line that says what to do, exit code
2, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_fuse.session.mounting import find_mount

MOUNT = (sys.executable, "-m", "trainmount_fuse", "mount")


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with a volume, `volume`, and a mountpoint, `mnt`."""
    for name in ("volume", "mnt"):
        (tmp_path / name).mkdir()
    return tmp_path


def _refusal(
    place: Path, *options: str, source: str | None = None, prefix=(), mountpoint=None, **environment
) -> str:
    """What is said where a mount is refused."""
    where = mountpoint or place / "mnt"
    own = ["--cache-dir", str(place / "cache"), "--state-dir", str(place / "state")]
    command = [*prefix, *MOUNT, source or f"file://{place}/volume", str(where), "--foreground"]
    done = subprocess.run(
        [*command, *own, *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("trainmount: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert find_mount(where) is None
    return done.stderr.removeprefix("trainmount: ")


def test_a_machine_without_the_device_is_told_of_it(place):
    empty_dev = 'mount -t tmpfs none /dev && mknod /dev/null c 1 3 && exec "$@"'
    said = _refusal(place, prefix=("unshare", "--mount", "sh", "-c", empty_dev, "sh"))
    assert said.startswith("/dev/fuse is missing: load the module (modprobe fuse)")
    assert not (place / "state").exists()


def test_an_ordinary_user_without_fusermount3_is_told_of_it(nobody, open_path, open_fuse_device):
    for name in ("volume", "mnt"):
        (open_path / name).mkdir()
        os.chown(open_path / name, 65534, 65534)
    done = subprocess.run(
        [
            *nobody.prefix,
            *("env", "PATH=/nowhere", nobody.python, "-m", "trainmount_fuse", "mount"),
            *(f"file://{open_path}/volume", f"{open_path}/mnt", "--foreground"),
            *("--cache-dir", f"{open_path}/cache", "--state-dir", f"{open_path}/state"),
        ],
        env={**os.environ, **nobody.environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "install fuse3 (fusermount3 is not installed)" in done.stderr.splitlines()[-1]
    assert find_mount(open_path / "mnt") is None


def test_an_ordinary_user_is_told_what_allow_other_needs(nobody, open_path, open_fuse_device):
    if shutil.which("fusermount3") is None:
        pytest.skip("needs fusermount3")
    configuration = Path("/etc/fuse.conf")
    if configuration.exists() and "\nuser_allow_other" in configuration.read_text():
        pytest.skip("user_allow_other is in /etc/fuse.conf")
    for name in ("volume", "mnt"):
        (open_path / name).mkdir()
        os.chown(open_path / name, 65534, 65534)
    os.chown(open_path, 65534, 65534)
    done = nobody.run(
        *("-m", "trainmount_fuse", "mount", "--allow-other", "--foreground"),
        *(f"file://{open_path}/volume", f"{open_path}/mnt"),
        *("--cache-dir", f"{open_path}/cache", "--state-dir", f"{open_path}/state"),
    )
    assert done.returncode == 2
    assert "add the line user_allow_other to /etc/fuse.conf" in done.stderr.splitlines()[-1]
    assert find_mount(open_path / "mnt") is None


@pytest.mark.parametrize("where", ["--foreground", "--read-only"])
def test_a_machine_without_the_libraries_is_told_what_to_install(place, where):
    (place / "path").mkdir()
    (place / "path/sitecustomize.py").write_text("import sys\nsys.modules['pyfuse3'] = None\n")
    said = _refusal(place, where, PYTHONPATH=str(place / "path"))
    assert said.startswith("a mount needs pyfuse3: pip install 'trainmount[fuse]'")


def test_no_workspace_is_configured(place, monkeypatch):
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    said = _refusal(place, source="/Volumes/main/default/data", HOME=str(place))
    assert "set DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile in ~/.databrickscfg" in said
    assert not (place / "state").exists()


@pytest.mark.parametrize(
    ("host", "why"),
    [("http://127.0.0.1:9", "Connection refused"), ("http://no.such.invalid", "no.such.invalid: ")],
)
def test_a_host_that_cannot_be_reached_is_named_with_the_reason(place, host, why):
    credentials = {"DATABRICKS_HOST": host, "DATABRICKS_TOKEN": "any"}
    said = _refusal(place, source="/Volumes/main/default/data", **credentials)
    assert "the store cannot be reached: look at DATABRICKS_HOST" in said
    assert why in said


def test_who_mounts_a_bucket_is_told_of_nothing_of_databricks(place, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    bucket = {"source": "s3://bucket/prefix"}
    said = _refusal(place, "--endpoint", "nowhere", **bucket)
    assert "--endpoint must be http:// or https:// and a host, got 'nowhere'" in said
    said = _refusal(place, "--endpoint", "http://nowhere", "--region", "here", **bucket)
    assert "look at the cloud's variables (AWS_ACCESS_KEY_ID and its like)" in said


def test_a_source_that_is_a_file_is_refused(place, files_server):
    (place / "volume/file").write_text("content")
    (files_server.volume / "file").write_text("content")
    said = _refusal(place, source=f"file://{place}/volume/file")
    assert "director" in said
    credentials = files_server.environment()
    said = _refusal(place, source=f"{files_server.source}/file", **credentials)
    assert "there is no such directory" in said


def test_a_port_for_metrics_that_somebody_has_is_named(place):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        said = _refusal(place, "--metrics-port", address)
    assert said == (
        f"cannot answer Prometheus at {address}: address already in use; name another port "
        "(--metrics-port), or end the program that has it\n"
    )
    said = _refusal(place, "--metrics-port", "no.such.invalid:9101")
    assert said.startswith("cannot answer Prometheus at no.such.invalid:9101: name or service not")


def test_a_mountpoint_that_is_not_empty_is_refused(place):
    (place / "mnt/file").write_text("content")
    said = _refusal(place)
    assert said.startswith(f"mountpoint {place}/mnt is not empty")
    assert (place / "mnt/file").read_text() == "content"
    assert not (place / "state").exists()


def test_a_mountpoint_where_something_else_is_mounted_is_refused(place):
    subprocess.run(["mount", "-t", "tmpfs", "other", str(place / "mnt")], check=True)
    try:
        done = subprocess.run(
            [*MOUNT, f"file://{place}/volume", str(place / "mnt"), "--foreground"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert f"mountpoint {place}/mnt is busy: other is mounted there" in done.stderr
        assert done.stderr.count("\n") == 1
    finally:
        subprocess.run(["umount", str(place / "mnt")], check=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--cache-dir", "{place}/mnt/cache"), "lies inside the mountpoint"),
        (("--state-dir", "{place}/mnt"), "lies inside the mountpoint"),
        (("--state-dir", "{place}"), "lies inside a folder of the mount itself"),
        (("--cache-dir", "{place}/one", "--state-dir", "{place}/one"), "need two folders"),
        (("--cache-size", "12"), "--cache-size must be at least"),
        (("--cache-size", "much"), "'much' is not a size; write 500M or 20Gi"),
        (("--stop-timeout", "soon"), "--stop-timeout"),
        (("--stop-timeout", "-1"), "--stop-timeout"),
        (("--read-ahead-kib", "-1"), "--read-ahead-kib"),
        (("--ready-file", "{place}/none/ready"), "name another file (--ready-file)"),
        (("--ready-file", "{place}"), "is a directory; name another file (--ready-file)"),
    ],
)
def test_folders_and_values_that_cannot_be_are_named(place, options, said):
    assert said in _refusal(place, *(one.format(place=place) for one in options))
    assert list((place / "mnt").iterdir()) == []


def test_a_mountpoint_inside_its_own_source_is_refused(place):
    (place / "volume/mnt").mkdir()
    said = _refusal(place, mountpoint=place / "volume/mnt")
    assert "lies inside" in said


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4M", "disk", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize("option", ["--cache-dir", "--state-dir"])
def test_a_folder_that_cannot_be_written_is_named(place, disk, option):
    (disk / "there").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for name in ("there", "missing"):
        said = _refusal(place, option, str(disk / name))
        assert str(disk / name) in said
        assert "read-only file system" in said
        assert option in said
    (place / "file").write_text("")
    said = _refusal(place, option, str(place / "file/folder"))
    assert said.startswith(f"cannot use {place}/file/folder: not a directory; name another folder")


@pytest.mark.quotes(
    "Reads go on without a cache.",
)
def test_a_cache_disk_that_is_full_costs_the_cache_and_not_the_mount(start_mount, disk, place):
    (place / "volume/file").write_bytes(b"content" * 1000)
    (disk / "cache").mkdir()
    with (disk / "filler").open("wb") as filler:
        filler.write(bytes(3 << 20))
    mount = start_mount(f"file://{place}/volume", "--cache-dir", str(disk / "cache"))
    assert (mount.mountpoint / "file").read_bytes() == b"content" * 1000
    (mount.mountpoint / "new").write_bytes(b"new")
    assert mount.stop() == 0
    assert (place / "volume/new").read_bytes() == b"new"
