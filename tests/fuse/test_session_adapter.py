"""What the adapter makes of the filesystem's answers and errors; no kernel takes part."""

from __future__ import annotations

import errno
import logging
import stat

import pytest
import trio

from trainmount_files.errors import NoSpace, NotFound, QuotaExceeded, Unavailable
from trainmount_fuse.attributes import Attributes, OpenFile, StatFs

pyfuse3 = pytest.importorskip("pyfuse3")
from trainmount_fuse.adapter import BLOCK_BYTES, FuseAdapter, serve_session  # noqa: E402

FILE = Attributes(
    7,
    mode=stat.S_IFREG | 0o640,
    nlink=1,
    uid=5,
    gid=6,
    size=1025,
    mtime_ns=1_700_000_000_123_456_789,
    entry_timeout_seconds=2.5,
    attr_timeout_seconds=1.5,
)


class OneAnswer:
    """A filesystem whose every call gives one answer or raises one error."""

    is_read_only = False

    def __init__(self, answer: object) -> None:
        self._answer = answer
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        async def call(*arguments: object) -> object:
            self.calls.append((name, *arguments))
            await trio.lowlevel.checkpoint()
            if isinstance(self._answer, BaseException):
                raise self._answer
            return self._answer

        return call


def _errno_of(operation: str, error: BaseException, *arguments: object) -> int:
    adapter = FuseAdapter(OneAnswer(error))
    with pytest.raises(pyfuse3.FUSEError) as raised:
        trio.run(getattr(adapter, operation), *arguments)
    return raised.value.errno


def test_the_kernel_of_a_read_only_mount_is_told_to_send_no_flush():
    filesystem = OneAnswer(None)
    filesystem.is_read_only = True
    adapter = FuseAdapter(filesystem)
    with pytest.raises(pyfuse3.FUSEError) as raised:
        trio.run(adapter.flush, 3)
    assert raised.value.errno == errno.ENOSYS
    assert filesystem.calls == []


def test_attributes_arrive_with_their_own_timeouts():
    entry = trio.run(FuseAdapter(OneAnswer(FILE)).lookup, 1, b"name", None)
    assert (entry.st_ino, entry.st_mode, entry.st_size) == (7, FILE.mode, 1025)
    assert (entry.entry_timeout, entry.attr_timeout) == (2.5, 1.5)
    assert (entry.st_uid, entry.st_gid, entry.st_nlink) == (5, 6, 1)
    assert entry.st_mtime_ns == FILE.mtime_ns
    assert (entry.st_blksize, entry.st_blocks) == (BLOCK_BYTES, 3)


def test_a_negative_entry_keeps_inode_0_and_its_timeout():
    negative = Attributes(0, entry_timeout_seconds=3.0)
    entry = trio.run(FuseAdapter(OneAnswer(negative)).lookup, 1, b"name", None)
    assert (entry.st_ino, entry.entry_timeout) == (0, 3.0)


@pytest.mark.parametrize("keep_cache", [True, False])
def test_the_filesystem_decides_whether_the_kernel_keeps_pages(keep_cache):
    opened = OpenFile(9, keep_cache=keep_cache, direct_io=not keep_cache)
    info = trio.run(FuseAdapter(OneAnswer(opened)).open, 7, 0, None)
    assert (info.fh, info.keep_cache, info.direct_io) == (9, keep_cache, not keep_cache)


@pytest.mark.parametrize(
    ("operation", "error", "arguments", "code"),
    [
        ("lookup", NotFound("stat", "x", "gone"), (1, b"x", None), errno.ENOENT),
        ("read", NotFound("read", "x", "gone"), (3, 0, 10), errno.ESTALE),
        ("mkdir", Unavailable("mkdir", "x", "503"), (1, b"x", 0o755, None), errno.EAGAIN),
        ("flush", Unavailable("put", "x", "503"), (3,), errno.EIO),
        ("fsync", NoSpace("put", "x", "507"), (3, False), errno.ENOSPC),
        ("mkdir", QuotaExceeded("mkdir", "x", "403"), (1, b"x", 0o755, None), errno.EDQUOT),
        ("rmdir", OSError(errno.ENOTEMPTY, "full"), (1, b"x", None), errno.ENOTEMPTY),
    ],
)
def test_errors_become_the_numbers_of_the_table(operation, error, arguments, code):
    assert _errno_of(operation, error, *arguments) == code


