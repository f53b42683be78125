"""The holder's part of `trainmount remount`: start a daemon of the newly installed code, let it
look at everything before the one that serves is touched, and have it take over.

What follows is the supervisor's (`replace_by`), and at the end the holder becomes the new program
too (succession.py).
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any, Final

from trainmount_fuse.session.commands import give_answer
from trainmount_fuse.session.process import DaemonProcess
from trainmount_fuse.session.succession import Estate
from trainmount_fuse.session.supervisor import Supervisor
from trainmount_fuse.session.wire import receive, send

__all__ = ["Upgrade"]

logger = logging.getLogger(__name__)

CANDIDATE_TIMEOUT_SECONDS: Final = 12.0
"""For starting, importing and one answer of the store."""


class Upgrade:
    """One request to remount. Main thread only; never waits."""

    def __init__(
        self,
        supervisor: Supervisor,
        request: dict[str, Any],
        client: socket.socket,
    ) -> None:
        self._supervisor = supervisor
        self._settings: dict[str, Any] = request["settings"]
        self.command: list[str] = request["command"]
        """Starts the new code; `candidate` or `holder` and a descriptor are added."""
        self.environment: dict[str, str] = request["environment"]
        self.client = client
        self.is_over = False
        self._candidate: DaemonProcess | None = None
        self._ends_at = time.monotonic() + CANDIDATE_TIMEOUT_SECONDS

    def begin(self, estate: Estate) -> None:
        """Start the candidate; `estate` is what its program will have to understand."""
        configuration = {**estate.configuration, "settings": self._settings}
        try:
            self._candidate = DaemonProcess.started([*self.command, "candidate"], self.environment)
            message = {
                "configuration": configuration,
                "estate": estate.to_document(),
                "parent_pid": os.getpid(),
            }
            send(self._candidate.control, message)
        except (OSError, ValueError, TypeError, AttributeError) as error:
            # The last two: what was asked for is no command or environment.
            self._fail(str(error))
            return
        self._configuration = configuration
        self._supervisor.watch(self._candidate.control, self._heed)

    def look(self) -> None:
        """Called every second."""
        if self._candidate is not None and time.monotonic() >= self._ends_at:
            self._fail("the new daemon does not get ready in time")

    def cancel(self) -> None:
        """The mount ends. Fine where the upgrade is over."""
        if not self.is_over:
            self._fail("the mount ends")

    def _heed(self) -> None:
        """The candidate has looked at everything, or ended."""
        assert self._candidate is not None
        candidate = self._candidate
        try:
            message, _ = receive(candidate.control)
        except (OSError, ValueError):
            message = None
        if message is None:
            self._fail("the newly installed program does not start; the holder's log tells why")
        elif "reason" in message:
            self._fail(str(message["reason"]))
        else:
            self._supervisor.unwatch(candidate.control)
            self._candidate = None
            self._supervisor.replace_by(candidate, self._configuration, self._note_end)

    def _note_end(self, reason: str | None) -> None:
        if reason is not None:
            self._fail(reason)
            return
        self.is_over = True
        # Later daemons of this process, should it not become the new one, have the new credentials
        # as well.
        os.environ.clear()
        os.environ.update(self.environment)
        logger.info("remounted")
        self._supervisor.hand_on()

    def _fail(self, reason: str) -> None:
        logger.warning("not remounted, all is as before", extra={"reason": reason})
        self.is_over = True
        if self._candidate is not None:
            self._supervisor.unwatch(self._candidate.control)
            self._candidate.kill()
            self._candidate.close()
            self._candidate = None
        give_answer(self.client, {"error": reason})
