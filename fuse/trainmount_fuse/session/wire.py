"""Messages between keeper, supervisor and daemon: one JSON object a packet, a descriptor beside it
where needed.

Unix sockets of type SOCK_SEQPACKET: a message is whole or absent, and the end of the connection is
the death of the peer. handover.py, supervisor.py and daemon.py speak through this.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = [
    "MAX_MESSAGE_BYTES",
    "connect",
    "decoded_init",
    "encoded_init",
    "listen",
    "peer_uid",
    "receive",
    "send",
    "try_send",
]

MAX_MESSAGE_BYTES: Final = 192 * 1024
"""Below the kernel's default socket buffer of 208 KiB, so that one send never splits or blocks on
an idle peer."""

_UCRED = struct.Struct("3i")


def send(peer: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """Send one message. Raises OSError where the peer is gone, ValueError where the message is too
    large."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"message of {len(data)} bytes is above {MAX_MESSAGE_BYTES}")
    if fd is None:
        peer.send(data)
    else:
        socket.send_fds(peer, [data], [fd])


def try_send(peer: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message that may be lost: where the peer is gone, or reads nothing."""
    try:
        peer.send(json.dumps(message, separators=(",", ":")).encode(), socket.MSG_DONTWAIT)
    except OSError:
        return


def receive(peer: socket.socket) -> tuple[dict[str, Any] | None, int | None]:
    """The next message and the descriptor that came with it, close-on-exec; None at the end of the
    connection.

    Raises:
        OSError: also BlockingIOError or TimeoutError, where the socket is set so.
        ValueError: the peer speaks something else.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(peer, MAX_MESSAGE_BYTES, 4)
    except ConnectionResetError:
        return None, None
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    for surplus in descriptors[1:]:
        os.close(surplus)
    fd = descriptors[0] if descriptors else None
    if not data:
        return None, fd
    try:
        message = json.loads(data)
    except RecursionError as error:
        raise ValueError("a message must not be nested as deeply as that") from error
    if not isinstance(message, dict):
        raise ValueError("a message must be a JSON object")
    return message, fd


def listen(address: Path, mode: int = 0o600) -> socket.socket:
    """A listening socket at `address`, which replaces a socket left over there."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    temporary = address.with_name(f".{address.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with _short(temporary) as name:
            server.bind(name)
        temporary.chmod(mode)
        server.listen(16)
        # Renamed into place when it answers, so that nobody finds a socket that refuses.
        temporary.replace(address)
    except BaseException:
        server.close()
        raise
    return server


def connect(address: Path, timeout_seconds: float | None) -> socket.socket:
    """Connect to a listener; raises OSError where nobody listens."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        client.settimeout(timeout_seconds)
        with _short(address) as name:
            client.connect(name)
    except BaseException:
        client.close()
        raise
    return client


def peer_uid(peer: socket.socket) -> int:
    """The user of the process that connected, by the kernel's word."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(credentials)[1])


@contextmanager
def _short(address: Path) -> Iterator[str]:
    """A name of at most 107 bytes for a socket in a folder however deep, which is all that the
    kernel takes."""
    folder = os.open(address.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{address.name}"
    finally:
        os.close(folder)


def encoded_init(init_request: bytes) -> str:
    return base64.b64encode(init_request).decode()


def decoded_init(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
