"""Programs that move bytes over bare sockets, so that a server is measured and not a client.

Called for `server_bodies`, in processes of their own. A request is a line of bytes and an answer is
its head and a number of bytes that are thrown away, but for the numbers that tell that they are
the right ones (`programs.Checker`).
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final
from urllib.parse import urlsplit

from measure import MIB, Timing, measured
from programs import Checker

__all__ = [
    "exchange",
    "read_ranges",
    "read_until_told",
    "read_whole",
    "receive_to_files",
    "upload",
    "wait_times",
]

_TIMEOUT_SECONDS: Final = 300.0
_READ_BYTES: Final = MIB
_HEAD_BYTES: Final = 64 * 1024


class Connection:
    """One connection that is kept; for one thread."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._socket = socket.create_connection((parts.hostname, parts.port), _TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._buffer = memoryview(bytearray(_READ_BYTES))

    def close(self) -> None:
        self._socket.close()

    def get(
        self, target: str, extra: str = "", checker: Checker | None = None, *, method: str = "GET"
    ) -> int:
        """Ask and throw the body away; returns its length. Raises RuntimeError for a refusal."""
        head = f"{method} {target} HTTP/1.1\r\nHost: benchmark\r\n{self._headers}{extra}\r\n"
        self._socket.sendall(head.encode())
        return self._answer(checker, has_body=method != "HEAD")

    def put(self, target: str, body: memoryview | bytes, *, repeat: int = 1) -> None:
        """Store `body`, `repeat` times in a row."""
        length = len(body) * repeat
        head = f"PUT {target} HTTP/1.1\r\nHost: benchmark\r\n{self._headers}"
        head += f"Content-Length: {length}\r\n\r\n"
        if length <= _HEAD_BYTES:
            self._socket.sendall(head.encode() + bytes(body))
        else:
            self._socket.sendall(head.encode())
            for _ in range(repeat):
                self._socket.sendall(body)
        self._answer(None, has_body=True)

    def _answer(self, checker: Checker | None, *, has_body: bool) -> int:
        got = self._socket.recv_into(self._buffer, _HEAD_BYTES)
        while (end := bytes(self._buffer[:got]).find(b"\r\n\r\n")) < 0:
            count = self._socket.recv_into(self._buffer[got:], _HEAD_BYTES)
            if not count:
                raise RuntimeError("the server closed the connection")
            got += count
        head = bytes(self._buffer[:end]).lower()
        if head.split(b" ", 2)[1] not in (b"200", b"201", b"204", b"206"):
            raise RuntimeError(f"refused: {bytes(self._buffer[: min(got, 500)])!r}")
        if b"transfer-encoding: chunked" in head:
            # No pieces to check here, only the end to find.
            tail = bytes(self._buffer[:got][-5:])
            while tail != b"0\r\n\r\n":
                count = self._socket.recv_into(self._buffer)
                tail = (tail + bytes(self._buffer[:count][-5:]))[-5:]
            return 0
        if not has_body or b"content-length: " not in head:
            return 0
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n", 1)[0])
        piece = self._buffer[end + 4 : got]
        left = length - len(piece)
        while True:
            if checker is not None:
                checker.feed(piece)
            if not left:
                return length
            count = self._socket.recv_into(self._buffer, min(left, _READ_BYTES))
            if not count:
                raise RuntimeError(f"{left} bytes of {length} did not come")
            piece = self._buffer[:count]
            left -= count


def read_whole(
    url: str, target: str, headers: Mapping[str, str], size_bytes: int, num_connections: int
) -> Timing:
    """Every connection reads all of the file."""

    def read(connection: Connection) -> None:
        checker = Checker()
        connection.get(target, checker=checker)
        checker.finish(size_bytes)

    return _at_once(url, headers, num_connections, read)


def read_ranges(
    url: str,
    target: str,
    headers: Mapping[str, str],
    size_bytes: int,
    num_connections: int,
    range_bytes: int,
) -> Timing:
    """The connections share the file's ranges, each the next one when it has done its own."""
    starts = iter(range(0, size_bytes, range_bytes))

    def read(connection: Connection) -> None:
        # The next of a range is one bytecode of the interpreter: no lock.
        for start in starts:
            end = min(start + range_bytes, size_bytes)
            checker = Checker(start)
            connection.get(target, f"Range: bytes={start}-{end - 1}\r\n", checker)
            checker.finish(end)

    return _at_once(url, headers, num_connections, read)


