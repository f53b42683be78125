"""What docs/SEMANTICS.md says of open, read, mmap, write, truncate and holes."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys

import pytest
from tests.mount.semantics.conftest import Nodes, Place, errno_of, libc, run

MIB = 1 << 20


@pytest.mark.quotes(
    "`open` asks the store for the version that is there now.",
    "With `--open-timeout` it may believe what the mount learned that long ago.",
)
def test_an_open_asks_the_store_or_believes_as_long_as_it_may(nodes: Nodes, place: Place) -> None:
    timeouts = ("--open-timeout", "3600", "--metadata-timeout", "3600")
    believing = nodes.mount("believing", *timeouts)
    path = place.stored("f", b"first")
    trusted = believing.mountpoint / place.a.name / "f"
    assert path.read_bytes() == trusted.read_bytes() == b"first"
    (place.b / "f").write_bytes(b"second version")
    assert (path.read_bytes(), trusted.read_bytes()) == (b"second version", b"first")
    asked = nodes.requests()["head_file"]
    assert trusted.read_bytes() == b"first"
    assert nodes.requests()["head_file"] == asked
    assert path.read_bytes() == b"second version"
    assert nodes.requests()["head_file"] > asked
    assert believing.stop() == 0


@pytest.mark.quotes(
    "An open file shows one version, in its bytes and in `fstat`, until it is closed.",
    "No read mixes two versions.",
    "A read is short only at the end of the file.",
)
def test_an_open_file_shows_one_version_and_reads_are_exact(place: Place) -> None:
    size = 40 * MIB
    with place.stored("exact", b"o" * 10 * MIB).open("rb", buffering=0) as exact:
        for offset, length in ((0, 8 * MIB), (3, 5), (MIB - 1, 2), (7 * MIB + 1, 2 * MIB)):
            assert os.pread(exact.fileno(), length, offset) == b"o" * length
        assert os.pread(exact.fileno(), 100, 10 * MIB - 7) == b"o" * 7
        assert os.pread(exact.fileno(), 1, 10 * MIB) == b""
    file = os.open(place.stored("f", b"o" * size), os.O_RDONLY)
    # So that little of it is read ahead.
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
    before = os.fstat(file)
    assert os.pread(file, 4096, 0) == b"o" * 4096
    (place.b / "f").write_bytes(b"n" * (size + 1))
    assert (place.a / "f").read_bytes() == b"n" * (size + 1)
    outcomes = set()
    for offset in range(0, size, MIB - 3):
        try:
            outcomes.add(os.pread(file, MIB, offset).strip(b"o") or "old")
        except OSError as error:
            outcomes.add(error.strerror)
    assert outcomes == {"old", "Stale file handle"}
    after = os.fstat(file)
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert after.st_ino == before.st_ino
    os.close(file)


@pytest.mark.quotes(
    "Files may be mapped, private or shared, to read and to write.", "`O_DIRECT` works."
)
def test_files_may_be_mapped_and_read_directly(place: Place) -> None:
    data = os.urandom(3 * MIB)
    path = place.stored("f", data)
    with path.open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as read:
            assert read[:] == data
        with mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE) as private:
            private[:4] = b"mine"
            assert private[:8] == b"mine" + data[4:8]
    assert (place.store / "f").read_bytes() == data
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        shared[MIB : MIB + 4] = b"ours"
    assert path.read_bytes() == data[:MIB] + b"ours" + data[MIB + 4 :]
    direct = os.open(path, os.O_RDWR | os.O_DIRECT)
    with mmap.mmap(-1, 4096) as page:
        assert os.preadv(direct, [page], 4096) == 4096
        assert page[:] == data[4096:8192]
        assert os.pwritev(direct, [page], 0) == 4096
    os.close(direct)
    assert (place.store / "f").read_bytes()[:8192] == data[4096:8192] * 2


READ = "import sys; print(open(sys.argv[1], 'rb').read().decode())"


@pytest.mark.quotes(
    "`write` takes any offset.",
    "Its bytes go into a copy on the local disk, and all programs of the node read them at once, "
    "through older descriptors too.",
)
def test_what_is_written_is_on_the_local_disk_and_read_by_all_of_the_node(
    nodes: Nodes, place: Place
) -> None:
    path = place.stored("f", b"0123456789")
    older = os.open(path, os.O_RDONLY)
    assert os.pread(older, 100, 0) == b"0123456789"
    file = os.open(path, os.O_WRONLY)
    assert os.pwrite(file, b"ab", 7) == 2
    assert os.pwrite(file, b"c", 0) == 1
    assert os.pwrite(file, b"end", 12) == 3
    expected = b"c123456ab9\0\0end"
    assert os.pread(older, 100, 0) == expected
    staging = nodes.a.folder / "state/staging"
    assert expected in [one.read_bytes() for one in staging.iterdir()]
    assert (place.store / "f").read_bytes() == b"0123456789"
    assert run(sys.executable, "-c", READ, path) == expected.decode() + "\n"
    os.close(file)
    os.close(older)
    assert (place.store / "f").read_bytes() == expected


@pytest.mark.quotes(
    "The first change of a stored file fetches the whole file, unless `O_TRUNC` or `truncate` "
    "cuts it to nothing."
)
def test_the_first_change_fetches_what_stays(nodes: Nodes, place: Place) -> None:
    def fetched() -> int:
        found = nodes.requests()
        return found["get_file"] + found["presigned_get"]

    for name in ("cut", "truncated", "changed"):
        place.stored(name, b"x" * 30 * MIB)
    before = fetched()
    (place.a / "cut").write_bytes(b"new")
    os.truncate(place.a / "truncated", 0)
    assert fetched() == before
    with (place.a / "changed").open("ab") as file:
        file.write(b"!")
    assert os.getxattr(place.a / "changed", "user.trainmount.state") == b"clean"
    # In ranges of 8 MiB.
    assert fetched() >= before + 4
    assert (place.store / "changed").read_bytes() == b"x" * 30 * MIB + b"!"
    assert (place.store / "truncated").read_bytes() == b""


APPEND = """
import os, sys
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for _ in range(50):
    assert os.write(file, sys.argv[2].encode() * 10) == 10
