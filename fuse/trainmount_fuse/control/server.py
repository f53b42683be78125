"""Answers commands on the socket in the mount's state directory, and Prometheus on a port where the
settings name one. Run by session/daemon.py beside the kernel's requests; each daemon listens anew.

Only this user and root are answered.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import Any, Final

import trio

from trainmount_fuse.control.commands import Commands
from trainmount_fuse.control.metrics import CONTENT_TYPE
from trainmount_fuse.control.protocol import ControlError, control_address
from trainmount_fuse.session.wire import MAX_MESSAGE_BYTES, listen, peer_uid
from trainmount_fuse.settings import MountSettings, parse_address

__all__ = ["serve_control"]

log = logging.getLogger(__name__)

_REQUEST_SECONDS: Final = 10.0
"""How long whoever connects may take to say what it wants."""

_MAX_PATTERNS_BYTES: Final = 256 << 20
_MAX_HTTP_BYTES: Final = 16 * 1024
_MAX_HTTP_CLIENTS: Final = 16
_PORT_RETRY_SECONDS: Final = 1.0


async def serve_control(commands: Commands, settings: MountSettings) -> None:
    """Answer until it is cancelled; what is running is given up then.

    A mount whose socket cannot be made goes on without, for its programs need none.
    """
    async with trio.open_nursery() as nursery:
        if settings.metrics_address:
            nursery.start_soon(_serve_metrics, commands, *parse_address(settings.metrics_address))
        address = control_address(settings.state_dir)
        try:
            listener = trio.socket.from_stdlib_socket(listen(address))
        except OSError as error:
            log.warning(
                "commands cannot reach this mount",
                extra={"address": str(address), "reason": error.strerror},
            )
            return
        with listener:
            await _accept(listener, commands, nursery)


async def _accept(
    listener: trio.socket.SocketType, commands: Commands, nursery: trio.Nursery
) -> None:
    while True:
        try:
            client, _ = await listener.accept()
        except OSError as error:
            # Out of descriptors, most likely: the next one may be luckier.
            log.warning("a command could not connect", extra={"reason": error.strerror})
            await trio.sleep(_PORT_RETRY_SECONDS)
            continue
        nursery.start_soon(_answer, client, commands)


async def _answer(client: trio.socket.SocketType, commands: Commands) -> None:
    with client:
        uid = _peer_uid(client)
        if uid not in (0, os.getuid()):
            log.warning("refused a command of another user", extra={"uid": uid})
            return
        try:
            with trio.fail_after(_REQUEST_SECONDS):
                request, patterns = await _receive_request(client)
        except (OSError, ValueError, KeyError, TypeError, trio.TooSlowError):
            log.info("a command went away, or speaks something else")
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, client, nursery.cancel_scope)
            await _carry_out(client, commands, request, patterns)
            nursery.cancel_scope.cancel()


async def _carry_out(
    client: trio.socket.SocketType, commands: Commands, request: str, patterns: list[str]
) -> None:
    async def tell(message: Mapping[str, Any]) -> None:
        await _send(client, message)

    try:
        answer: Mapping[str, Any] = {"result": await commands.run(request, patterns, tell)}
    except ControlError as error:
        answer = {"error": str(error)}
    except Exception:
        log.exception("a command failed in a way nobody planned for", extra={"request": request})
        answer = {"error": "failed in a way nobody planned for; the mount's log has more"}
    await _send(client, answer)


async def _receive_request(client: trio.socket.SocketType) -> tuple[str, list[str]]:
    message = await _receive(client)
    request = str(message["request"])
    patterns: list[str] = []
    size = 0
    while True:
        patterns += map(str, message.get("patterns", ()))
        size += sum(map(len, message.get("patterns", ())))
        if message.get("is_whole", True) or size > _MAX_PATTERNS_BYTES:
            return request, patterns
        message = await _receive(client)


async def _receive(client: trio.socket.SocketType) -> dict[str, Any]:
    message = json.loads(await client.recv(MAX_MESSAGE_BYTES))
    if not isinstance(message, dict):
        raise TypeError("a message must be a JSON object")
    return message


async def _send(client: trio.socket.SocketType, message: Mapping[str, Any]) -> None:
    try:
        await client.send(json.dumps(message, separators=(",", ":")).encode())
    except OSError:
        # It went away; whoever watches for that ends what it asked for.
        return


async def _cancel_when_gone(client: trio.socket.SocketType, scope: trio.CancelScope) -> None:
    """A command says nothing after its request: what comes is its end."""
    try:
        while await client.recv(MAX_MESSAGE_BYTES):
            pass
    except OSError:
        pass
    scope.cancel()


def _peer_uid(client: trio.socket.SocketType) -> int:
    with socket.fromfd(client.fileno(), client.family, client.type) as copy:
        return peer_uid(copy)


# Prometheus.


async def _serve_metrics(commands: Commands, host: str, port: int) -> None:
    limiter = trio.CapacityLimiter(_MAX_HTTP_CLIENTS)

    async def answer(stream: trio.SocketStream) -> None:
        async with limiter:
            await _answer_http(stream, commands)

    is_told = False
    while True:
        try:
            await trio.serve_tcp(answer, port, host=host)
        except OSError as error:
            # The daemon before may have it for a moment more. Whoever took it between the two is no
            # reason to end a mount that serves.
            if not is_told:
                log.warning(
                    "the port for metrics cannot be had; trying on",
                    extra={"host": host, "port": port, "reason": error.strerror},
                )
            is_told = True
            await trio.sleep(_PORT_RETRY_SECONDS)


async def _answer_http(stream: trio.SocketStream, commands: Commands) -> None:
    async with stream:
        try:
            with trio.fail_after(_REQUEST_SECONDS):
                request = await _http_request(stream)
                status, body = "404 Not Found", "metrics are at /metrics\n"
                if request in (b"GET /metrics", b"GET /"):
                    status, body = "200 OK", await commands.metrics()
                await stream.send_all(_http_response(status, body))
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            return
        except Exception:
            log.exception("metrics could not be told")


async def _http_request(stream: trio.SocketStream) -> bytes:
    """Method and path."""
    received = b""
    while b"\r\n\r\n" not in received and len(received) < _MAX_HTTP_BYTES:
        more = await stream.receive_some()
        if not more:
            break
        received += more
    words = received.partition(b"\r\n")[0].split(b" ")
    return b" ".join(words[:2]).partition(b"?")[0]


def _http_response(status: str, body: str) -> bytes:
    data = body.encode()
    kind = CONTENT_TYPE if status.startswith("200") else "text/plain; charset=utf-8"
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + data