def read_until_told(
    url: str, target: str, headers: Mapping[str, str], num_connections: int
) -> Timing:
    """Every connection reads all of the file again and again, until the input of this process
    ends."""
    is_over = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=listen, daemon=True).start()

    def read(connection: Connection) -> None:
        while not is_over.is_set():
            connection.get(target, "Range: bytes=0-268435455\r\n")

    return _at_once(url, headers, num_connections, read)


def upload(
    url: str, target: str, headers: Mapping[str, str], size_bytes: int, num_connections: int
) -> Timing:
    """Every connection stores a file of its own, `target`-0 and so on."""
    noise = memoryview(os.urandom(MIB))
    numbers = itertools.count()

    def write(connection: Connection) -> None:
        connection.put(f"{target}-{next(numbers)}", noise, repeat=size_bytes // MIB)

    return _at_once(url, headers, num_connections, write)


def exchange(
    url: str,
    target: str,
    headers: Mapping[str, str],
    method: str,
    num_requests: int,
    num_connections: int,
    body_bytes: int = 0,
) -> Timing:
    """Many small requests. `{}` in `target` becomes the number of the request."""
    numbers = iter(range(num_requests))
    body = os.urandom(body_bytes)

    def ask(connection: Connection) -> None:
        for number in numbers:
            if method == "PUT":
                connection.put(target.format(number), body)
            else:
                connection.get(target.format(number), method=method)

    return _at_once(url, headers, num_connections, ask)


def wait_times(url: str, target: str, headers: Mapping[str, str], seconds: float) -> Timing:
    """HEAD after HEAD on one connection for so long; `seconds` of the Timing is the median of one,
    with the 99th percentile in `details`."""
    connection = Connection(url, headers)
    took: list[float] = []
    with measured() as timing:
        end = time.perf_counter() + seconds
        while (began := time.perf_counter()) < end:
            connection.get(target, method="HEAD")
            took.append(time.perf_counter() - began)
            time.sleep(0.005)
    connection.close()
    timing.seconds = median(took)
    timing.details = {"p99": sorted(took)[int(len(took) * 0.99)], "count": len(took)}
    return timing


def receive_to_files(folder: str, ready: str, size_bytes: int, num_connections: int) -> Timing:
    """Not HTTP at all: a thread a connection, from the socket into a file. Prints nothing but the
    Timing; the address goes to the file `ready`. The limit of what a Python server can do."""
    listener = socket.create_server(("127.0.0.1", 0))
    Path(ready).write_text(f"http://127.0.0.1:{listener.getsockname()[1]}")

    def receive(number: int) -> None:
        connection, _ = listener.accept()
        buffer = memoryview(bytearray(MIB))
        left = size_bytes
        with (Path(folder) / f"received-{number}").open("wb", buffering=0) as file:
            got = connection.recv_into(buffer)
            head = bytes(buffer[:got]).find(b"\r\n\r\n") + 4
            left -= file.write(buffer[head:got])
            while left:
                left -= file.write(buffer[: connection.recv_into(buffer)])
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        connection.close()

    with measured() as timing, ThreadPoolExecutor(num_connections) as threads:
        list(threads.map(receive, range(num_connections)))
    return timing


def _at_once(
    url: str,
    headers: Mapping[str, str],
    num_connections: int,
    work: Callable[[Connection], None],
) -> Timing:
    connections = [Connection(url, headers) for _ in range(num_connections)]
    gate = threading.Barrier(num_connections + 1)

    def run(connection: Connection) -> None:
        gate.wait()
        work(connection)

    with ThreadPoolExecutor(num_connections) as threads:
        done = [threads.submit(run, connection) for connection in connections]
        with measured() as timing:
            gate.wait()
            for one in done:
                one.result()
    for connection in connections:
        connection.close()
    return timing
