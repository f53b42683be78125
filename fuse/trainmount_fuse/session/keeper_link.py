"""A supervisor's connection to the keeper that made its mount, which may go and come back
(handover.py). supervisor.py owns one."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from trainmount_fuse.session.handover import attach
from trainmount_fuse.session.wire import receive, send

__all__ = ["KeeperLink"]

logger = logging.getLogger(__name__)

ATTACH_PERIOD_SECONDS: Final = 0.5
"""How often a supervisor whose keeper went away looks for the next one."""


class _Loop(Protocol):
    """What `KeeperLink` needs of a supervisor."""

    @property
    def is_ready(self) -> bool: ...

    def watch(self, one: socket.socket | int, callback: Callable[[], None]) -> None: ...

    def unwatch(self, one: socket.socket | int) -> None: ...


class KeeperLink:
    """Tells the keeper how the daemon is, and hears of new configurations. Main thread only."""

    def __init__(
        self,
        loop: _Loop,
        connection: socket.socket | None,
        address: Path | None,
        on_configuration: Callable[[dict[str, Any]], None],
    ) -> None:
        """`address` is where the keeper's successor listens; without both there is no keeper."""
        self._loop = loop
        self._connection = connection
        self._address = address
        self._on_configuration = on_configuration
        self.due_at: float | None = None
        """When `attach` is to be called; None while there is nothing to look for."""
        if connection is not None:
            loop.watch(connection, self._heed)
        elif address is not None:
            self.due_at = 0.0

    def tell(self, message: dict[str, Any]) -> None:
        """Fine where no keeper is there."""
        if self._connection is not None:
            try:
                send(self._connection, message)
            except OSError:
                self._lose()

    def attach(self) -> None:
        """Look for a keeper."""
        assert self._address is not None
        self.due_at = time.monotonic() + ATTACH_PERIOD_SECONDS
        answer = attach(self._address)
        if answer is None:
            return
        self.due_at = None
        self._connection, configuration = answer
        self._loop.watch(self._connection, self._heed)
        logger.info("found the keeper again")
        if self._loop.is_ready:
            self.tell({"state": "ready"})
        self._on_configuration(configuration)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _heed(self) -> None:
        assert self._connection is not None
        try:
            message, _ = receive(self._connection)
        except (OSError, ValueError):
            message = None
        if message is None:
            self._lose()
        elif "configuration" in message:
            self._on_configuration(message["configuration"])

    def _lose(self) -> None:
        if self._connection is None:
            return
        logger.info("the keeper went away, the mount goes on")
        self._loop.unwatch(self._connection)
        self._connection.close()
        self._connection = None
        if self._address is not None:
            self.due_at = time.monotonic()
