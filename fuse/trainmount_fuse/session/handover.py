"""Hand a mount's descriptor from the process that mounted (holder, CSI node plugin) to the one
that serves, and back.

The keeper listens; a supervisor connects and keeps the connection open for as long as it serves:

    supervisor -> keeper   {"want": "handover"}               give me the descriptor
                           {"want": "attach"}                 I serve already (the keeper was
                           restarted) {"state": "ready"}                 a daemon answers on the
                           mount {"state": "restarting"}            its daemon died, the next one
                           starts {"state": "gave_up", "reason"}     no daemon lives long enough
    keeper -> supervisor   {"init", "role", "configuration"} + descriptor
                           {"configuration"}                  new settings or credentials
                           {"refused", "reason"}              busy, or not this user

A restarted keeper asks the supervisor's own socket with `reclaim` and gets the same message and
descriptor back. Credentials are in these messages only: never on disk, in an argument or in a log.

HandoverError    nobody gave the descriptor in time; `str()` is one line for a person
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from trainmount_fuse.session.mounting import FuseConnection, abort
from trainmount_fuse.session.wire import (
    connect,
    decoded_init,
    encoded_init,
    listen,
    peer_uid,
    receive,
    send,
)

__all__ = [
    "Handover",
    "HandoverError",
    "Keeper",
    "answer_reclaim",
    "attach",
    "handover_message",
    "reclaim",
    "request_handover",
]

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.1
"""Pause before asking a keeper again that is busy or not there yet."""

CALLER_TIMEOUT_SECONDS: Final = 2.0
"""How long a process that connects to the reclaim socket may take to say what it wants."""

Role = Literal["first", "successor"]


class HandoverError(Exception):
    """Nobody gave the descriptor in time, or this process may not have it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handover:
    """All that a process needs to serve a mount that it did not make."""

    fd: int
    init_request: bytes
    role: Role
    """`first` answers INIT, `successor` takes over."""

    configuration: dict[str, Any] = field(repr=False)
    """`{"settings": MountSettings as JSON, "environment": {name: value}}`; holds credentials."""

    connection: socket.socket | None = field(default=None, repr=False, compare=False)
    """To the keeper; open for as long as this process serves. None where the descriptor was
    reclaimed."""