def test_an_error_that_nobody_planned_is_eio_with_its_traceback_in_the_log(caplog):
    with caplog.at_level(logging.ERROR, logger="trainmount_fuse"):
        assert _errno_of("getattr", KeyError("a bug"), 7, None) == errno.EIO
    assert caplog.records[0].exc_info is not None


def test_forgetting_never_fails():
    trio.run(FuseAdapter(OneAnswer(ValueError("a bug"))).forget, [(7, 1)])


def test_what_a_volume_has_not_is_refused_without_asking_it():
    filesystem = OneAnswer(FILE)
    adapter = FuseAdapter(filesystem)
    for operation, arguments, code in (
        ("symlink", (1, b"x", b"y", None), errno.EPERM),
        ("link", (7, 1, b"x", None), errno.EPERM),
        ("mknod", (1, b"x", stat.S_IFIFO | 0o600, 0, None), errno.EPERM),
        ("readlink", (7, None), errno.EINVAL),
        ("getxattr", (7, b"security.capability", None), errno.ENODATA),
    ):
        with pytest.raises(pyfuse3.FUSEError) as raised:
            trio.run(getattr(adapter, operation), *arguments)
        assert raised.value.errno == code
    assert filesystem.calls == []


def test_free_space_is_translated():
    values = StatFs(4096, 10, 9, 8, 7, 255)
    answer = trio.run(FuseAdapter(OneAnswer(values)).statfs, None)
    assert (answer.f_frsize, answer.f_blocks, answer.f_bavail) == (4096, 10, 9)
    assert (answer.f_files, answer.f_favail, answer.f_namemax) == (8, 7, 255)


def test_only_what_is_to_change_reaches_the_filesystem():
    filesystem = OneAnswer(FILE)
    wanted = pyfuse3.EntryAttributes()
    wanted.st_size, wanted.st_mode = 10, stat.S_IFREG | 0o600
    fields = pyfuse3.SetattrFields()
    trio.run(FuseAdapter(filesystem).setattr, 7, wanted, fields, None, None)
    changes = filesystem.calls[0][2]
    assert (changes.size, changes.mode, changes.uid, changes.mtime_ns) == (None, None, None, None)


def test_a_request_that_is_taken_back_while_it_is_read_does_not_end_the_session(monkeypatch):
    runs = []

    async def main(max_tasks: int) -> None:
        runs.append(max_tasks)
        if len(runs) == 1:
            raise BaseExceptionGroup("", [BlockingIOError(errno.EAGAIN, "try again")])

    monkeypatch.setattr(pyfuse3, "main", main)
    trio.run(serve_session)
    assert len(runs) == 2


def test_any_other_error_ends_the_session(monkeypatch):
    async def main(max_tasks: int) -> None:
        raise BaseExceptionGroup("", [OSError(errno.EBADF, "closed")])

    monkeypatch.setattr(pyfuse3, "main", main)
    with pytest.raises(BaseExceptionGroup):
        trio.run(serve_session)


def test_each_request_is_counted_with_its_error():
    adapter = FuseAdapter(OneAnswer(FILE))
    trio.run(adapter.getattr, 7, None)
    with pytest.raises(pyfuse3.FUSEError):
        trio.run(adapter.readlink, 7, None)
    counted = adapter.requests.statistics()
    assert {name: one.num_requests for name, one in counted.operations.items()} == {
        "getattr": 1,
        "readlink": 1,
    }
    assert counted.num_errors == {("readlink", errno.EINVAL): 1}
    assert counted.num_in_progress == 0
