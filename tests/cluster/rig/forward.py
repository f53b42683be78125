"""Forwards connections from an inherited listening socket to a port of 127.0.0.1.

The control plane's machine runs it as a program: `forward.py DESCRIPTOR PORT`. The socket was made
in the host's network, the connections are made in the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys

_BLOCK_BYTES = 1 << 16


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_BLOCK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()  # one direction may end before the other


async def serve(listener: socket.socket, port: int) -> None:
    """Forward until the process ends."""

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # not up yet: the client sees a closed connection and tries again
            writer.close()
            return
        try:
            await asyncio.gather(_pump(reader, to_writer), _pump(to_reader, writer))
        finally:
            to_writer.close()
            writer.close()

    async with await asyncio.start_server(forward, sock=listener) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
