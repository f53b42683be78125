"""A TCP relay that holds back what a client sends: `delay.py HOST:PORT MILLISECONDS READY_FILE`.

Each request waits as it would on the way to a store that is not on this machine, and requests of
several connections wait at the same time; what comes back is spliced from socket to socket, so that
the relay costs little. `peers.delaying` starts it.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

_PIECE_BYTES: Final = 1 << 20

_MAX_PIECES: Final = 64
"""On their way in one connection; a client that sends more waits, as on a full line."""


def main() -> None:
    target, milliseconds, ready = sys.argv[1:]
    host, _, port = target.rpartition(":")
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        temporary = Path(ready).with_suffix(".new")
        temporary.write_text(f"127.0.0.1:{listener.getsockname()[1]}")
        temporary.replace(ready)
        while True:
            client, _address = listener.accept()
            server = socket.create_connection((host, int(port)))
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _relay(client, server, float(milliseconds) / 1000)


def _relay(client: socket.socket, server: socket.socket, delay_seconds: float) -> None:
    held: queue.Queue[tuple[float, bytes]] = queue.Queue(_MAX_PIECES)
    for work in (
        lambda: _hold_back(client, held, delay_seconds),
        lambda: _send_on(held, server),
        lambda: _send_back(server, client),
    ):
        threading.Thread(target=work, daemon=True).start()


def _hold_back(
    client: socket.socket, held: queue.Queue[tuple[float, bytes]], delay_seconds: float
) -> None:
    piece = b"-"
    while piece:
        try:
            piece = client.recv(_PIECE_BYTES)
        except OSError:
            piece = b""
        held.put((time.monotonic() + delay_seconds, piece))


def _send_on(held: queue.Queue[tuple[float, bytes]], server: socket.socket) -> None:
    while True:
        due, piece = held.get()
        time.sleep(max(0.0, due - time.monotonic()))
        try:
            if not piece:
                server.shutdown(socket.SHUT_WR)
                return
            server.sendall(piece)
        except OSError:
            # The client learns it from the other direction; its pieces go nowhere.
            while piece:
                _due, piece = held.get()
            return


def _send_back(server: socket.socket, client: socket.socket) -> None:
    reader, writer = os.pipe()
    with suppress(OSError):
        while count := os.splice(server.fileno(), writer, _PIECE_BYTES):
            while count:
                count -= os.splice(reader, client.fileno(), count)
    os.close(reader)
    os.close(writer)
    for one in (client, server):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
