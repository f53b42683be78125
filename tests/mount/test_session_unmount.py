"""Ends of a mount that do not go smoothly: it is used, its store is away, its daemon or its holder
hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from trainmount_fuse.session.cli import kill_holder
from trainmount_fuse.session.commands import CommandError, ask_holder
from trainmount_fuse.session.mounting import find_mount, unmount
from trainmount_fuse.session.registry import find_record, list_records
from trainmount_fuse.session.wire import connect


def _unmount(mountpoint: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainmount_fuse", "unmount", str(mountpoint), *options],
        capture_output=True,
        text=True,
        timeout=60,
    )


@contextlib.contextmanager
def _program(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A program that has said that it is so far, and goes on when its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            yield program
        finally:
            program.kill()


IN_DIRECTORY = """
import os, sys
os.chdir(sys.argv[1])
print("ready", flush=True)
sys.stdin.read()
os.listdir()
"""

WRITING = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(file, b"only here")
print("ready", flush=True)
sys.stdin.read()
"""

HANGING = """
import os, sys, threading, time
threading.Thread(target=lambda: open(sys.argv[1], "rb", buffering=0).read(8), daemon=True).start()
while not os.path.exists(sys.argv[2]):
    time.sleep(0.01)
print("ready", flush=True)
sys.stdin.read()
"""

READING = """
import os, sys
print("ready", flush=True)
os.stat(sys.argv[1])
"""


