"""The ways that are there for speed, with the values they must give: bodies sent by threads,
answers without a thread, directories that are not read again for each page.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import urllib3

from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.server.cached_open import open_cached
from trainmount_files.server.snapshots import Snapshots

TOKEN = "dapi-token-of-the-tests"
FILES = "/api/2.0/fs/files/Volumes/main/default/data"
VOLUME = "main/default/data"
MIB = 1 << 20

# More than the kernel's buffers of both sockets hold, so that it cannot be sent to nobody.
LARGE = 48 * MIB

Http = Callable[..., urllib3.BaseHTTPResponse]


def patterned(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that tell where they are from."""
    block = random.Random(seed).randbytes(65521)
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def connect(server: LocalServer, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    parts = urlsplit(server.url)
    connection = socket.socket()
    if receive_buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    connection.settimeout(20)
    connection.connect((parts.hostname, parts.port))
    return connection


def request(method: str, name: str, extra: str = "") -> bytes:
    head = f"{method} {FILES}/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}{extra}\r\n".encode()


class Answers:
    """The answers that come on one connection, one after the other."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rb")

    def next(self, *, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
        status = int(self._file.readline().split()[1])
        headers = {}
        while (line := self._file.readline().rstrip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name] = value
        length = int(headers.get("Content-Length", "0")) if has_body else 0
        return status, headers, self._file.read(length)

    def close(self) -> None:
        self._file.close()


def open_descriptors(path: Path) -> int:
    """How many descriptors of this process, the server's too, are open on a file."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            count += link.readlink() == path
        except FileNotFoundError:
            continue
    return count


@pytest.fixture
def crowded(served: Path) -> Iterator[LocalServer]:
    """A server with one thread for everything and one to send files."""
    settings = ServerSettings(
        directory=served,
        token=TOKEN,
        volumes=("main.default.data",),
        fsync=False,
        num_threads=1,
        num_senders=1,
    )
    with LocalServer(settings) as running:
        yield running


def test_ranges_at_once_get_exactly_their_bytes(http: Http, served: Path) -> None:
    content = patterned(20 * MIB)
    (served / VOLUME / "file").write_bytes(content)
    chance = random.Random(1)
    edges = [(0, 1), (0, len(content)), (256 * 1024 - 1, 512 * 1024), (1, 256 * 1024 + 1)]
    for _ in range(60):
        start = chance.randrange(len(content))
        edges.append((start, min(len(content), start + chance.choice([1, 300_000, 4 * MIB]))))

    def read(span: tuple[int, int]) -> None:
        header = f"bytes={span[0]}-{span[1] - 1}"
        answer = http("GET", f"{FILES}/file", headers={"Range": header})
        assert answer.status == 206
        assert answer.data == content[span[0] : span[1]]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, edges))


def test_a_connection_goes_on_after_a_large_answer(server: LocalServer, served: Path) -> None:
    large, small = patterned(3 * MIB), b"small" * 100
    (served / VOLUME / "large").write_bytes(large)
    (served / VOLUME / "small").write_bytes(small)
    with connect(server) as connection:
        answers = Answers(connection)
        for _ in range(3):
            connection.sendall(request("GET", "large"))
            assert answers.next()[2] == large
            connection.sendall(request("HEAD", "large"))
            status, headers, _body = answers.next(has_body=False)
            assert (status, headers["Content-Length"]) == (200, str(len(large)))
            connection.sendall(request("GET", "small"))
            assert answers.next()[2] == small
            connection.sendall(request("GET", "missing"))
            assert answers.next()[0] == 404
        answers.close()


def test_requests_in_a_row_are_answered_in_their_order(server: LocalServer, served: Path) -> None:
    contents = {}
    for index in range(12):
        # Small ones fill the connection, so that a large one finds bytes of theirs under way.
        contents[f"{index}"] = patterned(5 * MIB if index % 4 == 3 else 250_000, seed=index)
        (served / VOLUME / f"{index}").write_bytes(contents[f"{index}"])
    with connect(server, receive_buffer_bytes=4096) as connection:
        connection.sendall(b"".join(request("GET", name) for name in contents))
        time.sleep(0.2)  # for the connection to fill up; the answers are the same without
        answers = Answers(connection)
        for content in contents.values():
            assert answers.next()[2] == content
        answers.close()


def test_a_client_that_closes_its_half_still_gets_the_file(
    server: LocalServer, served: Path
) -> None:
    content = patterned(LARGE)
    (served / VOLUME / "file").write_bytes(content)
    with connect(server) as connection:
        connection.sendall(request("GET", "file"))
        assert connection.recv(1, socket.MSG_PEEK)
        connection.shutdown(socket.SHUT_WR)
        answers = Answers(connection)
        assert answers.next()[2] == content
        answers.close()


def test_a_client_that_goes_away_leaves_nothing_open(server: LocalServer, served: Path) -> None:
    path = served / VOLUME / "file"
    path.write_bytes(bytes(LARGE))
    for linger in (False, True):
        with connect(server) as connection:
            connection.sendall(request("GET", "file"))
            connection.recv(1000)
            assert eventually(lambda: open_descriptors(path) > 0)
            if linger:  # a reset in the place of a close
                option = (1).to_bytes(4, "little") + bytes(4)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, option)
        assert eventually(lambda: open_descriptors(path) == 0)


