"""Tools that everybody uses, and the errors that programs know, on a real mount."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TREE = {"a/one": b"1", "a/b/two": b"22" * 50_000, "a/b/c/three": b"", "with space": b"4"}


def _make(folder: Path) -> None:
    for name, data in TREE.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _tree(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.relative_to(folder).parts[0].startswith(".")
    }


def _run(command: str, where: Path) -> str:
    done = subprocess.run(
        ["sh", "-ec", command],
        cwd=where,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert (done.returncode, done.stderr) == (0, ""), command
    return done.stdout


def _errno(function: Callable[..., object], *arguments: Any) -> int:
    with pytest.raises(OSError, match=r".") as raised:
        function(*arguments)
    return raised.value.errno or 0


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    folder = tmp_path / "volume"
    folder.mkdir()
    return folder


@pytest.mark.quotes(
    "`cp -a`, `mv`, `tar`, `find`, `du`, `touch`, `rm -r` | as on a disk",
)
def test_everyday_tools_do_on_the_mount_what_they_do_elsewhere(
    start_mount: Callable[..., Any], volume: Path, tmp_path: Path
) -> None:
    mount = start_mount(volume.as_uri())
    here = mount.mountpoint
    source = tmp_path / "source"
    _make(source)
    _run(f"cp -a {source} copy", here)
    assert _tree(here / "copy") == TREE == _tree(volume / "copy")
    _run(f"tar cf {tmp_path}/t.tar -C {source} . && mkdir t && tar xf {tmp_path}/t.tar -C t", here)
    assert _tree(here / "t") == TREE
    old = int((source / "a/one").stat().st_mtime)
    assert (
        int((here / "copy/a/one").stat().st_mtime) == old == (here / "t/a/one").stat().st_mtime // 1
    )
    found = _run("find copy -type f | sort", here).splitlines()
    assert found == sorted(f"copy/{name}" for name in TREE)
    assert _run("du -s --apparent-size -B1 copy/a/b/two", here).split()[0] == "100000"
    _run("mv copy moved && mv moved/a/one moved/a/uno && cp -r moved again", here)
    expected = {("a/uno" if name == "a/one" else name): data for name, data in TREE.items()}
    assert _tree(here / "moved") == expected == _tree(here / "again") == _tree(volume / "moved")
    _run("touch new && touch -d @1000000000 new && chmod 600 new && test -O new", here)
    assert (here / "new").stat().st_mtime == 1_000_000_000
    assert stat.S_IMODE((here / "new").stat().st_mode) == 0o600
    # As rsync does it: a hidden file beside, then renamed over.
    _run("cp again/a/uno .uno.XXXX && mv -f .uno.XXXX again/a/uno && cat again/a/uno", here)
    _run("rm -r moved again t && mkdir -p d && touch d/f && rm -r d", here)
    assert _run("ls -a", here).split() == [".", "..", "new"]
    assert [line.split()[-1] for line in _run("ls -la", here).splitlines()[1:]] == [
        *(".", "..", "new")
    ]
    assert _tree(volume) == {"new": b""}


@pytest.mark.quotes(
    "Positions of `telldir` stay valid while names come and go, and when the daemon dies.",
)
def test_positions_in_a_directory_are_kept_by_seekdir_and_over_a_daemons_death(
    start_mount: Callable[..., Any], volume: Path
) -> None:
    for number in range(3000):
        (volume / f"f{number:04}").touch()
    mount = start_mount(volume.as_uri())
    with os.scandir(mount.mountpoint) as entries:
        first = [next(entries).name for _ in range(10)]
        mount.kill_daemon()
        names = first + [entry.name for entry in entries]
    assert names == [f"f{number:04}" for number in range(3000)]
    fd = os.open(mount.mountpoint, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with os.scandir(fd) as entries:
            assert len(list(entries)) == 3000
        (mount.mountpoint / "f0000").unlink()
        # scandir rewinds the descriptor.
        with os.scandir(fd) as entries:
            assert len(list(entries)) == 2999
    finally:
        os.close(fd)


def test_what_a_volume_cannot_hold_is_refused_with_the_number_programs_know(
    start_mount: Callable[..., Any], volume: Path
) -> None:
    mount = start_mount(volume.as_uri())
    here = mount.mountpoint
    (here / "d").mkdir()
    (here / "d/f").write_bytes(b"1")
    assert _errno(os.mkdir, here / "d") == errno.EEXIST
    assert _errno(os.mkdir, here / "d/f") == errno.EEXIST
    assert _errno(os.rmdir, here / "d") == errno.ENOTEMPTY
    assert _errno(os.symlink, "d/f", here / "link") == errno.EPERM
    assert _errno(os.link, here / "d/f", here / "hard") == errno.EPERM
    assert _errno(os.mkfifo, here / "fifo") == errno.EPERM
    assert _errno(os.mknod, here / "device", stat.S_IFCHR, os.makedev(1, 3)) == errno.EPERM
    with socket.socket(socket.AF_UNIX) as listener:
        assert _errno(listener.bind, str(here / "s")) == errno.EPERM
    assert _errno(os.setxattr, here / "d/f", "user.x", b"1") == errno.EOPNOTSUPP
    assert not os.access(here / "d/f", os.X_OK)
    assert _errno(os.execv, str(here / "d/f"), ["f"]) == errno.EACCES
    # chown to who owns it anyway is what cp -a and tar do.
    os.chown(here / "d/f", os.getuid(), os.getgid())
    os.chown(here / "d/f", -1, -1)
    assert [path.name for path in (here / "d").iterdir()] == ["f"]
    with (here / "d/f").open("r+b") as one, (here / "d/f").open("r+b") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        assert _errno(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB) == errno.EAGAIN
        mount.kill_daemon()
        assert _errno(fcntl.flock, other, fcntl.LOCK_EX | fcntl.LOCK_NB) == errno.EAGAIN
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.quotes(
    "EROFS | every change below a mount with `--read-only`",
)
def test_a_read_only_mount_is_erofs_for_every_change(
    start_mount: Callable[..., Any], volume: Path
) -> None:
    (volume / "f").write_bytes(b"1")
    here = start_mount(volume.as_uri(), "--read-only").mountpoint
    assert _errno(os.open, here / "f", os.O_WRONLY) == errno.EROFS
    assert _errno(os.mkdir, here / "d") == errno.EROFS
    assert _errno(os.unlink, here / "f") == errno.EROFS
    assert _errno(os.chmod, here / "f", 0o600) == errno.EROFS
    assert (here / "f").read_bytes() == b"1"
