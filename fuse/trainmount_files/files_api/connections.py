"""Connections that can be cut off by another thread: what a blocked send or receive needs to end at
once. Loaded by `transport.py` with its first request.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, Final

import certifi
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from trainmount_files.retry import Cancellation

__all__ = ["Exchange", "InFlight", "make_manager"]

_POLL_SECONDS: Final = 0.05


class Exchange:
    """One request and its answer. `cut` may come from any thread at any time."""

    __slots__ = ("_socket", "was_cut")

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.was_cut = False

    def use(self, sock: socket.socket) -> None:
        """The socket that everything happens on from now on."""
        self._socket = sock
        if self.was_cut:
            self.cut()

    def cut(self) -> None:
        """End whatever waits for the socket; the request fails as if the connection had broken."""
        self.was_cut = True
        sock = self._socket
        if sock is not None:
            # Of a socket that is closed there is nothing to end.
            with suppress(OSError, ValueError):
                # The plain one's: TLS would say goodbye first, and wait.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Current(threading.local):
    exchange: Exchange | None = None


_CURRENT: Final = _Current()


class InFlight:
    """The requests of one transport that are under way. Any thread may call.

    A thread looks after those that can be cancelled; it ends when there are none.
    """

    def __init__(self) -> None:
        # Guarded by the lock, as is the thread.
        self._exchanges: dict[Exchange, Cancellation | None] = {}
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None

    def begin(self, cancel: Cancellation | None) -> Exchange:
        """A request of this thread begins; it will be cut when `cancel` is set."""
        exchange = Exchange()
        with self._lock:
            self._exchanges[exchange] = cancel
            if cancel is not None and self._watch is None:
                self._watch = threading.Thread(
                    target=self._look_after, name="trainmount-cancel", daemon=True
                )
                self._watch.start()
        _CURRENT.exchange = exchange
        return exchange

    def end(self, exchange: Exchange) -> None:
        with self._lock:
            self._exchanges.pop(exchange, None)
        if _CURRENT.exchange is exchange:
            _CURRENT.exchange = None

    def cut_all(self) -> None:
        # Under the lock, here and below: after `end` the socket may serve another request.
        with self._lock:
            for exchange in self._exchanges:
                exchange.cut()

    def _look_after(self) -> None:
        # Waits on a lock and not by `time.sleep`, which tests replace.
        pause = threading.Event()
        while True:
            pause.wait(_POLL_SECONDS)
            with self._lock:
                watched = [(e, c) for e, c in self._exchanges.items() if c is not None]
                if not watched:
                    self._watch = None
                    return
                for exchange, cancel in watched:
                    # Again and again until it has ended: a socket that is not connected yet does
                    # not notice.
                    if cancel.is_set():
                        exchange.cut()


_SOCKETS: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()
"""Every connection of this process, so that a forked child can let go of its copies."""


def _close_inherited() -> None:
    """In a forked child: close the parent's connections, on which nothing is sent or shut down.

    The child never uses them, but as long as it has them open their other ends do not learn that
    the parent has closed its own.
    """
    for sock in list(_SOCKETS):
        with suppress(OSError):
            descriptor = sock.detach()
            if descriptor >= 0:
                os.close(descriptor)


os.register_at_fork(after_in_child=_close_inherited)


def _use(sock: socket.socket) -> None:
    if _CURRENT.exchange is not None:
        _CURRENT.exchange.use(sock)


class _PlainConnection(HTTPConnection):
    """As urllib3's, but each socket is known to its exchange before it can block."""

    def _new_conn(self) -> socket.socket:
        return _connected(self)

    def request(self, *arguments: Any, **more: Any) -> None:
        if self.sock is not None:
            _use(self.sock)
        super().request(*arguments, **more)


class _SecureConnection(HTTPSConnection):
    """As `_PlainConnection`."""

    def _new_conn(self) -> socket.socket:
        return _connected(self)

    def request(self, *arguments: Any, **more: Any) -> None:
        if self.sock is not None:
            _use(self.sock)
        super().request(*arguments, **more)


class _SecureSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        # The plain socket has handed its descriptor over to this one.
        _SOCKETS.add(self)
        _use(self)
        super().do_handshake(block)


class _PlainPool(HTTPConnectionPool):
    ConnectionCls = _PlainConnection


class _SecurePool(HTTPSConnectionPool):
    ConnectionCls = _SecureConnection


def _connected(connection: HTTPConnection) -> socket.socket:
    """A new TCP connection; what `urllib3.util.connection` makes, with the socket known."""
    host = connection._dns_host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, connection.port, 0, socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise NameResolutionError(connection.host, connection, error) from error
    failure: OSError | None = None
    for family, kind, protocol, _, address in addresses:
        sock = socket.socket(family, kind, protocol)
        _SOCKETS.add(sock)
        try:
            for option in connection.socket_options or ():
                sock.setsockopt(*option)
            sock.settimeout(connection.timeout)
            _use(sock)
            if _CURRENT.exchange is not None and _CURRENT.exchange.was_cut:
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            sock.connect(address)
        except OSError as error:
            failure = error
            sock.close()
            if _CURRENT.exchange is not None and _CURRENT.exchange.was_cut:
                break
        except BaseException:
            sock.close()
            raise
        else:
            sys.audit("http.client.connect", connection, connection.host, connection.port)
            return sock
    if isinstance(failure, TimeoutError):
        raise ConnectTimeoutError(connection, "timed out") from failure
    raise NewConnectionError(connection, f"failed: {failure}") from failure


def make_manager(
    proxy: tuple[str, str | None] | None,
    *,
    connections: int,
    block_bytes: int,
    timeout: urllib3.Timeout,
) -> urllib3.PoolManager:
    """Pools of connections, straight or through a proxy (its URL, and `user:password` or None)."""
    certificates = (
        os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or certifi.where()
    )
    # One for all connections: to read the certificates takes longer than a handshake.
    context = urllib3.util.ssl_.create_urllib3_context()
    context.load_verify_locations(certificates)
    context.sslsocket_class = _SecureSocket
    options: dict[str, Any] = {
        "num_pools": 8,
        "maxsize": connections,
        "blocksize": block_bytes,
        "timeout": timeout,
        "ssl_context": context,
    }
    manager: urllib3.PoolManager
    if proxy is None:
        manager = urllib3.PoolManager(**options)
    else:
        address, user = proxy
        headers = urllib3.make_headers(proxy_basic_auth=user) if user else None
        manager = urllib3.ProxyManager(address, proxy_headers=headers, **options)
    manager.pool_classes_by_scheme = {"http": _PlainPool, "https": _SecurePool}
    return manager
