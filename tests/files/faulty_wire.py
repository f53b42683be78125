"""A byte-level proxy between a client and the local server that breaks what passes on purpose.

It reads whole requests, forwards them (or not) and writes whatever bytes a `Fault` says, so that
everything a wire, a proxy or a store can do to an answer can be said in a few lines. Signed URLs
lead through it too, since the server makes them from the `Host` header.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from time import monotonic

__all__ = ["Answer", "Deed", "FaultyWire", "Forward", "Rule", "Seen", "route_of"]


@dataclass(frozen=True)
class Seen:
    """A request as it came."""

    route: str
    """Named as the server names its routes."""
    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes
    at: float


@dataclass(frozen=True)
class Answer:
    """An answer of the server."""

    status: int
    reason: str = "Injected"
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def header(self, name: str, value: str | None) -> Answer:
        """The same with another header, or without it."""
        kept = {key: v for key, v in self.headers.items() if key.lower() != name.lower()}
        return replace(self, headers=kept if value is None else {**kept, name: value})

    def with_body(self, body: bytes) -> Answer:
        return replace(self.header("Content-Length", str(len(body))), body=body)

    def head(self) -> bytes:
        lines = [f"HTTP/1.1 {self.status} {self.reason}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def encode(self) -> bytes:
        return self.head() + self.body


@dataclass(frozen=True)
class Deed:
    """What the client gets to see of one request."""

    data: bytes = b""
    then: str = "keep"
    """`keep` the connection, `close` it or `reset` it."""
    silence_seconds: float = 0.0
    """Before anything is sent; ends early where the client leaves."""
    piece_bytes: int = 0
    """Send in pieces of this size, with a pause after each."""
    pause_seconds: float = 0.0
    stall_after: int | None = None
    """Send this much, then nothing until the client leaves."""


Forward = Callable[[], Answer]
Break = Callable[[Seen, Forward], Deed]


@dataclass
class Rule:
    """Which requests are broken, and how."""

    deed: Break
    routes: frozenset[str] | None = None
    """None is every route."""
    skip: int = 0
    count: int | None = None
    probability: float = 1.0
    cut_upload: int | None = None
    """Take this much of the request's body, then reset; `deed` is not asked."""
    hits: int = 0
    matched: int = 0


def route_of(method: str, target: str) -> str:
    path, _, query = target.partition("?")
    if path.startswith("/presigned/"):
        return {"GET": "presigned_get", "PUT": "presigned_put"}.get(method, "presigned_other")
    name = path.removeprefix("/api/2.0/fs/")
    if name in ("create-download-url", "create-upload-part-urls"):
        return name.replace("-", "_")
    if name.startswith("directories"):
        return {
            "GET": "list_directory",
            "HEAD": "head_directory",
            "PUT": "make_directory",
            "DELETE": "remove_directory",
        }[method]
    if method == "POST":
        action = query.partition("action=")[2].partition("&")[0]
        return action.replace("-", "_")
    return f"{method.lower()}_file"


class FaultyWire:
    """The proxy. `url` is what the client is told; rules may change at any time."""

    def __init__(self, upstream: str, seed: int = 1) -> None:
        host, _, port = upstream.removeprefix("http://").partition(":")
        self._upstream = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        # Guarded by the lock.
        self._rules: list[Rule] = []
        self._connections: set[socket.socket] = set()
        self._random = random.Random(seed)
        self.seen: list[Seen] = []
        self._threads: list[threading.Thread] = []
        self._accepter = threading.Thread(target=self._accept, name="wire-accept")
        self._accepter.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    @property
    def num_connections(self) -> int:
        with self._lock:
            return len(self._connections)

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(seen.route for seen in self.seen)

    def set(self, *rules: Rule) -> None:
        """Put these rules in force and forget what was seen."""
        with self._lock:
            self._rules = list(rules)
            self.seen = []

    def hits(self) -> int:
        with self._lock:
            return sum(rule.hits for rule in self._rules)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepter.join()
        with self._lock:
            left = list(self._connections)
        for connection in left:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> FaultyWire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._connections.add(connection)
            thread = threading.Thread(target=self._serve, args=(connection,), name="wire")
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._one(connection):
                    pass
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _take(self, route: str) -> Rule | None:
        with self._lock:
            for rule in self._rules:
                if rule.routes is not None and route not in rule.routes:
                    continue
                if rule.probability < 1 and self._random.random() >= rule.probability:
                    continue
                rule.matched += 1
                if rule.matched > rule.skip and (rule.count is None or rule.hits < rule.count):
                    rule.hits += 1
                    return rule
        return None

    def _one(self, connection: socket.socket) -> bool:
        """One request and its answer; whether the connection lives on."""
        data = b""
        while b"\r\n\r\n" not in data:
            piece = connection.recv(65536)
            if not piece:
                return False
            data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        route = route_of(method, target)
        rule = self._take(route)
        length = int(headers.get("content-length", "0"))
        limit = length if rule is None or rule.cut_upload is None else min(rule.cut_upload, length)
        while len(body) < limit:
            piece = connection.recv(65536)
            if not piece:
                return False
            body += piece
        seen = Seen(route, method, target, headers, body, monotonic())
        with self._lock:
            self.seen.append(seen)
        if rule is not None and rule.cut_upload is not None:
            # What came goes on to the server, which must throw it away.
            with suppress(OSError), self._upstream_socket() as upstream:
                upstream.sendall(head + b"\r\n\r\n" + body[:limit])
            _reset(connection)
            return False
        if rule is None:
            return _act(connection, Deed(self._forward(head, seen).encode()))
        return _act(connection, rule.deed(seen, lambda: self._forward(head, seen)))

    @contextmanager
    def _upstream_socket(self) -> Iterator[socket.socket]:
        with socket.create_connection(self._upstream, timeout=30) as upstream:
            yield upstream

    def _forward(self, head: bytes, seen: Seen) -> Answer:
        with self._upstream_socket() as upstream:
            upstream.sendall(head + b"\r\nConnection: close\r\n\r\n" + seen.body)
            data = bytearray()
            while piece := upstream.recv(1 << 18):
                data += piece
        raw, _, body = bytes(data).partition(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").split("\r\n")
        _, status, reason = first.split(" ", 2)
        headers = {}
        for line in lines:
            name, _, value = line.partition(": ")
            headers[name] = value
        answer = Answer(int(status), reason, headers, body)
        return answer.header("Connection", None)


def _act(connection: socket.socket, deed: Deed) -> bool:
    if deed.silence_seconds and _left(connection, deed.silence_seconds):
        return False
    if deed.stall_after is not None:
        connection.sendall(deed.data[: deed.stall_after])
        _left(connection, 30.0)
        return False
    if deed.piece_bytes:
        for start in range(0, len(deed.data), deed.piece_bytes):
            connection.sendall(deed.data[start : start + deed.piece_bytes])
            if _left(connection, deed.pause_seconds):
                return False
    elif deed.data:
        connection.sendall(deed.data)
    if deed.then == "reset":
        _reset(connection)
    return deed.then == "keep"


def _left(connection: socket.socket, seconds: float) -> bool:
    """Wait; True as soon as the client has gone."""
    connection.settimeout(seconds)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(None)


def _reset(connection: socket.socket) -> None:
    # A linger of no time makes close send RST.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