class Keeper:
    """Owns the descriptor of one mount and gives it to one server at a time.

    `start` begins a thread; every method may be called from any thread.
    """

    def __init__(
        self,
        address: Path,
        connection: FuseConnection,
        configuration: Mapping[str, Any],
        *,
        allowed_uids: frozenset[int] | None,
        role: Role = "first",
    ) -> None:
        """`allowed_uids` are the users that may have the descriptor; None leaves it to the
        socket's folder.

        `role` is `successor` where the connection was reclaimed, since INIT is answered then.
        """
        self._address = address
        self._connection = connection
        self._allowed_uids = allowed_uids
        # Guards all below; notified at every change.
        self._changed = threading.Condition()
        self._configuration = dict(configuration)
        self._role: Role = role
        self._server: socket.socket | None = None
        self._ready = False
        self._failure: str | None = None
        self._closed = False
        self._listener: socket.socket | None = None
        self._clients: set[socket.socket] = set()

    @property
    def connection(self) -> FuseConnection:
        return self._connection

    @property
    def failure(self) -> str | None:
        """Why the last server gave up; None while none did."""
        with self._changed:
            return self._failure

    def start(self) -> None:
        """Listen and answer. Raises OSError where the socket cannot be made at the address."""
        self._listener = listen(self._address, 0o600 if self._allowed_uids is None else 0o666)
        threading.Thread(target=self._accept, name="keeper", daemon=True).start()

    def is_ready(self) -> bool:
        """A daemon answers on the mount now, as far as its supervisor told."""
        with self._changed:
            return self._ready

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until a daemon answers on the mount; False when the time is over or the server gave
        up."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._failure is not None or self._closed, timeout_seconds
            )
            return self._ready

    def update_configuration(self, configuration: Mapping[str, Any]) -> None:
        """New settings or credentials, for the server that is there and for every later one."""
        with self._changed:
            if self._configuration == configuration:
                return
            self._configuration = dict(configuration)
            server = self._server
        if server is not None:
            try:
                send(server, {"configuration": dict(configuration)})
            except OSError:
                logger.info("the server went away before it got its new configuration")

    def close(self) -> None:
        """Stop answering and close the descriptor; the mount is not touched. Safe to call again."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            clients = list(self._clients)
        if self._listener is not None:
            # Wakes the thread in accept(); close() alone would not.
            _shut(self._listener)
            self._listener.close()
            self._address.unlink(missing_ok=True)
        for client in clients:
            _shut(client)
        os.close(self._connection.fd)

    def _accept(self) -> None:
        assert self._listener is not None
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._changed:
                if self._closed:
                    client.close()
                    return
                self._clients.add(client)
            threading.Thread(
                target=self._serve, args=(client,), name="keeper-client", daemon=True
            ).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            if self._admit(client):
                self._follow(client)
        except (OSError, ValueError) as error:
            logger.info("lost a server", extra={"reason": type(error).__name__})
        finally:
            with self._changed:
                self._clients.discard(client)
                if self._server is client:
                    self._server = None
                    self._ready = False
                self._changed.notify_all()
            client.close()

    def _admit(self, client: socket.socket) -> bool:
        """Check who calls and give them what they want; False where they are refused."""
        uid = peer_uid(client)
        if self._allowed_uids is not None and uid not in self._allowed_uids:
            logger.warning("refused the descriptor to a user", extra={"uid": uid})
            send(client, {"refused": True, "reason": f"user {uid} may not serve this mount"})
            return False
        message, _ = receive(client)
        if message is None:
            return False
        wanted = message.get("want")
        with self._changed:
            if self._server is not None or self._closed:
                busy = True
            else:
                busy = False
                self._server = client
                self._failure = None
            configuration, role = self._configuration, self._role
        if busy:
            send(client, {"refused": True, "retry": True, "reason": "another process serves it"})
        elif wanted == "attach":
            send(client, {"configuration": configuration})
        else:
            # close() may have shut the descriptor meanwhile; then sending it fails, which is what
            # is wanted.
            answer = handover_message(self._connection.init_request, role, configuration)
            send(client, answer, self._connection.fd)
        return not busy

    def _follow(self, client: socket.socket) -> None:
        """Take note of what the server tells until it goes."""
        while True:
            message, _ = receive(client)
            if message is None:
                return
            state = message.get("state")
            with self._changed:
                self._ready = state == "ready"
                if self._ready:
                    # INIT is answered for good; whoever comes next takes over.
                    self._role = "successor"
                if state == "gave_up":
                    self._failure = str(message.get("reason", "the daemon does not start"))
                self._changed.notify_all()
            if state == "gave_up":
                # An error for whoever waits on the mount, instead of a wait without end.
                logger.error("the server gave up, the mount is aborted")
                abort(self._connection)


def handover_message(
    init_request: bytes, role: Role, configuration: Mapping[str, Any]
) -> dict[str, Any]:
    """The message that travels beside the descriptor."""
    return {
        "init": encoded_init(init_request),
        "role": role,
        "configuration": dict(configuration),
    }


def request_handover(address: Path, timeout_seconds: float) -> Handover:
    """Get the descriptor from the keeper at `address`, waiting for it to be there and free.

    Raises:
        HandoverError: not within the time, or refused for good.
    """
    return _ask(address, {"want": "handover"}, timeout_seconds)


def reclaim(address: Path, timeout_seconds: float) -> Handover:
    """Get the descriptor, INIT and configuration back from the supervisor that listens at
    `address`.

    For a restarted keeper; the returned handover has no connection.

    Raises:
        HandoverError: no supervisor lives there, or it refused.
    """
    handover = _ask(address, {"want": "reclaim"}, timeout_seconds)
    if handover.connection is not None:
        handover.connection.close()
    return Handover(
        fd=handover.fd,
        init_request=handover.init_request,
        role="successor",
        configuration=handover.configuration,
    )


def answer_reclaim(listener: socket.socket, handover: Handover) -> None:
    """Give the descriptor to a restarted keeper that connects: root, or the user of this
    process."""
    client, _ = listener.accept()
    with client:
        client.settimeout(CALLER_TIMEOUT_SECONDS)
        uid = peer_uid(client)
        if uid not in (0, os.getuid()):
            logger.warning("refused the descriptor to a user", extra={"uid": uid})
            return
        try:
            receive(client)
            message = handover_message(handover.init_request, "successor", handover.configuration)
            send(client, message, handover.fd)
        except (OSError, ValueError):
            logger.info("a process that wanted the descriptor went away")


def attach(address: Path) -> tuple[socket.socket, dict[str, Any]] | None:
    """Tell a new keeper at `address` that this process serves already; its configuration, or None
    if not now."""
    try:
        client = connect(address, timeout_seconds=1.0)
    except OSError:
        return None
    try:
        send(client, {"want": "attach"})
        message, _ = receive(client)
    except (OSError, ValueError):
        message = None
    if message is None or "configuration" not in message:
        client.close()
        return None
    client.settimeout(None)
    return client, message["configuration"]


def _ask(address: Path, message: Mapping[str, Any], timeout_seconds: float) -> Handover:
    deadline = time.monotonic() + timeout_seconds
    reason = "nobody listens"
    while (left := deadline - time.monotonic()) > 0:
        try:
            client = connect(address, left)
        except PermissionError:
            raise HandoverError(f"no permission to use {address}") from None
        except OSError as error:
            reason = f"nobody listens ({error.strerror or 'timed out'})"
        else:
            answer = _exchange(client, message)
            if isinstance(answer, Handover):
                return answer
            client.close()
            reason = answer
        time.sleep(min(RETRY_SECONDS, max(0.0, deadline - time.monotonic())))
    raise HandoverError(f"no mount descriptor from {address} in {timeout_seconds:g} s: {reason}")


def _exchange(client: socket.socket, message: Mapping[str, Any]) -> Handover | str:
    """Ask on a fresh connection: the handover, or why to ask again. Raises HandoverError where it
    is final."""
    try:
        send(client, message)
        answer, fd = receive(client)
    except (OSError, ValueError) as error:
        return f"the other side went away ({type(error).__name__})"
    if answer is None:
        return "the other side closed the connection"
    if answer.get("refused"):
        reason = str(answer.get("reason", "refused"))
        if answer.get("retry"):
            return reason
        client.close()
        raise HandoverError(f"refused the mount descriptor: {reason}")
    if fd is None:
        return "no descriptor came"
    client.settimeout(None)
    return Handover(
        fd=fd,
        init_request=decoded_init(answer["init"]),
        role=answer["role"],
        configuration=answer["configuration"],
        connection=client,
    )


def _shut(peer: socket.socket) -> None:
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        # Not connected any more; a listening socket answers so on some kernels and is woken all
        # the same.
        return