os.close(file)
"""


@pytest.mark.quotes(
    "`O_APPEND` goes on at the end that the mount knows, so that programs of one node overwrite "
    "nothing of each other."
)
def test_programs_of_one_node_append_without_loss(place: Place) -> None:
    path = place.stored("log", b"begun")
    writers = [
        subprocess.Popen([sys.executable, "-c", APPEND, str(path), letter]) for letter in "abc"
    ]
    assert [one.wait(60) for one in writers] == [0, 0, 0]
    stored = (place.store / "log").read_bytes()
    assert stored[:5] == b"begun"
    records = [stored[start : start + 10] for start in range(5, len(stored), 10)]
    assert sorted(records) == sorted([letter * 10 for letter in (b"a", b"b", b"c")] * 50)


@pytest.mark.quotes(
    "`truncate` cuts, or extends by zeros.",
    "Where no program has the file open for writing, the store has the new size when it returns.",
    "Holes are zeros, here and in the store, and `SEEK_HOLE` finds the end of the file only.",
)
def test_truncate_and_holes(place: Place) -> None:
    path, stored = place.stored("f", b"0123456789"), place.store / "f"
    reader = os.open(path, os.O_RDONLY)
    os.truncate(path, 4)
    assert stored.read_bytes() == b"0123"
    os.truncate(path, 6)
    assert stored.read_bytes() == b"0123\0\0"
    assert os.pread(reader, 10, 0) == b"0123\0\0"
    os.close(reader)
    with path.open("r+b", buffering=0) as file:
        file.truncate(8)
        assert stored.stat().st_size == 6
        file.seek(5 * MIB)
        file.write(b"end")
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 5 * MIB + 3
        assert os.pread(file.fileno(), MIB, MIB) == bytes(MIB)
    assert stored.read_bytes() == path.read_bytes() == b"0123" + bytes(5 * MIB - 4) + b"end"


@pytest.mark.quotes(
    "`fallocate(2)` is EOPNOTSUPP in every mode.",
    "`posix_fallocate(3)` then writes, and works.",
    "`copy_file_range(2)` and `sendfile(2)` work, through this machine.",
)
def test_space_ahead_and_copies(place: Place) -> None:
    data = os.urandom(MIB)
    path = place.stored("f", data)
    with path.open("r+b") as file, (place.a / "copy").open("wb") as copy:
        # Plain, keep size, punch a hole, collapse, zero, insert.
        for mode in (0, 1, 3, 8, 16, 32):
            arguments = (file.fileno(), mode, ctypes.c_long(0), ctypes.c_long(4096))
            assert libc("fallocate", *arguments) == "EOPNOTSUPP"
        os.posix_fallocate(file.fileno(), 0, MIB + 10)
        assert os.copy_file_range(file.fileno(), copy.fileno(), MIB, 0, 0) == MIB
        copy.seek(MIB)
        assert os.sendfile(copy.fileno(), file.fileno(), MIB - 5, 10) == 10
    assert (place.store / "f").read_bytes() == data + bytes(10)
    assert (place.store / "copy").read_bytes() == data + data[-5:] + bytes(5)


@pytest.mark.quotes(
    "**No pretence.** What a volume cannot do is refused with the errno that programs know, and "
    "nothing has changed then."
)
def test_what_cannot_be_done_changes_nothing(place: Place) -> None:
    path = place.stored("f", b"content")
    (place.store / "d").mkdir()
    before = path.stat()
    refused = [
        errno_of(os.symlink, "f", place.a / "link"),
        errno_of(os.link, path, place.a / "hard"),
        errno_of(os.setxattr, path, "user.x", b"1"),
        errno_of(os.open, place.a, os.O_TMPFILE | os.O_RDWR),
        errno_of(os.rename, place.a / "d", place.a / "d/into-itself"),
        errno_of(os.rename, path, place.a / "d"),
        errno_of(os.open, place.a / ("n" * 256), os.O_CREAT),
    ]
    assert refused == [
        *("EPERM", "EPERM", "EOPNOTSUPP", "EOPNOTSUPP", "EINVAL", "EISDIR", "ENAMETOOLONG"),
    ]
    assert sorted(one.name for one in place.store.iterdir()) == ["d", "f"]
    assert (place.store / "f").read_bytes() == b"content"
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)
