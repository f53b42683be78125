"""Keeps a daemon on a mount: starts it, starts its successor when it dies, and ends it in order.

The holder runs one in its own process, `serve` runs one in a mount pod. It owns a copy of the
descriptor, so nothing that the daemon does ends the connection; it reads no request and touches no
path of the mount.

One thread, the main one: the kernel kills a daemon when the *thread* that started it ends.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from trainmount_fuse.journal import unsent_paths
from trainmount_fuse.session.exit_codes import (
    EXIT_CONFIGURATION,
    EXIT_ENDED,
    EXIT_FAILED,
    EXIT_UNSENT,
)
from trainmount_fuse.session.handover import Handover, attach, handover_message
from trainmount_fuse.session.init_reply import InitRequest
from trainmount_fuse.session.restarts import RestartBudget
from trainmount_fuse.session.wire import listen, peer_uid, receive, send

__all__ = ["STOP_SIGNALS", "Ending", "Supervisor", "SupervisorOptions"]

logger = logging.getLogger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Each means an ordered end: from a service manager, from Ctrl-C, from a terminal that closes."""

ATTACH_PERIOD_SECONDS: Final = 0.5
"""How often a supervisor whose keeper went away looks for the next one."""

REPLACE_TIMEOUT_SECONDS: Final = 2.0
"""How long a daemon may finish requests before a successor that has new credentials gets them. New
requests wait meanwhile."""

CALLER_TIMEOUT_SECONDS: Final = 2.0
"""How long a process that connects to the reclaim socket may take to say what it wants."""


class Ending(enum.Enum):
    """How a mount's service ended."""

    ENDED = "unmounted or stopped, everything is uploaded"
    UNSENT = "unmounted or stopped, some files wait in the state directory"
    GAVE_UP = "no daemon lives long enough"
    LOST = "the daemon died and this kernel allows no successor"

    @property
    def exit_code(self) -> int:
        """What a process answers that served the mount (exit_codes.py)."""
        return {Ending.ENDED: EXIT_ENDED, Ending.UNSENT: EXIT_UNSENT}.get(self, EXIT_FAILED)


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOptions:
    """How a supervisor works."""

    daemon_command: Sequence[str] = (sys.executable, "-m", "trainmount_fuse", "daemon")
    """What starts a daemon; `--control-fd N` is added."""

    keeper_address: Path | None = None
    """Socket of the keeper, to attach to its successor; None where the keeper is this process."""

    reclaim_address: Path | None = None
    """Socket on which a restarted keeper gets the descriptor back; None to offer none."""

    stop_timeout_seconds: float = 120.0
    """How long a stop may take before the daemon is killed; files not uploaded stay in the state
    directory."""

    can_take_over: bool | None = None
    """Whether a successor can go on with the mount; None trusts what the kernel offered in INIT."""