def test_a_server_that_stops_in_the_middle_leaves_nothing_open(served: Path) -> None:
    path = served / VOLUME / "file"
    settings = ServerSettings(
        directory=served, token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as server:
        path.write_bytes(bytes(LARGE))
        connection = connect(server)
        connection.sendall(request("GET", "file"))
        connection.recv(1000)
    with connection:
        assert eventually(lambda: open_descriptors(path) == 0)


def test_clients_that_do_not_read_keep_nobody_waiting(crowded: LocalServer, served: Path) -> None:
    content = patterned(LARGE)
    (served / VOLUME / "file").write_bytes(content)
    idle = [connect(crowded, receive_buffer_bytes=4096) for _ in range(5)]
    for connection in idle:
        connection.sendall(request("GET", "file"))
        connection.recv(1000)

    with connect(crowded) as connection:
        answers = Answers(connection)
        connection.sendall(request("HEAD", "file"))
        assert answers.next(has_body=False)[0] == 200
        connection.sendall(request("GET", "file"))
        assert answers.next()[2] == content
        connection.sendall(request("PUT", "new", "Content-Length: 3\r\n") + b"new")
        assert answers.next()[0] == 204
        answers.close()
    for connection in idle:
        connection.close()


def test_a_download_without_end_gives_others_their_turn(crowded: LocalServer, served: Path) -> None:
    content = patterned(3 * MIB)
    (served / VOLUME / "file").write_bytes(content)
    (served / VOLUME / "endless").touch()
    os.truncate(served / VOLUME / "endless", 1 << 42)
    greedy = connect(crowded)
    greedy.settimeout(None)
    greedy.sendall(request("GET", "endless"))
    # A process of its own, or it would not be faster than the server.
    code = "import socket, sys; s = socket.socket(fileno=int(sys.argv[1]))"
    code += "\nwhile s.recv(1 << 22): pass"
    command = [sys.executable, "-S", "-c", code, f"{greedy.fileno()}"]
    reader = subprocess.Popen(command, pass_fds=[greedy.fileno()])
    try:
        with connect(crowded) as connection:
            answers = Answers(connection)
            for _ in range(3):
                connection.sendall(request("GET", "file"))
                assert answers.next()[2] == content
            answers.close()
    finally:
        reader.kill()
        reader.wait()
        greedy.close()


def test_a_large_answer_waits_for_what_is_left_of_small_ones(
    server: LocalServer, served: Path
) -> None:
    # The small ones leave a rest with the event loop whenever the connection is full.
    sizes = [300_000 if index % 4 == 3 else 30_000 + index for index in range(120)]
    for index, size in enumerate(sizes):
        (served / VOLUME / f"{index}").write_bytes(patterned(size, seed=index))
    with connect(server, receive_buffer_bytes=4096) as connection:
        connection.sendall(b"".join(request("GET", f"{index}") for index in range(len(sizes))))
        answers = Answers(connection)
        for index, size in enumerate(sizes):
            assert answers.next()[2] == patterned(size, seed=index)
        answers.close()


def test_a_slow_client_gets_every_byte(server: LocalServer, served: Path) -> None:
    content = patterned(LARGE)
    (served / VOLUME / "file").write_bytes(content)
    with connect(server) as connection:
        connection.sendall(request("GET", "file"))
        time.sleep(0.3)  # longer than a thread has patience for
        answers = Answers(connection)
        assert answers.next()[2] == content
        answers.close()


def test_a_file_that_shrinks_while_it_is_sent_ends_the_connection(
    server: LocalServer, served: Path
) -> None:
    path = served / VOLUME / "file"
    path.write_bytes(bytes(LARGE))
    with connect(server) as connection:
        connection.sendall(request("GET", "file"))
        received = len(connection.recv(1000))
        os.truncate(path, 1000)
        while count := len(connection.recv(MIB)):
            received += count
        assert 1000 <= received < LARGE


@pytest.mark.parametrize("size_bytes", [0, 1, 262_144, 262_145, MIB, 3 * MIB + 7])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_of_any_size_is_stored_exactly(http: Http, size_bytes: int, chunked: bool) -> None:
    content = patterned(size_bytes)
    pieces = [content[at : at + 70_000] for at in range(0, size_bytes, 70_000)]

    body = iter(pieces) if chunked else content
    assert http("PUT", f"{FILES}/a/b/file", body=body, chunked=chunked).status == 204

    assert http("GET", f"{FILES}/a/b/file").data == content
    assert int(http("HEAD", f"{FILES}/a/b/file").headers["Content-Length"]) == size_bytes


def test_uploads_at_once_do_not_mix(http: Http) -> None:
    contents = [patterned(5 * MIB, seed=index) for index in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for index, answer in enumerate(
            pool.map(lambda one: http("PUT", f"{FILES}/{one[0]}", body=one[1]), enumerate(contents))
        ):
            assert answer.status == 204, index
    for index, content in enumerate(contents):
        assert http("GET", f"{FILES}/{index}").data == content


def test_a_small_body_without_a_volume_is_refused_and_the_connection_kept(
    server: LocalServer,
) -> None:
    target = request("PUT", "file", "Content-Length: 5\r\n").replace(b"main/default", b"main/other")
    with connect(server) as connection:
        answers = Answers(connection)
        for _ in range(2):
            connection.sendall(target + b"hello")
            assert answers.next()[0] == 404
        answers.close()


def test_cached_open_opens_what_is_known_and_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    (tmp_path / "link").symlink_to("file")
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        try:
            fd = open_cached("file", flags, dir_fd=folder)
        except OSError:
            pytest.skip("this kernel has no openat2 with RESOLVE_CACHED")
        with os.fdopen(fd) as file:
            assert file.read() == "content"
            assert not os.get_inheritable(file.fileno())
        for name in ("link", "missing"):
            with pytest.raises(OSError):
                open_cached(name, flags, dir_fd=folder)
    finally:
        os.close(folder)


def read_pages(snapshots: Snapshots, fd: int, size: int) -> list[list[bytes]]:
    pages, after, is_last = [], b"", False
    while not is_last:
        names, is_last = snapshots.page(fd, after, size)
        pages.append(names)
        after = names[-1] if names else after
    return pages


# Whether the directory's times are old enough to be trusted, and how much is read ahead.
@pytest.mark.parametrize("ahead_seconds", [0, 3600])
@pytest.mark.parametrize("max_names", [7, 50_000])
def test_pages_together_are_the_directory(
    tmp_path: Path, ahead_seconds: int, max_names: int
) -> None:
    names = [f"{number:03}".encode() for number in range(40)]
    for name in reversed(names):
        (tmp_path / name.decode()).touch()
    (tmp_path / "link").symlink_to("000")
    (tmp_path / os.fsdecode(b"\xff")).touch()
    snapshots = Snapshots(
        max_names=max_names, clock_ns=lambda: time.time_ns() + ahead_seconds * 10**9
    )
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        for size in (1, 6, 7, 8, 20, 39, 40, 41):
            pages = read_pages(snapshots, fd, size)
            assert [name for page in pages for name in page] == names
            assert [len(page) for page in pages[:-1]] == [size] * (len(pages) - 1)
            assert pages[-1]
    finally:
        os.close(fd)


def test_a_page_knows_what_was_made_and_removed_since_the_one_before(tmp_path: Path) -> None:
    for name in "abcdfg":
        (tmp_path / name).touch()
    snapshots = Snapshots(clock_ns=lambda: time.time_ns() + 3600 * 10**9)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert snapshots.page(fd, b"", 2) == ([b"a", b"b"], False)
        time.sleep(0.02)  # more than a tick of the clock that the kernel stamps directories with
        (tmp_path / "e").touch()
        (tmp_path / "d").unlink()
        assert snapshots.page(fd, b"b", 2) == ([b"c", b"e"], False)
        time.sleep(0.02)
        (tmp_path / "a2").touch()
        assert snapshots.page(fd, b"e", 2) == ([b"f", b"g"], True)
    finally:
        os.close(fd)


def test_listings_at_once_in_many_directories_are_right(tmp_path: Path) -> None:
    snapshots = Snapshots(max_names=10, clock_ns=lambda: time.time_ns() + 3600 * 10**9)
    expected = {}
    for number in range(12):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        expected[folder] = [f"{number}-{index:02}".encode() for index in range(25)]
        for name in expected[folder]:
            (folder / name.decode()).touch()
    gate = threading.Barrier(len(expected))

    def read(folder: Path) -> list[bytes]:
        fd = os.open(folder, os.O_RDONLY)
        try:
            gate.wait()
            return [name for page in read_pages(snapshots, fd, 4) for name in page]
        finally:
            os.close(fd)

    with ThreadPoolExecutor(len(expected)) as pool:
        assert dict(zip(expected, pool.map(read, expected), strict=True)) == expected


def test_a_path_that_another_server_has_locked_holds_up_nobody_else(
    http: Http, served: Path
) -> None:
    folder = served / ".trainmount" / "locks"
    held = [
        os.open(folder / f"{number:02d}", os.O_RDWR | os.O_CREAT, 0o600) for number in range(64)
    ]
    for lock in held:
        fcntl.flock(lock, fcntl.LOCK_EX)
    with ThreadPoolExecutor(1) as executor:
        stored = executor.submit(http, "PUT", f"{FILES}/file", body=b"0123456789")
        try:
            # Answered while the store of the file waits: nothing but that file does.
            assert http("GET", "/api/2.0/fs/directories/Volumes/main/default/data").status == 200
            assert not stored.done()
            assert not (served / VOLUME / "file").exists()
        finally:
            for lock in held:
                os.close(lock)
        assert stored.result(20).status == 204
    assert (served / VOLUME / "file").read_bytes() == b"0123456789"
    assert not list((served / ".trainmount" / "temporary").glob("*/[0-9]*"))
