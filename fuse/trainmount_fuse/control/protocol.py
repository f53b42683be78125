"""What commands and a mount's daemon say to each other, and where.

A command connects to the socket in the mount's state directory (Unix, SOCK_SEQPACKET, one JSON
object a packet as in session/wire.py) and asks one thing:

    command -> daemon   {"request", "patterns", "is_whole"}   and what else the request takes
                        {"patterns", "is_whole"}              more patterns, until `is_whole`
    daemon -> command   {"progress": {...}}                   counts so far, now and then
                        {"failed": {"path", "reason"}}        one thing that could not be done
                        {"file": {...}}                       one file of a status
                        {"text": "..."}                       a piece of the metrics
                        {"result": {...}}                     the end
                        {"error": "..."}                      the end: one line for a person

A command that goes away ends what it asked for. A daemon that dies closes the connection.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.session.exit_codes import EXIT_CONFIGURATION, EXIT_FAILED

__all__ = ["CONTROL_SOCKET", "ControlError", "WrongName", "control_address", "request_messages"]

CONTROL_SOCKET: Final = "control.sock"
"""Its name, by which a command knows it from a mountpoint."""

_PATTERN_BYTES: Final = 64 * 1024
"""Of the patterns in one message; escapes in JSON make them up to three times as long, which still
is below the limit of one packet."""


class ControlError(Exception):
    """A command cannot be carried out; `str()` is one line for a person."""

    exit_code = EXIT_FAILED


class WrongName(ControlError):
    """What was named is not there to be asked: no mount, no list, no pattern."""

    exit_code = EXIT_CONFIGURATION


def control_address(state_dir: Path) -> Path:
    """Where the daemon of the mount with this state directory listens."""
    return state_dir / CONTROL_SOCKET


def request_messages(
    request: str, patterns: Sequence[str] = (), **details: Any
) -> Iterator[dict[str, Any]]:
    """The packets that ask for something; patterns may be many."""
    pieces = list(_pieces(patterns)) or [[]]
    for number, piece in enumerate(pieces):
        head = {"request": request, **details} if number == 0 else {}
        yield {**head, "patterns": piece, "is_whole": number == len(pieces) - 1}


def _pieces(patterns: Sequence[str]) -> Iterator[list[str]]:
    piece: list[str] = []
    size = 0
    for pattern in patterns:
        length = len(pattern.encode(errors="surrogatepass"))
        if piece and size + length > _PATTERN_BYTES:
            yield piece
            piece, size = [], 0
        piece.append(pattern)
        size += length
    if piece:
        yield piece
