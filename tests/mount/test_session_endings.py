"""How a mount ends, and what is said where it cannot begin."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trainmount_fuse.session.checks import check_volume
from trainmount_fuse.session.mounting import (
    MountError,
    find_mount,
    list_mounts,
    mount_fuse,
    unmount,
)
from trainmount_fuse.settings import MountSettings


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_unmounts_ends_the_daemon_in_order_and_exits_with_0(start_mount, tmp_path, number):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    daemon = mount.ready()["daemon_pid"]
    # Ctrl-C reaches the holder and not its daemon.
    assert os.getpgid(daemon) == daemon
    mount.process.send_signal(number)
    assert mount.process.wait(60) == 0
    assert not mount.is_mounted()
    assert not mount.ready_file.exists()
    assert not Path(f"/proc/{daemon}").exists()
    assert "the daemon died" not in mount.log


def test_sigterm_ends_a_mount_that_a_program_still_uses(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    file = os.open(mount.mountpoint / "f", os.O_RDONLY)
    try:
        assert mount.stop() == 0
        assert not mount.is_mounted()
        with pytest.raises(OSError, match=r"not connected|aborted"):
            os.pread(file, 8, 0)
    finally:
        # close() asks the daemon to flush, so it fails too, but it closes.
        with contextlib.suppress(OSError):
            os.close(file)


def test_sigterm_ends_a_mount_of_which_another_namespace_has_a_copy(start_mount, tmp_path):
    (tmp_path / "volume").mkdir()
    mount = start_mount(f"file://{tmp_path}/volume")
    program = "import os, sys; print(flush=True); sys.stdin.read(); os.listdir(sys.argv[1])"
    command = ["unshare", "--mount", sys.executable, "-c", program, str(mount.mountpoint)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "\n"
        (mount.mountpoint / "file").write_text("content")
        assert mount.stop() == 0
        assert "did not end in time" not in mount.log
        assert (tmp_path / "volume/file").read_text() == "content"
        # Nobody serves the copy, so nobody waits on it.
        assert "not connected" in other.communicate("", timeout=60)[1]


def _leave_unsent(mount) -> int:
    """A descriptor of a file that was written and is not in the volume."""
    file = os.open(mount.mountpoint / "late", os.O_WRONLY | os.O_CREAT)
    os.write(file, b"only here")
    return file


@pytest.mark.quotes(
    "The end of a mount sends them; what it cannot send is named and kept, and the exit status is "
    "74.",
)
def test_a_mount_that_ends_with_bytes_only_here_says_which_and_exits_with_74(start_mount, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = start_mount(f"file://{volume}")
    file = _leave_unsent(mount)
    volume.rename(tmp_path / "away")
    assert mount.stop() == 74
    with contextlib.suppress(OSError):
        os.close(file)
    assert "not uploaded and kept: late" in mount.log
    (tmp_path / "away").rename(volume)
    mount.start()
    mount.wait_ready()
    assert mount.stop() == 0
    assert (volume / "late").read_bytes() == b"only here"


def test_a_daemon_that_cannot_end_in_time_is_killed_and_its_files_are_named(
    files_server, start_mount
):
    environment = files_server.environment()
    mount = start_mount(files_server.source, "--stop-timeout", "0.5", environment=environment)
    file = _leave_unsent(mount)
    files_server.process.send_signal(signal.SIGSTOP)
    assert mount.stop() == 74
    with contextlib.suppress(OSError):
        os.close(file)
    assert "files=['late']" in mount.log


@pytest.mark.quotes(
    "Before Linux 6.9, the death of a daemon ends open files with an error, and new ones can be "
    "opened.",
)
def test_where_no_successor_can_take_over_a_new_mount_takes_the_place(start_mount, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    for name in ("file-0", "file-1"):
        (volume / name).write_text("content")
    mount = start_mount(f"file://{volume}", toy="no-takeover")
    assert not mount.ready()["survives_daemon"]
    for number in range(2):
        path = mount.mountpoint / f"file-{number}"
        files = [_leave_unsent(mount), os.open(path, os.O_RDONLY)]
        mount.kill_daemon()
        # What was open is lost, at once and with an error.
        with pytest.raises(OSError, match=r"not connected|aborted"):
            os.pread(files[1], 1, 0)
        for file in files:
            with contextlib.suppress(OSError):
                os.close(file)
        assert path.read_text() == "content"
        assert (mount.mountpoint / "late").read_bytes() == b"only here"
        (mount.mountpoint / f"new-{number}").write_text("new")
    assert mount.stop() == 0
    assert not mount.is_mounted()
    names = {path.name for path in volume.iterdir()}
    assert names - {".trainmount-staging"} == {"file-0", "file-1", "late", "new-0", "new-1"}


def test_umount_by_hand_ends_daemon_and_holder(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    daemon = mount.ready()["daemon_pid"]
    subprocess.run(["umount", str(mount.mountpoint)], check=True)
    assert mount.process.wait(60) == 0
    assert not Path(f"/proc/{daemon}").exists()


def test_umount_by_hand_while_no_daemon_lives_ends_the_holder_too(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    # Stopped, so that the holder cannot start a successor before the mount is gone.
    mount.process.send_signal(signal.SIGSTOP)
    os.kill(mount.ready()["daemon_pid"], signal.SIGKILL)
    subprocess.run(["umount", "--lazy", str(mount.mountpoint)], check=True)
    mount.process.send_signal(signal.SIGCONT)
    assert mount.process.wait(60) == 0


def _mount_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainmount_fuse", "mount", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _own_files(folder: Path) -> list[str]:
    return ["--cache-dir", str(folder / "cache"), "--state-dir", str(folder / "state")]


@pytest.fixture
def volume(tmp_path):
    (tmp_path / "volume").mkdir()
    return f"file://{tmp_path}/volume"


@pytest.mark.parametrize("where", ["--foreground", "--read-only"])
def test_a_missing_mountpoint_is_one_line_and_exit_code_2(tmp_path, volume, where):
    done = _mount_command(volume, str(tmp_path / "nowhere"), where, *_own_files(tmp_path))
    assert done.returncode == 2
    assert done.stderr == (
        f"trainmount: mountpoint {tmp_path}/nowhere is missing: make the directory first\n"
    )


def test_a_mountpoint_that_is_a_file_is_refused(tmp_path, volume):
    (tmp_path / "file").write_text("")
    done = _mount_command(volume, str(tmp_path / "file"), "--foreground", *_own_files(tmp_path))
    assert done.returncode == 2
    assert done.stderr == f"trainmount: mountpoint {tmp_path}/file is not a directory\n"


def test_place_and_state_of_a_living_mount_are_refused_to_a_second_one(
    start_mount, tmp_path, volume
):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    done = _mount_command(volume, str(mount.mountpoint), "--foreground", *_own_files(tmp_path))
    assert done.returncode == 2
    assert f"mountpoint {mount.mountpoint} is busy" in done.stderr
    assert done.stderr.count("\n") == 1
    (tmp_path / "other").mkdir()
    state = str(mount.folder / "state")
    done = _mount_command(volume, str(tmp_path / "other"), "--foreground", "--state-dir", state)
    assert done.returncode == 2
    assert "belongs to a mount that is there" in done.stderr
    assert find_mount(tmp_path / "other") is None
    assert (mount.mountpoint / "f").exists()
    # The living one is used: only its name can be taken away.
    with (mount.mountpoint / "f").open("rb"):
        with pytest.raises(MountError, match="a program has files"):
            unmount(mount.mountpoint)
        assert mount.is_mounted()
        unmount(mount.mountpoint, lazy=True)
        assert not mount.is_mounted()


def test_a_missing_volume_is_told_before_anything_is_mounted(tmp_path):
    (tmp_path / "mnt").mkdir()
    done = _mount_command(
        f"file://{tmp_path}/nothing", str(tmp_path / "mnt"), "--foreground", *_own_files(tmp_path)
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainmount: cannot mount file://{tmp_path}/nothing: ")
    assert done.stderr.count("\n") == 1
    assert find_mount(tmp_path / "mnt") is None
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("token", "suffix", "said"),
    [
        ("wrong", "", "look at DATABRICKS_TOKEN"),
        ("right", "/nothing", "there is no such directory or volume"),
    ],
)
def test_what_the_store_says_of_the_volume_is_told_in_one_line(
    files_server, tmp_path, monkeypatch, token, suffix, said
):
    (tmp_path / "mnt").mkdir()
    for name, value in files_server.environment(token).items():
        monkeypatch.setenv(name, value)
    source = files_server.source + suffix
    done = _mount_command(source, str(tmp_path / "mnt"), "--foreground", *_own_files(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"trainmount: cannot mount {source}: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert find_mount(tmp_path / "mnt") is None


def test_a_mounted_volume_is_read_and_written_through_the_files_api(files_server, start_mount):
    mount = start_mount(files_server.source, environment=files_server.environment())
    (mount.mountpoint / "file").write_text("content")
    mount.kill_daemon()
    assert (mount.mountpoint / "file").read_text() == "content"
    assert (files_server.volume / "file").read_text() == "content"
    assert mount.stop() == 0


def test_a_store_that_does_not_answer_is_given_up(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("DATABRICKS_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("DATABRICKS_TOKEN", "any")
        settings = MountSettings(
            source="/Volumes/main/default/data",
            cache_dir=tmp_path / "cache",
            state_dir=tmp_path / "state",
        )
        with pytest.raises(MountError, match=r"gave no answer in 0\.5 s"):
            check_volume(settings, timeout_seconds=0.5)


def test_a_source_that_is_no_volume_is_refused(tmp_path):
    (tmp_path / "mnt").mkdir()
    where = str(tmp_path / "mnt")
    done = _mount_command("main.default.data", where, "--foreground", *_own_files(tmp_path))
    assert done.returncode == 2
    assert "must be /Volumes[/<catalog>[/<schema>[/<volume>[/...]]]]" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_user_without_rights_is_told_what_to_do(nobody, open_path, closed_fuse_device):
    (open_path / "mnt").mkdir()
    (open_path / "volume").mkdir()
    for one in ("mnt", "volume"):
        os.chown(open_path / one, 65534, 65534)
    done = nobody.run(
        *("-m", "trainmount_fuse", "mount", f"file://{open_path}/volume", f"{open_path}/mnt"),
        *("--foreground", *_own_files(open_path)),
    )
    assert done.returncode == 2
    assert done.stderr.startswith("trainmount: /dev/fuse may not be opened by this user")
    assert done.stderr.count("\n") == 1


def test_unmounting_what_is_not_mounted_is_fine(tmp_path):
    unmount(tmp_path)
    unmount(tmp_path / "missing")


def test_names_with_spaces_are_found_among_the_mounts(tmp_path):
    folder = tmp_path / "with space\tand tab"
    folder.mkdir()
    connection = mount_fuse(folder, name="a source", allow_other=False, read_only=True)
    try:
        mount = find_mount(folder)
        assert mount is not None
        assert (mount.source, mount.filesystem_type) == ("a source", "fuse.trainmount")
        assert mount.device_minor == connection.device_minor
        assert mount in list(list_mounts())
    finally:
        unmount(folder, lazy=True)
        os.close(connection.fd)
