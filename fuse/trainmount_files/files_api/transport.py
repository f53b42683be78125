"""Bytes over HTTP: the pool of connections, whole small answers, and bodies straight into the
caller's memory.

With `connections.py` the only module that imports urllib3. It knows nothing of Databricks, paths or
retries: one call is one request. No exception leaves it that carries a URL, not even as a cause.
"""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

from trainmount_files.files_api.file_slice import FileSlice
from trainmount_files.per_process import PerProcess
from trainmount_files.redaction import quiet_urls
from trainmount_files.retry import Cancellation
from trainmount_files.volume import MIB, Buffer

if TYPE_CHECKING:
    import urllib3

    from trainmount_files.files_api.connections import InFlight, Pools

__all__ = [
    "Answer",
    "Reply",
    "Transport",
    "TransportError",
    "TransportOptions",
]

_MAX_REPLY_BYTES: Final = 32 * MIB
"""A listing page of 1,000 long names is under 3 MiB; what is larger is no answer of this API."""

_MAX_ERROR_BYTES: Final = 64 << 10

_RECEIVE_BYTES: Final = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportOptions:
    """Connections and their patience."""

    connect_timeout_seconds: float = 10.0
    """Time for a TCP and TLS handshake. A firewall that drops packets is noticed after this long.
    """

    inactivity_timeout_seconds: float = 60.0
    """Longest silence in the middle of a request, as the SDK has it."""

    connections: int = 32
    """Connections kept open for each host; more are made when needed and closed after use."""

    user_agent: str = "trainmount/0.1"


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    headers: Mapping[str, str]
    """Looked up without regard to case."""
    body: bytes


