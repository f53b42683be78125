"""A range of a file on its way into a connection."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_files.errors import Cancelled, InvalidRequest, VolumeError
from trainmount_files.files_api.file_bodies import body_of
from trainmount_files.files_api.file_slice import FileSlice
from trainmount_files.volume import ByteRange

DATA = os.urandom(3_000_001)
WANTED = ByteRange(1, len(DATA))


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(DATA)
    fd = os.open(tmp_path / "file", os.O_RDWR)
    yield fd
    os.close(fd)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(30.0)
        yield near, far


def slice_of(descriptor: int, cancel: threading.Event | None = None) -> FileSlice:
    body = body_of("file", descriptor, WANTED, cancel, size_bytes=WANTED.end)()
    assert isinstance(body, FileSlice)
    return body


def received(ends: tuple[socket.socket, socket.socket], body: FileSlice) -> bytes:
    near, far = ends
    got = bytearray()

    def receive() -> None:
        while piece := far.recv(100_000):
            got.extend(piece)

    reader = threading.Thread(target=receive)
    reader.start()
    try:
        body.send_to(near)
    finally:
        near.shutdown(socket.SHUT_WR)
        reader.join()
    return bytes(got)


def test_a_range_arrives_whole_through_a_socket_that_takes_a_part_of_it_at_once(
    descriptor: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    assert received(ends, slice_of(descriptor)) == DATA[1:]


def test_a_file_that_the_kernel_does_not_send_is_copied_from_where_it_stopped(
    descriptor: int, ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    sendfile, sizes = os.sendfile, [100_000, 50_000]

    def once(out: int, source: int, offset: int, count: int) -> int:
        if not sizes:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return sendfile(out, source, offset, min(count, sizes.pop()))

    monkeypatch.setattr(os, "sendfile", once)
    assert received(ends, slice_of(descriptor)) == DATA[1:]


def test_a_file_that_became_shorter_is_told_from_a_broken_connection(
    descriptor: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    os.ftruncate(descriptor, 2_000_000)
    with pytest.raises(InvalidRequest, match="fewer than 3000001 bytes"):
        received(ends, slice_of(descriptor))


def test_a_connection_that_takes_nothing_fails_after_its_timeout(
    descriptor: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[0].settimeout(0.05)
    with pytest.raises(TimeoutError):
        slice_of(descriptor).send_to(ends[0])


def test_a_connection_that_broke_is_an_error_of_the_connection(
    descriptor: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    ends[1].close()
    with pytest.raises(ConnectionError):
        slice_of(descriptor).send_to(ends[0])


def test_nothing_is_sent_for_who_has_cancelled(
    descriptor: int, ends: tuple[socket.socket, socket.socket]
) -> None:
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled) as caught:
        received(ends, slice_of(descriptor, cancel))
    error: VolumeError = caught.value
    assert error.path == "file"
