"""What docs/SEMANTICS.md says of names, attributes, locks and errors."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.mount.conftest import FilesServer, MountProcess, wait_until
from tests.mount.semantics.conftest import OLD, Nodes, Place, errno_of, libc, renameat2, run, tree

MIB = 1 << 20


@pytest.mark.quotes(
    "A new file shows on its own node at once.",
    "`O_EXCL` is EEXIST where the store has the name, whatever the mount remembers.",
    "Where another node closes a file of that name first, `close` is EEXIST and the other's file "
    "stays.",
    "EEXIST | `mkdir` over anything; `O_EXCL`, also at `close`",
)
def test_new_files_and_names_that_are_taken(place: Place) -> None:
    assert list(place.a.iterdir()) == []
    exclusive = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    mine = os.open(place.a / "mine", exclusive)
    assert [one.name for one in place.a.iterdir()] == ["mine"]
    os.write(mine, b"mine")
    assert (place.a / "mine").stat().st_size == 4
    os.close(mine)
    assert not (place.b / "taken").exists()
    (place.a / "taken").write_bytes(b"by A")
    assert errno_of(os.open, place.b / "taken", exclusive) == "EEXIST"
    late = os.open(place.a / "raced", exclusive)
    os.write(late, b"by A")
    (place.b / "raced").write_bytes(b"by B")
    assert errno_of(os.close, late) == "EEXIST"
    assert (place.store / "raced").read_bytes() == b"by B"
    (place.a / "d").mkdir()
    for name in ("d", "taken"):
        assert errno_of(os.mkdir, place.a / name) == "EEXIST"


@pytest.mark.quotes(
    "`mkdir`, `rmdir`, `unlink` and `rename` are done in the store when they return.",
    "`rename` keeps the inode number, the cached bytes and the open descriptors.",
    "A file that is not stored yet is renamed without the store.",
)
def test_changes_of_names(nodes: Nodes, place: Place) -> None:
    data = os.urandom(3 * MIB)
    path = place.stored("f", data)
    assert path.read_bytes() == data
    reader, number = os.open(path, os.O_RDONLY), path.stat().st_ino
    (place.a / "d").mkdir()
    assert (place.store / "d").is_dir()
    path = path.rename(place.a / "d/g")
    assert tree(place.store) == {"d": None, "d/g": data}
    fetched = nodes.requests()["presigned_get"]
    assert path.stat().st_ino == number
    assert path.read_bytes() == data == os.pread(reader, 4 * MIB, 0)
    assert nodes.requests()["presigned_get"] == fetched
    os.close(reader)
    path.unlink()
    assert tree(place.store) == {"d": None}
    (place.a / "d").rmdir()
    assert tree(place.store) == {}
    writer = os.open(place.a / "new", os.O_CREAT | os.O_WRONLY)
    os.write(writer, b"new")
    before = nodes.requests()
    (place.a / "new").rename(place.a / "newer")
    after = nodes.requests() - before
    assert set(after) <= {"head_file", "head_directory"}
    os.close(writer)
    assert tree(place.store) == {"newer": b"new"}


@pytest.mark.quotes(
    "`rename` over a file replaces it: each `open` finds the old file or the new one, whole."
)
def test_a_rename_over_a_file_is_seen_done_or_not(place: Place) -> None:
    versions = [bytes([number]) * 300_000 for number in range(20)]
    path = place.stored("f", versions[0])
    ended = threading.Event()
    seen: set[bytes] = set()

    def look() -> None:
        while not ended.is_set():
            for folder in (place.a, place.b, place.store):
                # On the other node it may be gone before it is read.
                allowed = OSError if folder == place.b else ()
                with (folder / "f").open("rb") as file, suppress(allowed):
                    seen.add(file.read())

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for version in versions[1:]:
            path.with_suffix(".part").write_bytes(version)
            path.with_suffix(".part").replace(path)
    finally:
        ended.set()
        looking.join()
    assert len(seen) > 1
    assert seen <= set(versions)
    assert [one.read_bytes() == versions[-1] for one in (path, place.b / "f")] == [True, True]


@pytest.mark.quotes(
    "Where the store cannot rename, a copy comes first and the removal last.",
    "A refused copy changes nothing; a refused removal leaves both names.",
    "`RENAME_NOREPLACE` works; `RENAME_EXCHANGE` is EINVAL.",
    "EINVAL | a directory moved into itself; `RENAME_EXCHANGE`",
    "EACCES | the store refuses this identity: `stat`, `open`, changes of names; for bytes that "
    "were written at `close`",
)
def test_a_rename_that_the_store_refuses_loses_nothing(nodes: Nodes, place: Place) -> None:
    path = place.stored("f", b"f")
    place.stored("g", b"g")
    nodes.refuse("put_file", status=403)
    assert errno_of(path.rename, place.a / "h") == "EACCES"
    file = os.open(place.a / "g", os.O_WRONLY)
    os.write(file, b"G")
    assert errno_of(os.close, file) == "EACCES"
    assert tree(place.store) == {"f": b"f", "g": b"g"}
    nodes.refuse("delete_file", status=403)
    assert errno_of(path.rename, place.a / "h") == "EACCES"
    assert tree(place.store) == {"f": b"f", "g": b"g", "h": b"f"}
    nodes.refuse("*", status=403)
    refused = [
        errno_of((place.a / "unknown").stat),
        errno_of(path.open),
        errno_of((place.a / "e").mkdir),
        errno_of(path.unlink),
    ]
    assert refused == ["EACCES"] * 4
    nodes.refuse()
    assert renameat2(path, place.a / "g", 1) == "EEXIST"
    assert renameat2(path, place.a / "g", 2) == "EINVAL"
    assert renameat2(path, place.a / "i", 1) == ""
    (place.a / "d").mkdir()
    assert errno_of((place.a / "d").rename, place.a / "d/e") == "EINVAL"
    assert tree(place.store) == {"d": None, "g": b"g", "h": b"f", "i": b"f"}


@pytest.mark.quotes(
    "`rename` of a directory moves file by file, up to 10,000 entries.",
    "Above that it is EXDEV before anything is moved, and `mv` and `shutil.move` copy.",
    "EXDEV | `rename` of a directory above 10,000 entries, or between two volumes",
)
def test_directories_are_renamed_up_to_a_size(
    start_mount: Callable[..., MountProcess], files_server: FilesServer, tmp_path: Path
) -> None:
    store = tmp_path / "plain"
    (store / "d").mkdir(parents=True)
    for number in range(10_001):
        (store / f"d/{number}").touch()
    here = start_mount(store.as_uri(), name="moving").mountpoint
    assert errno_of((here / "d").rename, here / "e") == "EXDEV"
    assert sorted(os.listdir(store)) == ["d"]  # noqa: PTH208
    assert sum(1 for _ in (store / "d").iterdir()) == 10_001
    (here / "d/0").unlink()
    (here / "d").rename(here / "e")
    assert not (store / "d").exists()
    assert sum(1 for _ in (store / "e").iterdir()) == 10_000

    other = files_server.volume.with_name("other")
    for folder in (files_server.volume / "d", files_server.volume / "e", other):
        folder.mkdir()
        (folder / "f").write_bytes(b"f")
    source = files_server.source.rpartition("/")[0]
    both = start_mount(source, environment=files_server.environment()).mountpoint
    assert errno_of((both / "data/d").rename, both / "other/d") == "EXDEV"
    assert errno_of((both / "data/d/f").rename, both / "other/g") == "EXDEV"
    assert sorted(tree(other)) == ["f"]
    run("mv", both / "data/d", both / "other")
    shutil.move(both / "data/e", both / "other")
    assert tree(other) == {"d": None, "d/f": b"f", "e": None, "e/f": b"f", "f": b"f"}
    assert tree(files_server.volume) == {}


@pytest.mark.quotes(
    "A file that is unlinked or replaced while it is open is read and written on by who has it "
    "open, and stored nowhere.",
    "A listing has `.`, `..` and each name once, with its kind.",
    "EISDIR, ENOTDIR | a directory where a file is meant, and the reverse",
    "ENOTEMPTY | `rmdir` of, or `rename` over, a directory with entries, unsent files among them",
)
def test_open_files_that_lose_their_names_and_listings(place: Place) -> None:
    data = os.urandom(2 * MIB)
    files = [os.open(place.stored(name, data), os.O_RDWR) for name in ("gone", "replaced")]
    (place.a / "gone").unlink()
    (place.a / "new").write_bytes(b"new")
    (place.a / "new").rename(place.a / "replaced")
    for file in files:
        assert os.pread(file, 3 * MIB, 0) == data
        assert os.pwrite(file, b"more", 2 * MIB) == 4
        assert os.pread(file, 8, 2 * MIB - 4) == data[-4:] + b"more"
        assert (os.fstat(file).st_nlink, os.fstat(file).st_size) == (0, 2 * MIB + 4)
        os.fsync(file)
        os.close(file)
    assert tree(place.store) == {"replaced": b"new"}

    for name in ("d", "full"):
        (place.a / name).mkdir()
    unsent = os.open(place.a / "full/unsent", os.O_CREAT | os.O_WRONLY)
    listed = run("find", place.a, "-printf", "%y %P\\n").splitlines()
    assert sorted(listed) == ["d ", "d d", "d full", "f full/unsent", "f replaced"]
    with os.scandir(place.a) as entries:
        kinds = {one.name: (one.is_dir(), one.inode()) for one in entries}
    assert kinds == {
        name: (name != "replaced", (place.a / name).stat().st_ino)
        for name in ("d", "full", "replaced")
    }
    assert sorted(run("ls", "-aU", place.a).split()) == [".", "..", "d", "full", "replaced"]
    assert errno_of((place.a / "full").rmdir) == "ENOTEMPTY"
    assert errno_of((place.a / "d").rename, place.a / "full") == "ENOTEMPTY"
    assert errno_of((place.a / "replaced").rename, place.a / "d") == "EISDIR"
    assert errno_of((place.a / "d").rename, place.a / "replaced") == "ENOTDIR"
    assert errno_of(os.open, place.a / "d", os.O_WRONLY) == "EISDIR"
    assert errno_of((place.a / "replaced/x").stat) == "ENOTDIR"
    assert errno_of((place.a / "replaced").rmdir) == "ENOTDIR"
    os.close(unsent)


@pytest.mark.quotes(
    "names, bytes, size, and time of the last upload, to the second | in the store, for every node",
    "mode of `open`, `mkdir` and `chmod`, times of `utimensat` | in the state directory of one "
    "mount, over its remounts; other nodes do not see them",
    "a time that was set | until the next write",
    "owner and group | nowhere: files belong to who mounted, or to `--uid` and `--gid`; `chown` "
    "succeeds and changes nothing",
    "access time | not at all by reading",
    "free space | `statfs` shows a pebibyte",
)
def test_what_the_store_keeps_and_what_the_mount_keeps(nodes: Nodes, place: Place) -> None:
    mount = nodes.mount("keeping", "--uid", "1234", "--gid", "4321")
    here = mount.mountpoint / place.a.name

    def shown(path: Path) -> tuple[int, int, int]:
        found = path.stat()
        return stat.S_IMODE(found.st_mode), found.st_mtime_ns, found.st_atime_ns

    os.close(os.open(here / "made", os.O_CREAT | os.O_WRONLY, 0o640))
    (here / "d").mkdir(0o700)
    (here / "changed").write_bytes(b"changed")
    (here / "changed").chmod(0o755)
    os.utime(here / "changed", ns=(5, OLD[0] * 10**9 + 7))
    os.chown(here / "changed", 7, 8)
    (here / "plain").write_bytes(b"plain")
    expected = {name: shown(here / name) for name in ("made", "d", "changed", "plain")}
    assert [mode for mode, _, _ in expected.values()] == [0o640, 0o700, 0o755, 0o644]
    assert expected["changed"] == (0o755, OLD[0] * 10**9 + 7, 5)
    owners = {(one.stat().st_uid, one.stat().st_gid) for one in (here, *here.iterdir())}
    assert owners == {(1234, 4321)}
    assert mount.stop() == 0
    mount.start()
    mount.wait_ready()
    again = {name: shown(here / name) for name in expected}
    assert [mode for mode, _, _ in again.values()] == [0o640, 0o700, 0o755, 0o644]
    assert again["changed"] == expected["changed"]

    there = place.b
    wait_until(lambda: (there / "plain").exists(), "the files")
    assert sorted(one.name for one in there.iterdir()) == sorted(expected)
    modes = [stat.S_IMODE((there / name).stat().st_mode) for name in expected]
    assert modes == [0o644, 0o755, 0o644, 0o644]
    assert (there / "changed").stat().st_mtime_ns > expected["changed"][1]
    assert (there / "changed").stat().st_uid == os.getuid()
    assert (there / "changed").read_bytes() == b"changed"
    same = [one.stat() for one in (there / "plain", here / "plain", place.store / "plain")]
    assert {(one.st_size, one.st_mtime_ns // 10**9) for one in same} == {
        (5, same[0].st_mtime_ns // 10**9)
    }
    before = (here / "plain").stat().st_atime_ns
    assert (here / "plain").read_bytes() == b"plain"
    assert (here / "plain").stat().st_atime_ns == before
    with (here / "changed").open("ab", buffering=0) as file:
        file.write(b"!")
        assert os.fstat(file.fileno()).st_mtime_ns > expected["changed"][1]
    assert (here / "changed").stat().st_mtime_ns > expected["changed"][1]
    assert os.statvfs(here).f_bavail * os.statvfs(here).f_frsize == 1 << 50
    assert mount.stop() == 0


@pytest.mark.quotes(
    "`user.trainmount.*`: path, version, state, cached bytes | told, not kept; every `setxattr` is "
    "EOPNOTSUPP",
    "ENODATA | an attribute that is not there",
    "EOPNOTSUPP | `fallocate`, `setxattr`, `O_TMPFILE`",
    "EPERM | `symlink`, `link`, `mkfifo`, `mknod`, `bind` of a Unix socket",
    "EILSEQ, ENAMETOOLONG | a name that is not UTF-8, or longer than 255 bytes",
)
def test_what_a_volume_does_not_have(place: Place) -> None:
    path = place.stored("f", b"content")
    assert path.read_bytes() == b"content"
    told = {name: os.getxattr(path, name) for name in os.listxattr(path)}
    relative = f"{place.a.name}/f".encode()
    version = told.pop("user.trainmount.version")
    assert version
    assert told == {
        "user.trainmount.path": relative,
        "user.trainmount.state": b"clean",
        "user.trainmount.cached_bytes": b"7",
    }
    for name in ("user.x", "user.trainmount.state"):
        assert errno_of(os.setxattr, path, name, b"1") == "EOPNOTSUPP"
    for name in ("user.x", "user.trainmount.error"):
        assert errno_of(os.getxattr, path, name) == "ENODATA"
    with path.open("r+b") as file:
        arguments = (file.fileno(), 0, ctypes.c_long(0), ctypes.c_long(4096))
        assert libc("fallocate", *arguments) == "EOPNOTSUPP"
    assert errno_of(os.open, place.a, os.O_TMPFILE | os.O_RDWR) == "EOPNOTSUPP"
    assert errno_of(os.symlink, "f", place.a / "link") == "EPERM"
    assert errno_of(os.link, path, place.a / "hard") == "EPERM"
    assert errno_of(os.mkfifo, place.a / "fifo") == "EPERM"
    assert errno_of(os.mknod, place.a / "c", stat.S_IFCHR, os.makedev(1, 3)) == "EPERM"
    os.chdir(place.a)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            # The path of a socket has 108 bytes at most.
            assert errno_of(listener.bind, "s") == "EPERM"
    finally:
        os.chdir("/")
    not_utf8 = os.fsencode(place.a) + b"/\xff"
    too_long = place.a / ("n" * 256)
    assert [errno_of(os.stat, one) for one in (not_utf8, too_long)] == ["EILSEQ", "ENAMETOOLONG"]
    assert [errno_of(os.open, one, os.O_CREAT) for one in (not_utf8, too_long)] == [
        *("EILSEQ", "ENAMETOOLONG"),
    ]
    (place.a / ("ä" * 127)).write_bytes(b"254 bytes")
    assert sorted(tree(place.store)) == ["f", "ä" * 127]


LOCK = """
import fcntl, sys
with open(sys.argv[1], "r+b") as file:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("refused")
"""


@pytest.mark.quotes(
    "`flock` and `fcntl` locks | in the kernel of one node, over the death of the daemon and "
    "`trainmount remount`; other nodes do not see them",
)
def test_locks_are_of_one_node(place: Place) -> None:
    path = place.stored("f", b"content")
    exclusive = fcntl.LOCK_EX | fcntl.LOCK_NB
    with path.open("r+b") as one, path.open("r+b") as other, (place.b / "f").open("r+b") as far:
        fcntl.flock(one, exclusive)
        assert errno_of(fcntl.flock, other, exclusive) == "EAGAIN"
        fcntl.flock(far, exclusive)
        fcntl.lockf(one, exclusive)
        assert run(sys.executable, "-c", LOCK, path) == "refused\n"
        fcntl.lockf(far, exclusive)