class Supervisor:
    """Daemon generations on one mount, until it is unmounted, stopped, or nothing lives on it."""

    def __init__(
        self,
        handover: Handover,
        options: SupervisorOptions,
        budget: RestartBudget,
        *,
        on_ready: Callable[[int], None] | None = None,
        release_mount: Callable[[], None] | None = None,
    ) -> None:
        """`on_ready` gets each daemon's process id when it answers.

        `release_mount` is called at a stop, from another thread: it unmounts where nobody uses the
        mount, so that the kernel has flushed everything before the daemon is told to end.
        """
        self._handover = handover
        self._options = options
        self._budget = budget
        self._on_ready = on_ready
        self._release_mount = release_mount
        offered = InitRequest.parse(handover.init_request).can_resend
        self._can_take_over = offered if options.can_take_over is None else options.can_take_over
        self._answered = handover.role == "successor"
        self._keeper = handover.connection
        self._selector = selectors.DefaultSelector()
        self._daemon: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._pidfd = -1
        self._is_ready = False
        self._is_stopping = False
        self._must_replace = False
        self._start_at: float | None = 0.0
        self._attach_at: float | None = None
        # When a stop, and when a replacement, has taken too long.
        self._kill_at: float | None = None
        self._replace_at: float | None = None
        self._ending: Ending | None = None

    @property
    def handover(self) -> Handover:
        """With the configuration as it is now."""
        return self._handover

    def run(self) -> Ending:
        """Serve until the end. Only from the main thread; takes over STOP_SIGNALS meanwhile.

        The descriptor stays open.
        """
        waker, wakened = socket.socketpair()
        waker.setblocking(False)
        wakened.setblocking(False)
        self._waker = waker
        self._watch(wakened, lambda: self._heed_signal(wakened))
        listener = None
        if self._options.reclaim_address is not None:
            listener = listen(self._options.reclaim_address)
            self._watch(listener, lambda: self._answer_reclaim(listener))
        if self._keeper is not None:
            self._watch(self._keeper, self._heed_keeper)
        elif self._options.keeper_address is not None:
            self._attach_at = 0.0
        previous_wakeup = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        previous = {number: signal.signal(number, _noted) for number in STOP_SIGNALS}
        # Whoever mounted held them back until here, and again when this is over.
        previous_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        try:
            return self._loop()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
            signal.set_wakeup_fd(previous_wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._kill_daemon()
            for one in (waker, wakened, listener, self._keeper):
                if one is not None:
                    one.close()
            if self._options.reclaim_address is not None:
                self._options.reclaim_address.unlink(missing_ok=True)
            self._selector.close()

    def _loop(self) -> Ending:
        while self._ending is None:
            self._do_what_is_due()
            if self._ending is not None:
                break
            for key, _ in self._selector.select(self._seconds_to_next()):
                # An earlier callback of this round may have closed what this one is about.
                if key.fileobj in self._selector.get_map():
                    key.data()
        return self._ending

    def _seconds_to_next(self) -> float | None:
        due = (self._start_at, self._attach_at, self._kill_at, self._replace_at)
        times = [one for one in due if one is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            logger.error(
                "the daemon did not end in time and is killed; what it has not uploaded stays in "
                "the state directory"
            )
            self._kill_daemon()
            self._ending = self._ending_without_word()
        elif self._start_at is not None and now >= self._start_at:
            self._start_at = None
            self._start_daemon()
        if self._replace_at is not None and now >= self._replace_at:
            self._replace_at = None
            if self._daemon is not None:
                # Its requests are repeated to the successor, like after any other death.
                self._daemon.kill()
        if self._attach_at is not None and now >= self._attach_at:
            self._attach_at = now + ATTACH_PERIOD_SECONDS
            self._attach()

    # The daemon.

    def _start_daemon(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._daemon = subprocess.Popen(
                [*self._options.daemon_command, "--control-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C in a terminal is for the supervisor, which ends the daemon in order.
                start_new_session=True,
            )
        message = handover_message(
            self._handover.init_request,
            "successor" if self._answered else "first",
            self._handover.configuration,
        )
        send(ours, {**message, "parent_pid": os.getpid()}, self._handover.fd)
        self._control = ours
        self._watch(ours, self._heed_daemon)
        self._pidfd = os.pidfd_open(self._daemon.pid)
        self._watch(self._pidfd, self._daemon_ended)

    def _heed_daemon(self) -> None:
        assert self._control is not None
        assert self._daemon is not None
        message, _ = receive(self._control)
        if message is None:
            # Its death is told by the process itself.
            self._unwatch(self._control)
            return
        if message.get("state") == "ready":
            self._is_ready = self._answered = True
            self._budget.note_ready()
            if self._on_ready is not None:
                self._on_ready(self._daemon.pid)
            self._tell_keeper({"state": "ready"})
            if self._is_stopping:
                self._daemon.send_signal(signal.SIGTERM)

    def _daemon_ended(self) -> None:
        assert self._daemon is not None
        code = self._daemon.wait()
        was_ready, self._is_ready = self._is_ready, False
        self._forget_daemon()
        if code == EXIT_ENDED:
            self._ending = Ending.ENDED
        elif code == EXIT_UNSENT:
            self._ending = Ending.UNSENT
        elif self._is_stopping:
            logger.error(
                "the daemon died while it stopped; what it has not uploaded stays in the state "
                "directory",
                extra={"exit_code": code},
            )
            self._ending = self._ending_without_word()
        elif self._must_replace:
            self._must_replace = False
            self._replace_at = None
            self._start_at = 0.0
        else:
            self._restart_or_give_up(code, was_ready)

    def _restart_or_give_up(self, code: int, was_ready: bool) -> None:
        self._tell_keeper({"state": "restarting"})
        if self._answered and not self._can_take_over:
            logger.error("the daemon died", extra={"exit_code": code})
            self._ending = Ending.LOST
            return
        delay_seconds = self._budget.delay_after_death(was_ready=was_ready)
        if code == EXIT_CONFIGURATION and not self._answered:
            # It would say the same the next time.
            delay_seconds = None
        if delay_seconds is None:
            logger.error(
                "the daemon keeps dying, giving up: the mount answers every program with an error",
                extra={"exit_code": code, "deaths": self._budget.num_deaths},
            )
            self._tell_keeper({"state": "gave_up", "reason": f"the daemon keeps dying ({code})"})
            self._ending = Ending.GAVE_UP
            return
        logger.warning(
            "the daemon died, its successor takes over",
            extra={"exit_code": code, "delay_seconds": delay_seconds},
        )
        self._start_at = time.monotonic() + delay_seconds

    def _kill_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.kill()
            self._daemon.wait()
            self._forget_daemon()

    def _forget_daemon(self) -> None:
        if self._control is not None:
            self._unwatch(self._control)
            self._control.close()
            self._control = None
        if self._pidfd >= 0:
            self._unwatch(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._daemon = None

    # The end.

    def _heed_signal(self, wakened: socket.socket) -> None:
        for number in wakened.recv(64):
            if number in STOP_SIGNALS:
                self._begin_stop()
            elif number == _RELEASED:
                self._stop_daemon()

    def _begin_stop(self) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        logger.info("stopping")
        self._kill_at = time.monotonic() + self._options.stop_timeout_seconds
        if self._release_mount is None or not self._is_ready:
            self._stop_daemon()
            return
        # In a thread, because it waits for the daemon to take what the kernel still has.
        threading.Thread(target=self._try_release, name="unmount", daemon=True).start()

    def _try_release(self) -> None:
        assert self._release_mount is not None
        try:
            self._release_mount()
        finally:
            # Told even where the name is free: a copy of the mount in another namespace would keep
            # the daemon serving. Where there is none it ends by itself, and this finds it ending.
            self._waker.send(bytes([_RELEASED]))

    def _stop_daemon(self) -> None:
        if self._daemon is None:
            # Between two generations; what the last one wrote is found by the next mount.
            self._start_at = None
            self._ending = self._ending_without_word()
        elif self._is_ready:
            self._daemon.send_signal(signal.SIGTERM)

    def _ending_without_word(self) -> Ending:
        """The daemon could not say whether everything is uploaded; its journal does."""
        settings = self._handover.configuration.get("settings") or {}
        if isinstance(settings, str):
            settings = json.loads(settings)
        if "state_dir" not in settings:
            return Ending.ENDED
        state_dir = Path(settings["state_dir"])
        try:
            unsent = unsent_paths(state_dir)
        except OSError as error:
            unsent = [f"? ({error.strerror})"]
        if not unsent:
            return Ending.ENDED
        logger.error(
            "the mount ends with bytes only here",
            extra={"state_dir": str(state_dir), "num_files": len(unsent), "files": unsent[:20]},
        )
        return Ending.UNSENT

    # The keeper.

    def _tell_keeper(self, message: dict[str, Any]) -> None:
        if self._keeper is not None:
            try:
                send(self._keeper, message)
            except OSError:
                self._lose_keeper()

    def _heed_keeper(self) -> None:
        assert self._keeper is not None
        try:
            message, _ = receive(self._keeper)
        except (OSError, ValueError):
            message = None
        if message is None:
            self._lose_keeper()
        elif "configuration" in message:
            self._configure(message["configuration"])

    def _lose_keeper(self) -> None:
        if self._keeper is None:
            return
        logger.info("the keeper went away, the mount goes on")
        self._unwatch(self._keeper)
        self._keeper.close()
        self._keeper = None
        if self._options.keeper_address is not None:
            self._attach_at = time.monotonic()

    def _attach(self) -> None:
        assert self._options.keeper_address is not None
        answer = attach(self._options.keeper_address)
        if answer is None:
            return
        self._attach_at = None
        self._keeper, configuration = answer
        self._watch(self._keeper, self._heed_keeper)
        logger.info("found the keeper again")
        if self._is_ready:
            self._tell_keeper({"state": "ready"})
        self._configure(configuration)

    def _configure(self, configuration: dict[str, Any]) -> None:
        """Take new settings or credentials: the running daemon makes room for one that has them."""
        if configuration == self._handover.configuration:
            return
        self._handover = replace(self._handover, configuration=configuration)
        if self._daemon is None or self._is_stopping or not self._can_take_over:
            return
        self._must_replace = True
        if self._is_ready:
            logger.info("the configuration changed, a successor takes over with it")
            self._daemon.send_signal(signal.SIGUSR1)
            self._replace_at = time.monotonic() + REPLACE_TIMEOUT_SECONDS
        else:
            # It read the old one and has no request yet.
            self._daemon.kill()

    def _answer_reclaim(self, listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client:
            client.settimeout(CALLER_TIMEOUT_SECONDS)
            uid = peer_uid(client)
            if uid not in (0, os.getuid()):
                logger.warning("refused the descriptor to a user", extra={"uid": uid})
                return
            try:
                receive(client)
                message = handover_message(
                    self._handover.init_request, "successor", self._handover.configuration
                )
                send(client, message, self._handover.fd)
            except (OSError, ValueError):
                logger.info("a process that wanted the descriptor went away")

    def _watch(self, one: socket.socket | int, callback: Callable[[], None]) -> None:
        self._selector.register(one, selectors.EVENT_READ, callback)

    def _unwatch(self, one: socket.socket | int) -> None:
        if one in self._selector.get_map():
            self._selector.unregister(one)


_RELEASED: Final = 0
"""Written into the wakeup socket where signal numbers arrive too; no signal has number 0."""


def _noted(_number: int, _frame: FrameType | None) -> None:
    """The number arrives in the wakeup socket; Python only needs a handler to be there."""
