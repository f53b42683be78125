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
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import certifi
import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from trainmount_files.files_api.file_slice import SEND_BLOCK_BYTES, FileSlice
from trainmount_files.retry import Cancellation

if TYPE_CHECKING:
    from trainmount_files.files_api.transport import TransportOptions

__all__ = ["Exchange", "InFlight", "Pools"]

_POLL_SECONDS: Final = 0.05

_WHOLE_BYTES: Final = 64 << 10
"""Bodies up to this size are sent together with their headers."""


class Exchange:
    """One request and its answer. `cut` may come from any thread at any time."""

    __slots__ = ("_socket", "is_farewell", "was_cut")

    def __init__(self, *, is_farewell: bool = False) -> None:
        self.is_farewell = is_farewell
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

    def begin(self, cancel: Cancellation | None, *, is_farewell: bool = False) -> Exchange:
        """A request of this thread begins; it will be cut when `cancel` is set."""
        exchange = Exchange(is_farewell=is_farewell)
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

    def cut_all(self, *, spare_farewells: bool) -> None:
        # Under the lock, here and below: after `end` the socket may serve another request.
        with self._lock:
            for exchange in self._exchanges:
                if not (spare_farewells and exchange.is_farewell):
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


class _Whole:
    """Sends a small body together with the headers: one packet, one turn of the other side."""

    _held: bytes | None = None

    def request(self, method: str, url: str, body: Any = None, *rest: Any, **more: Any) -> None:
        sock: socket.socket | None = self.sock  # type: ignore[attr-defined]
        if sock is not None:
            _use(sock)
        send_request = super().request  # type: ignore[misc]
        if not isinstance(body, bytes | bytearray | memoryview) or len(body) > _WHOLE_BYTES:
            send_request(method, url, body, *rest, **more)
            return
        self._held = b""
        try:
            send_request(method, url, body, *rest, **more)
        finally:
            whole, self._held = self._held, None
        self.send(whole)

    def send(self, data: Any) -> None:
        if self._held is not None:
            self._held += data
        else:
            super().send(data)  # type: ignore[misc]


class _PlainConnection(_Whole, HTTPConnection):
    """As urllib3's, but each socket is known to its exchange before it can block, and files go
    without a copy.
    """

    def request(self, method: str, url: str, body: Any = None, *rest: Any, **more: Any) -> None:
        whole = [body] if isinstance(body, FileSlice) else body
        super().request(method, url, whole, *rest, **more)

    def send(self, data: Any) -> None:
        if isinstance(data, FileSlice):
            data.send_to(self.sock)
        else:
            super().send(data)

    def _new_conn(self) -> socket.socket:
        return _connected(self)


class _SecureConnection(_Whole, HTTPSConnection):
    """As `_PlainConnection`."""

    def _new_conn(self) -> socket.socket:
        return _connected(self)


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


def _make_manager(
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


class Pools:
    """urllib3's pools of this process: straight, and through each proxy. Any thread may call."""

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        # Both are written under the lock.
        self._by_proxy: dict[str | None, urllib3.PoolManager] = {}
        self._by_origin: dict[str, urllib3.HTTPConnectionPool] = {}
        self._lock = threading.Lock()
        self._proxies = getproxies()

    def of(self, url: str) -> tuple[urllib3.PoolManager | urllib3.HTTPConnectionPool, str]:
        """Who sends a request for `url`, and what to ask it for."""
        if not self._proxies:
            # Found by the URL's beginning: to take it apart twice costs as much as a small request.
            slash = url.find("/", url.find("//") + 2)
            origin = url[:slash]
            pool = self._by_origin.get(origin)
            if pool is not None and pool.pool is not None:
                return pool, url[slash:]
        parts = urlsplit(url)
        proxy = self._proxies.get(parts.scheme) or self._proxies.get("all")
        if proxy is not None and proxy_bypass(parts.netloc):
            proxy = None
        with self._lock:
            manager = self._by_proxy.get(proxy)
            if manager is None:
                manager = self._by_proxy[proxy] = self._make(proxy)
            if not self._proxies and slash > 0:
                self._by_origin[origin] = manager.connection_from_url(origin)
                return self._by_origin[origin], url[slash:]
            return manager, url

    def clear(self) -> None:
        with self._lock:
            for manager in self._by_proxy.values():
                # `clear` alone leaves the sockets to the garbage collector.
                for key in manager.pools.keys():  # noqa: SIM118  (no plain dictionary)
                    pool = manager.pools.get(key)
                    if pool is not None:
                        pool.close()
                manager.clear()

    def _make(self, proxy: str | None) -> urllib3.PoolManager:
        options = self._options
        return _make_manager(
            _split_proxy(proxy) if proxy is not None else None,
            connections=options.connections,
            block_bytes=SEND_BLOCK_BYTES,
            timeout=urllib3.Timeout(
                connect=options.connect_timeout_seconds, read=options.inactivity_timeout_seconds
            ),
        )


def _split_proxy(proxy: str) -> tuple[str, str | None]:
    """A proxy's URL without credentials, and `user:password` where it has them."""
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    user, _, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{host}", unquote(user) or None
