"""What commands and the holder of a mount say to each other: `status`, `remount`, `unmount`.

    command -> holder   {"want": "status"}
                        {"want": "remount", "command", "environment", "settings"}
                        {"want": "unmount", "is_forced"}
    holder -> command   {"result": {...}}      the end
                        {"error": "..."}       the end: one line for a person

One packet each way (wire.py), over the socket of the mount's record (registry.py), which only its
user and root can reach. The holder's main loop never waits for a command.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any, Final

from trainmount_fuse.session.registry import MountRecord
from trainmount_fuse.session.supervisor import Supervisor
from trainmount_fuse.session.wire import connect, peer_uid, receive, send, try_send

__all__ = ["CommandError", "CommandSocket", "ask_holder", "give_answer"]

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_SECONDS: Final = 3.0
"""For what a holder answers out of its head."""


class CommandError(Exception):
    """A command cannot be carried out; `str()` is one line for a person."""


class CommandSocket:
    """The holder's side: gets each request to `answer`. Main thread only."""

    def __init__(
        self,
        listener: socket.socket,
        supervisor: Supervisor,
        answer: Callable[[dict[str, Any], socket.socket], None],
    ) -> None:
        """`answer` owns the connection that it is called with."""
        self._listener = listener
        self._supervisor = supervisor
        self._answer = answer
        self._clients: set[socket.socket] = set()
        supervisor.watch(listener, self._accept)

    def close(self) -> None:
        """Leave the listening socket to its owner."""
        for client in self._clients:
            client.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if peer_uid(client) not in (0, os.getuid()):
            client.close()
            return
        self._clients.add(client)
        self._supervisor.watch(client, lambda: self._heed(client))

    def _heed(self, client: socket.socket) -> None:
        self._supervisor.unwatch(client)
        self._clients.discard(client)
        try:
            message, _ = receive(client)
        except (OSError, ValueError):
            message = None
        if message is None:
            # Somebody looked whether we live.
            client.close()
        else:
            self._answer_whatever(message, client)

    def _answer_whatever(self, message: dict[str, Any], client: socket.socket) -> None:
        """A request that nobody can take costs its sender the answer, not everybody the mount."""
        try:
            self._answer(message, client)
        except Exception:
            logger.exception("a request could not be taken")
            give_answer(client, {"error": "the holder cannot take this request; its log has more"})


def give_answer(client: socket.socket, answer: Mapping[str, Any]) -> None:
    """The one answer of a request; fine where nobody waits for it any more."""
    try_send(client, answer)
    client.close()


def ask_holder(
    record: MountRecord,
    request: Mapping[str, Any],
    timeout_seconds: float | None = ANSWER_TIMEOUT_SECONDS,
) -> dict[str, Any]:
    """The result of a request; `timeout_seconds` None waits for as long as the holder lives.

    Raises:
        CommandError: the holder refused, went away or gave no answer in time.
    """
    who = f"process {record.holder_pid}, which keeps {record.mountpoint},"
    try:
        with connect(record.holder_socket, ANSWER_TIMEOUT_SECONDS) as holder:
            send(holder, request)
            holder.settimeout(timeout_seconds)
            answer, _ = receive(holder)
    except ValueError as error:
        raise CommandError(str(error)) from error
    except TimeoutError:
        raise CommandError(f"{who} gives no answer") from None
    except OSError as error:
        raise CommandError(f"{who} cannot be asked: {error.strerror}") from error
    if answer is None:
        raise CommandError(f"{who} ended before it answered; its log tells why")
    if "error" in answer:
        raise CommandError(str(answer["error"]))
    result: dict[str, Any] = answer.get("result", {})
    return result