@pytest.mark.quotes(
    "`umount` of a mount that is in use is EBUSY, and the mount serves on.",
)
def test_a_mount_that_is_used_is_not_unmounted_and_serves_on(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    with _program(IN_DIRECTORY, mount.mountpoint) as program:
        done = _unmount(mount.mountpoint)
        assert done.returncode == 1
        assert done.stderr == (
            f"trainmount: cannot unmount {mount.mountpoint}: a program has files or its directory "
            f"there ({Path(f'/proc/{program.pid}/comm').read_text().strip()} {program.pid})\n"
        )
        by_hand = subprocess.run(
            ["umount", str(mount.mountpoint)], capture_output=True, text=True, check=False
        )
        assert by_hand.returncode != 0
        assert "busy" in by_hand.stderr
        assert (mount.mountpoint / "f").exists()
        # It goes on as if nobody had asked, also after a death.
        mount.kill_daemon()
        assert program.communicate("", timeout=60) == ("", "")
    assert _unmount(mount.mountpoint).returncode == 0
    assert mount.process.wait(60) == 0
    assert not mount.is_mounted()


def test_unmount_uploads_what_is_unsent_and_force_ends_a_used_mount(start_mount, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = start_mount(f"file://{volume}")
    with _program(WRITING, mount.mountpoint / "file"):
        done = _unmount(mount.mountpoint, "--force")
        assert (done.returncode, done.stderr) == (0, "")
        assert not mount.is_mounted()
    assert (volume / "file").read_bytes() == b"only here"
    assert mount.process.wait(60) == 0
    # Its place and its folders are free at once.
    mount.start()
    mount.wait_ready()
    assert (mount.mountpoint / "file").read_bytes() == b"only here"


def test_unmount_names_what_could_not_be_uploaded(start_mount, tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = start_mount(f"file://{volume}")
    with _program(WRITING, mount.mountpoint / "late"):
        volume.rename(tmp_path / "away")
        done = _unmount(mount.mountpoint, "--force")
    assert done.returncode == 74
    assert done.stderr.startswith("trainmount: unmounted, but not uploaded and kept in ")
    assert ": late; mount again" in done.stderr
    assert mount.process.wait(60) == 74
    (tmp_path / "away").rename(volume)
    mount.start()
    mount.wait_ready()
    assert mount.stop() == 0
    assert (volume / "late").read_bytes() == b"only here"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_the_store_is_away_does_not_wait_for_it(files_server, start_mount, number):
    environment = files_server.environment()
    mount = start_mount(files_server.source, environment=environment, toy="hasty")
    with (
        _program(WRITING, mount.mountpoint / "late"),
        _program(READING, mount.mountpoint / "asked"),
    ):
        # Its retries go on for two minutes.
        files_server.process.send_signal(signal.SIGSTOP)
        with _program(READING, mount.mountpoint / "asked later"):
            mount.process.send_signal(number)
            assert mount.process.wait(60) == 74
    assert "the store is away" in mount.log
    assert "files=['late']" in mount.log
    assert "did not end in time" not in mount.log
    files_server.process.send_signal(signal.SIGCONT)
    mount.start()
    mount.wait_ready()
    assert mount.stop() == 0
    assert (files_server.volume / "late").read_bytes() == b"only here"


def test_ctrl_c_twice_ends_at_once_and_names_what_is_unsent(files_server, start_mount, wait_until):
    mount = start_mount(files_server.source, environment=files_server.environment())
    with _program(WRITING, mount.mountpoint / "late"):
        files_server.process.send_signal(signal.SIGSTOP)
        mount.process.send_signal(signal.SIGTERM)
        mount.process.send_signal(signal.SIGTERM)
        wait_until(lambda: " stopping" in mount.log, "the stop")
        mount.process.send_signal(signal.SIGINT)
        # Two that come together are one.
        wait_until(lambda: mount.process.send_signal(signal.SIGINT) or _is_over(mount), "the end")
        assert mount.process.wait(60) == 74
    assert "files=['late']" in mount.log
    assert not mount.is_mounted()


def _is_over(mount) -> bool:
    return mount.process.poll() is not None


@pytest.mark.quotes(
    "When the daemon dies, hangs or is replaced by `trainmount remount`, no system call fails; "
    "they wait.",
)
def test_a_daemon_that_is_stopped_is_replaced_and_programs_only_wait(
    start_mount, read_at_random, tmp_path
):
    mount = start_mount(
        f"file://{tmp_path}/mnt.files",
        toy="hang",
        environment={"TOY_HUNG": str(tmp_path / "hung")},
    )
    (tmp_path / "hung").touch()
    reader = read_at_random(mount.mountpoint / "f")
    reader.wait_for_more()
    os.kill(mount.ready()["daemon_pid"], signal.SIGSTOP)
    reader.wait_for_more()
    reader.finish()
    assert "the daemon hangs and is killed" in mount.log
    assert mount.stop() == 0


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_stopped_daemon_goes_on_for_the_end_of_its_mount(start_mount, tmp_path, is_forced):
    volume = tmp_path / "volume"
    volume.mkdir()
    mount = start_mount(f"file://{volume}")
    with contextlib.ExitStack() as programs:
        if is_forced:
            programs.enter_context(_program(WRITING, mount.mountpoint / "late"))
        os.kill(mount.ready()["daemon_pid"], signal.SIGSTOP)
        done = _unmount(mount.mountpoint, *(["--force"] if is_forced else []))
        assert (done.returncode, done.stderr) == (0, "")
    assert mount.process.wait(60) == 0
    assert not mount.is_mounted()
    assert "the daemon hangs" not in mount.log
    if is_forced:
        assert (volume / "late").read_bytes() == b"only here"


def test_a_daemon_that_hangs_at_the_end_is_not_waited_for_as_long_as_one_that_serves(
    start_mount, tmp_path
):
    hung = tmp_path / "hung"
    mount = start_mount(
        f"file://{tmp_path}/mnt.files", toy="stuck", environment={"TOY_HUNG": str(hung)}
    )
    with _program(HANGING, mount.mountpoint / "f", hung):
        done = _unmount(mount.mountpoint, "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert mount.process.wait(60) == 0
    assert "the daemon hangs and is killed" in mount.log
    assert "its successor takes over" not in mount.log
    assert not mount.is_mounted()


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_unmount_does_not_wait_long_for_a_daemon_that_hangs(
    start_mount, tmp_path, wait_until, by_hand
):
    hung = tmp_path / "hung"
    mount = start_mount(
        f"file://{tmp_path}/mnt.files", toy="stuck-idle", environment={"TOY_HUNG": str(hung)}
    )
    (mount.mountpoint / "f").open("rb").close()
    wait_until(hung.exists, "the hang")
    if by_hand:
        unmount(mount.mountpoint)
    else:
        done = _unmount(mount.mountpoint)
        assert (done.returncode, done.stderr) == (0, "")
    assert mount.process.wait(60) == 0
    assert "the daemon hangs and is killed" in mount.log
    assert not mount.is_mounted()


def test_a_daemon_whose_loop_stands_still_tells_where_and_is_replaced(start_mount, tmp_path):
    hung = tmp_path / "hung"
    mount = start_mount(
        f"file://{tmp_path}/mnt.files", toy="hang", environment={"TOY_HUNG": str(hung)}
    )
    with (mount.mountpoint / "f").open("rb", buffering=0) as file:
        assert file.read(8) == bytes(8)
    assert hung.exists()
    assert "the daemon hangs and is killed" in mount.log
    assert "session_toy_daemon.py" in mount.log


def test_a_holder_that_hangs_is_told_and_force_ends_it(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    daemon = os.pidfd_open(mount.ready()["daemon_pid"])
    mount.process.send_signal(signal.SIGSTOP)
    done = _unmount(mount.mountpoint)
    assert done.returncode == 1
    assert "gives no answer; --force ends it" in done.stderr
    # The mount itself goes on meanwhile.
    assert (mount.mountpoint / "f").exists()
    done = _unmount(mount.mountpoint, "--force")
    assert (done.returncode, done.stderr) == (0, "")
    assert not mount.is_mounted()
    assert mount.process.wait(60) == -signal.SIGKILL
    os.close(daemon)


def test_a_dead_mount_is_unmounted_although_nobody_keeps_it(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    mount.process.kill()
    mount.process.wait()
    assert mount.is_mounted()
    assert find_record(mount.mountpoint) is None
    done = _unmount(mount.mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert not mount.is_mounted()


def test_what_is_no_mount_of_ours_is_left_alone(tmp_path):
    done = _unmount(tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"trainmount: nothing of trainmount is mounted at {tmp_path}\n"
    assert _unmount(Path("/proc"), "--force").returncode == 1
    assert find_mount(Path("/proc")) is not None


def test_a_mount_is_ended_by_its_name_or_a_link_to_it_and_by_nothing_inside(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    done = _unmount(mount.mountpoint / "f")
    assert done.returncode == 1
    assert done.stderr == (
        f"trainmount: {mount.mountpoint}/f is inside the mount at {mount.mountpoint}: name that\n"
    )
    assert mount.is_mounted()
    (tmp_path / "link").symlink_to("mnt")
    (tmp_path / "loop").symlink_to("loop")
    assert _unmount(tmp_path / "loop").returncode == 1
    assert _unmount(tmp_path / "link").returncode == 0
    assert not mount.is_mounted()


def test_a_mount_of_another_user_is_left_to_that_one(start_mount, tmp_path, nobody):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    for options in ((), ("--force",)):
        done = nobody.run("-m", "trainmount_fuse", "unmount", str(mount.mountpoint), *options)
        assert done.returncode == 1
        assert done.stderr == (
            f"trainmount: {mount.mountpoint} was mounted by another user: that one and root can "
            "end it\n"
        )
    assert (mount.mountpoint / "f").exists()


def test_no_process_is_killed_on_the_word_of_another_user(start_mount, tmp_path):
    """A record tells root which process keeps a mount of its user."""
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    record = find_record(mount.mountpoint)
    assert record is not None
    with _program(READING, tmp_path) as bystander:
        lie = replace(record, holder_pid=bystander.pid, uid=65534)
        with pytest.raises(CommandError, match="does not belong to who mounted"):
            kill_holder(lie)
        assert bystander.communicate("", timeout=60) == ("", "")


def test_nonsense_costs_its_sender_an_answer_and_nobody_the_mount(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    record = find_record(mount.mountpoint)
    assert record is not None
    remount = {"want": "remount", "command": 5, "environment": 6, "settings": 7}
    requests = [{"want": "remount"}, remount, {"want": ["status"]}]
    for data in (b"{", b"[" * 100_000, *(json.dumps(one).encode() for one in requests)):
        with connect(record.holder_socket, 10) as holder:
            holder.send(data)
            holder.recv(1 << 16)
    # No remount is under way, whatever the last one was.
    with pytest.raises(CommandError, match="No such file"):
        ask_holder(record, {**remount, "command": ["/nowhere"], "environment": {}})
    assert ask_holder(record, {"want": "status"})["is_ready"]
    assert (mount.mountpoint / "f").exists()


def test_a_ready_file_that_can_no_longer_be_written_costs_the_news_and_not_the_mount(
    start_mount, tmp_path, wait_until
):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    record = find_record(mount.mountpoint)
    assert record is not None
    first = ask_holder(record, {"want": "status"})["daemon_pid"]
    mount.ready_file.unlink()
    mount.ready_file.mkdir()
    os.kill(first, signal.SIGKILL)
    wait_until(
        lambda: (
            ask_holder(record, {"want": "status"})["daemon_pid"] not in (first, None)
            and "the ready file cannot be written" in mount.log
        ),
        "a successor",
    )
    assert (mount.mountpoint / "f").exists()
    assert _unmount(mount.mountpoint).returncode == 0
    assert mount.process.wait(60) == 0


def test_a_second_mount_at_a_place_is_told_what_is_there(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    again = subprocess.run(mount.command, capture_output=True, text=True, timeout=60)
    assert again.returncode == 2
    assert again.stderr.splitlines()[-1].startswith(
        f"trainmount: mountpoint {mount.mountpoint} is busy: "
    ), again.stderr
    assert (mount.mountpoint / "f").exists()


def test_a_mount_whose_name_is_gone_serves_its_copies_and_says_so(
    start_mount, tmp_path, wait_until
):
    (tmp_path / "volume").mkdir()
    (tmp_path / "volume/file").write_text("content")
    mount = start_mount(f"file://{tmp_path}/volume")
    program = "import sys; print(flush=True); sys.stdin.read(); print(open(sys.argv[1]).read())"
    path = str(mount.mountpoint / "file")
    command = ["unshare", "--mount", sys.executable, "-c", program, path]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "\n"
        subprocess.run(["umount", str(mount.mountpoint)], check=True)
        wait_until(lambda: "another mount namespace still use it" in mount.log, "the notice")
        # A place for another one: its folders are not free, and the line says whose they are.
        again = subprocess.run(mount.command, capture_output=True, text=True, timeout=60)
        assert again.returncode == 2
        assert f"(process {mount.process.pid})" in again.stderr
        assert find_record(mount.mountpoint) is not None
        assert other.communicate("", timeout=60)[0] == "content\n"
    # Its last copy went with its namespace.
    assert mount.process.wait(60) == 0


def test_a_mount_right_after_an_umount_waits_for_the_old_one_to_end(start_mount, tmp_path):
    (tmp_path / "volume").mkdir()
    mount = start_mount(f"file://{tmp_path}/volume")
    (mount.mountpoint / "file").write_text("content")
    old = mount.process
    subprocess.run(["umount", str(mount.mountpoint)], check=True)
    mount.ready_file.unlink(missing_ok=True)
    mount.start()
    assert old.wait(60) == 0
    mount.wait_ready()
    assert (mount.mountpoint / "file").read_text() == "content"


def test_a_mount_is_listed_while_it_lives_and_found_by_any_path_in_it(start_mount, tmp_path):
    mount = start_mount(f"file://{tmp_path}/mnt.files", toy="none")
    record = find_record(mount.mountpoint / "a/b/c")
    assert record is not None
    assert record.mountpoint == mount.mountpoint
    assert record.holder_pid == mount.process.pid
    assert record.state_dir == mount.folder / "state"
    assert mount.stop() == 0
    assert record not in list_records()
    assert not record.holder_socket.exists()