class TransportError(Exception):
    """A request that got no whole answer.

    `was_sent` tells whether the other side may have acted on it.
    """

    def __init__(
        self, reason: str, *, was_sent: bool, may_pass: bool = True, was_closed: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.was_sent = was_sent
        self.was_closed = was_closed
        """The transport was closed, by whoever owns it."""
        self.may_pass = may_pass
        """False where another try will fail the same way: a certificate that is not trusted."""


class Answer:
    """An answer whose body is still on the wire. Used inside `Transport.open` only."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self.status: int = response.status
        self.headers: Mapping[str, str] = response.headers
        self.was_read = False
        # urllib3's own readinto copies each byte twice; its raw response reads into place.
        raw = getattr(response, "_fp", None)
        self._raw = raw if isinstance(raw, http.client.HTTPResponse) else None

    def receive_into(self, target: memoryview, cancel: Cancellation | None = None) -> int:
        """Put body bytes into `target` until it is full, the body ends early or `cancel` is set.

        Returns how many bytes came. A connection that breaks counts as an early end: what came
        before it is good.
        """
        raw = self._raw
        done = 0
        try:
            while done < len(target) and not (cancel is not None and cancel.is_set()):
                piece = target[done : done + _RECEIVE_BYTES]
                got = raw.readinto(piece) if raw is not None else self._response.readinto(piece)
                if not got:
                    break
                done += got
        except (OSError, http.client.HTTPException, _urllib3_error()):
            return done
        return done

    def receive_to_file(
        self, descriptor: int, offset: int, size_bytes: int, cancel: Cancellation | None = None
    ) -> int:
        """As `receive_into`, to a file from `offset` on.

        Raises:
            OSError: the file cannot be written.
        """
        buffer = memoryview(bytearray(min(_RECEIVE_BYTES, size_bytes)))
        done = 0
        while done < size_bytes:
            piece = buffer[: size_bytes - done]
            got = self.receive_into(piece, cancel)
            written = 0
            while written < got:
                written += os.pwrite(descriptor, piece[written:got], offset + done + written)
            done += got
            if got < len(piece):
                break
        return done

    def is_at_end(self) -> bool:
        """Whether the body is over; reads one byte at most of a body that goes on."""
        try:
            self.was_read = not (self._raw or self._response).read(1)
        except (OSError, http.client.HTTPException, _urllib3_error()):
            return False
        return self.was_read

    def read_error(self) -> bytes:
        """What an error's body begins with. Its status is the answer; the text is for a person, so
        that neither a broken body nor a huge one matters.
        """
        try:
            body = self._response.read(_MAX_ERROR_BYTES)
        except (OSError, http.client.HTTPException, _urllib3_error()):
            return b""
        self.was_read = len(body) < _MAX_ERROR_BYTES
        return body

    def read_small(self) -> bytes:
        """The whole body.

        Raises:
            TransportError: it is broken off or larger than an answer of an API can be.
        """
        reason = ""
        try:
            body = self._response.read(_MAX_REPLY_BYTES + 1)
            if len(body) <= _MAX_REPLY_BYTES:
                # Only a read at the end tells whether it came too early.
                self.was_read = not self._response.read(1)
                return body
            reason = "the answer is too large"
        except (OSError, http.client.HTTPException, _urllib3_error()) as error:
            reason = _describe(error)
        raise TransportError(reason, was_sent=True)


class Transport:
    """Sends requests over kept connections. Any thread may call; a forked child makes connections
    of its own.
    """

    def __init__(self, options: TransportOptions) -> None:
        self._options = options
        self._managers: PerProcess[Pools] = PerProcess(lambda: _pools(options))
        self._in_flight: PerProcess[InFlight] = PerProcess(_in_flight)
        self.closed = threading.Event()

    def exchange(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: Buffer | FileSlice | None = None,
        cancel: Cancellation | None = None,
        is_farewell: bool = False,
    ) -> Reply:
        """Send a request and read its whole answer; of an error's body the start.

        It breaks off as soon as `cancel` is set, or the transport is closed; a farewell is sent
        after that too.

        Raises:
            TransportError: no whole answer came.
            VolumeError: what `FileSlice` raises.
        """
        with self.open(
            method, url, headers=headers, body=body, cancel=cancel, is_farewell=is_farewell
        ) as answer:
            content = answer.read_small() if answer.status < 300 else answer.read_error()
            return Reply(answer.status, answer.headers, content)

    @contextmanager
    def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: Buffer | FileSlice | None = None,
        cancel: Cancellation | None = None,
        is_farewell: bool = False,
    ) -> Iterator[Answer]:
        """Send a request; the body of the answer is read inside the `with`.

        A body that was not read to its end costs its connection, never a drain. It breaks off as
        soon as `cancel` is set, or the transport is closed.
        """
        in_flight = self._in_flight.get()
        exchange = in_flight.begin(cancel, is_farewell=is_farewell)
        try:
            # After `begin`: who closes sees the request, or is seen.
            if self.closed.is_set() and not is_farewell:
                raise TransportError("the volume was closed", was_sent=False, was_closed=True)
            response = self._send(method, url, headers, body)
        except BaseException:
            in_flight.end(exchange)
            raise
        answer = Answer(response)
        try:
            if answer.status < 200:
                # The real answer is still to come and must not be taken for the next request's.
                raise TransportError("an interim answer in place of the answer", was_sent=True)
            yield answer
        finally:
            # Before the connection may serve another request, which must not be cut.
            in_flight.end(exchange)
            if exchange.was_cut or not answer.was_read or self.closed.is_set():
                response.close()
            response.release_conn()

    def interrupt(self) -> None:
        """Break off what is under way, and send nothing more but farewells."""
        self.closed.set()
        self._cut(spare_farewells=True)

    def close(self) -> None:
        """Break off what is under way and free the connections."""
        self.closed.set()
        self._cut(spare_farewells=False)
        pools = self._managers.peek()
        if pools is not None:
            pools.clear()

    def _cut(self, *, spare_farewells: bool) -> None:
        in_flight = self._in_flight.peek()
        if in_flight is not None:
            in_flight.cut_all(spare_farewells=spare_farewells)

    def _send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Buffer | FileSlice | None,
    ) -> urllib3.BaseHTTPResponse:
        complete = {
            "User-Agent": self._options.user_agent,
            # Compressed bytes are other bytes than the file's.
            "Accept-Encoding": "identity",
            "Accept": "*/*",
            **headers,
        }
        if body is not None:
            size = len(body) if isinstance(body, FileSlice) else memoryview(body).nbytes
            complete["Content-Length"] = str(size)
        elif method in ("PUT", "POST", "DELETE"):
            complete["Content-Length"] = "0"
        try:
            with quiet_urls():
                sender, target = self._managers.get().of(url)
                return sender.urlopen(
                    method,
                    target,
                    body=cast("Any", body),
                    headers=complete,
                    retries=False,
                    redirect=False,
                    preload_content=False,
                    decode_content=False,
                    assert_same_host=False,
                )
        except (OSError, ValueError, http.client.HTTPException, _urllib3_error()) as error:
            failure = TransportError(
                _describe(error), was_sent=_may_be_sent(error), may_pass=_may_pass(error)
            )
        # Out of the handler, so that the original is not attached: its text may hold the URL.
        try:
            raise failure
        finally:
            # Else the error holds this frame, and the frame the error, until the collector comes.
            del failure


def _pools(options: TransportOptions) -> Pools:
    from trainmount_files.files_api.connections import Pools

    return Pools(options)


def _in_flight() -> InFlight:
    from trainmount_files.files_api.connections import InFlight

    return InFlight()


def _urllib3_error() -> type[Exception]:
    # Looked up late: the package is importable, and fast, where no request is made.
    from urllib3.exceptions import HTTPError

    return HTTPError


def _describe(error: Exception) -> str:
    """What happened, from the kinds of the exceptions and errno: their texts may hold a URL."""
    from urllib3 import exceptions

    if isinstance(error, exceptions.NameResolutionError):
        return "the host's name cannot be resolved"
    if isinstance(error, exceptions.ConnectTimeoutError):
        return "no connection within the time limit"
    if isinstance(error, exceptions.ReadTimeoutError | TimeoutError):
        return "no answer within the time limit"
    if _certificate_error(error) is not None:
        return "the server's certificate is not trusted"
    if isinstance(error, exceptions.ProxyError):
        return "the proxy cannot be reached"
    if _speaks_no_tls(error):
        return "the server speaks no TLS: http:// in place of https:// (DATABRICKS_HOST)?"
    if any(isinstance(link, ssl.SSLError) for link in _chain(error)):
        # Its errno is the TLS library's own number.
        return "the TLS connection failed"
    number = _errno_of(error)
    if number is not None:
        return f"the connection failed: {os.strerror(number).lower()}"
    return f"the connection broke ({type(error).__name__})"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its arguments that are errors, and their causes."""
    pending: list[BaseException] = [error]
    seen: set[int] = set()
    while pending:
        current = pending.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        pending += [value for value in current.args if isinstance(value, BaseException)]
        pending += [value for value in (current.__cause__, current.__context__) if value]


def _errno_of(error: Exception) -> int | None:
    for link in _chain(error):
        if isinstance(link, OSError) and link.errno and not isinstance(link, socket.gaierror):
            return link.errno
    return None


def _certificate_error(error: Exception) -> ssl.SSLError | None:
    for link in _chain(error):
        if isinstance(link, ssl.SSLCertVerificationError):
            return link
    return None


def _may_be_sent(error: Exception) -> bool:
    from urllib3 import exceptions

    return not isinstance(
        error,
        exceptions.NewConnectionError
        | exceptions.ConnectTimeoutError
        | exceptions.ProxyError
        | exceptions.SSLError
        | exceptions.LocationValueError
        | ValueError,
    )


def _may_pass(error: Exception) -> bool:
    from urllib3 import exceptions

    is_malformed = isinstance(error, exceptions.LocationValueError | ValueError)
    return not (is_malformed or _certificate_error(error) or _speaks_no_tls(error))


def _speaks_no_tls(error: Exception) -> bool:
    return any(
        isinstance(link, ssl.SSLError) and link.reason == "WRONG_VERSION_NUMBER"
        for link in _chain(error)
    )
