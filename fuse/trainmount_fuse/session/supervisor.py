"""Keeps a daemon on a mount: starts it, starts its successor when it dies or hangs, and ends it in
order.

The holder runs one in its own process, `serve` runs one in a mount pod. It owns a copy of the
descriptor, so nothing that the daemon does ends the connection; it reads no request and touches no
path of the mount.

One thread, the main one: the kernel kills a daemon when the *thread* that started it ends, and a
fork of a process with more threads than one may stand still.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.session.daemon import run_daemon
from trainmount_fuse.session.endings import Ending, ending_by_journal
from trainmount_fuse.session.exit_codes import (
    EXIT_AWAY,
    EXIT_CONFIGURATION,
    EXIT_ENDED,
    EXIT_UNSENT,
)
from trainmount_fuse.session.handover import Handover, answer_reclaim, handover_message
from trainmount_fuse.session.init_reply import InitRequest
from trainmount_fuse.session.keeper_link import KeeperLink
from trainmount_fuse.session.process import DEATH_POLL_SECONDS, DaemonProcess, has_died
from trainmount_fuse.session.restarts import RestartBudget
from trainmount_fuse.session.stop_signals import STOP_SIGNALS, signals_in
from trainmount_fuse.session.watchdog import HEARTBEAT_SECONDS, Watchdog
from trainmount_fuse.session.wire import listen, receive, send

__all__ = ["Supervisor", "SupervisorOptions"]

logger = logging.getLogger(__name__)

REPLACE_TIMEOUT_SECONDS: Final = 2.0
"""How long a daemon may finish requests before a successor that has new credentials gets them. New
requests wait meanwhile."""

TRIAL_TIMEOUT_SECONDS: Final = 8.0
"""How long a daemon of new code may take to answer on the mount before the old code is back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SupervisorOptions:
    """How a supervisor works."""

    serve: Callable[[int], int] = run_daemon
    """What a daemon process runs, given its end of the control socket."""

    keeper_address: Path | None = None
    """Socket of the keeper, to attach to its successor; None where the keeper is this process."""

    reclaim_address: Path | None = None
    """Socket on which a restarted keeper gets the descriptor back; None to offer none."""

    stop_timeout_seconds: float = 120.0
    """How long a stop may take before the daemon is killed; files not uploaded stay in the state
    directory."""

    hang_timeout_seconds: float = 60.0
    """How long a daemon's event loop may stand still before a successor takes its place. It never
    waits for the store or for a program, so this is far above what a loaded machine causes."""

    can_take_over: bool | None = None
    """Whether a successor can go on with the mount; None trusts what the kernel offered in INIT."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Trial:
    """A daemon of newly installed code, which is to take the place of the one that serves."""

    candidate: DaemonProcess
    configuration: dict[str, Any]
    tell: Callable[[str | None], None]
    """Called once: None where it serves, or in words why not."""


class Supervisor:
    """Daemon generations on one mount, until it is unmounted, stopped, or nothing lives on it."""

    def __init__(
        self,
        handover: Handover,
        options: SupervisorOptions,
        budget: RestartBudget,
        *,
        on_ready: Callable[[int, dict[str, Any]], None] | None = None,
        release_mount: Callable[[], None] | None = None,
        on_look: Callable[[], None] | None = None,
        running: DaemonProcess | None = None,
    ) -> None:
        """`on_ready` gets each daemon's process id and first message when it answers.

        `release_mount` is called at a stop, from another thread: it unmounts where nobody uses the
        mount, so that the kernel has flushed everything before the daemon is told to end.
        `on_look` is called every HEARTBEAT_SECONDS. `running` is a daemon that serves already.
        """
        self._handover = handover
        self._options = options
        self._budget = budget
        self._on_ready = on_ready
        self._release_mount = release_mount
        self._on_look = on_look
        offered = InitRequest.parse(handover.init_request).can_resend
        self._can_take_over = offered if options.can_take_over is None else options.can_take_over
        self._answered = handover.role == "successor"
        self._selector = selectors.DefaultSelector()
        self.watchdog = Watchdog(options.hang_timeout_seconds)
        self._daemon = running
        self._trial: _Trial | None = None
        self._is_ready = running is not None
        self._is_stopping = False
        self._num_interrupts = 0
        self._must_replace = False
        self._look_at = time.monotonic() + HEARTBEAT_SECONDS
        self._start_at: float | None = None if running else 0.0
        # When a stop, a replacement and a trial have taken too long.
        self._kill_at: float | None = None
        self._replace_at: float | None = None
        self._trial_ends_at: float | None = None
        self._ending: Ending | None = None
        self._keeper = KeeperLink(
            self, handover.connection, options.keeper_address, self._configure
        )

    @property
    def handover(self) -> Handover:
        """With the configuration as it is now."""
        return self._handover

    @property
    def daemon(self) -> DaemonProcess | None:
        """The one that is there now."""
        return self._daemon

    @property
    def is_ready(self) -> bool:
        """A daemon answers."""
        return self._is_ready

    def run(self) -> Ending:
        """Serve until the end. Only from the main thread; takes over STOP_SIGNALS meanwhile.

        The descriptor stays open.
        """
        # Daemons share this memory for as long as nobody writes to it, which a collection would.
        gc.collect()
        gc.freeze()
        waker, wakened = socket.socketpair()
        waker.setblocking(False)
        wakened.setblocking(False)
        self._waker = waker
        self.watch(wakened, lambda: self._heed_signal(wakened))
        listener = None
        if self._options.reclaim_address is not None:
            listener = listen(self._options.reclaim_address)
            self.watch(listener, lambda: answer_reclaim(listener, self._handover))
        if self._daemon is not None:
            self._attend(self._daemon)
        try:
            with signals_in(waker):
                return self._loop()
        finally:
            if self._trial is not None:
                self._fail_trial("the mount ends")
            if self._ending is not Ending.HANDED_ON:
                self._kill_daemon()
            self._keeper.close()
            for one in (waker, wakened, listener):
                if one is not None:
                    one.close()
            if self._options.reclaim_address is not None:
                self._options.reclaim_address.unlink(missing_ok=True)
            self._selector.close()

    def watch(self, one: socket.socket | int, callback: Callable[[], None]) -> None:
        """Call back whenever there is something to read. From the main thread."""
        self._selector.register(one, selectors.EVENT_READ, callback)

    def unwatch(self, one: socket.socket | int) -> None:
        """Before it is closed; fine where it is not watched, or when all is over."""
        if one in (self._selector.get_map() or ()):
            self._selector.unregister(one)

    def stop(self) -> None:
        """End in order, also where programs still use the mount."""
        self._begin_stop()

    def stop_released(self) -> None:
        """End in order a mount whose name is gone already. From any thread."""
        # The service may have ended of itself meanwhile.
        with contextlib.suppress(OSError):
            self._waker.send(bytes([_RELEASED]))

    def hand_on(self) -> None:
        """Let `run` return HANDED_ON, with the daemon serving on."""
        self._ending = Ending.HANDED_ON

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

    def _seconds_to_next(self) -> float:
        due = (self._look_at, self._start_at, self._keeper.due_at, self._kill_at, self._replace_at)
        times = [one for one in (*due, self._trial_ends_at) if one is not None]
        return max(0.0, min(DEATH_POLL_SECONDS, min(times) - time.monotonic()))

    def _do_what_is_due(self) -> None:
        if has_died(self._daemon):
            self._daemon_ended()
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._end_at_once()
        elif self._start_at is not None and now >= self._start_at:
            self._start_at = None
            self._start_daemon()
        if self._replace_at is not None and now >= self._replace_at:
            self._replace_at = None
            if self._daemon is not None:
                # Its requests are repeated to the successor, like after any other death.
                self._daemon.tell(signal.SIGKILL)
        if self._trial_ends_at is not None and now >= self._trial_ends_at:
            self._trial_ends_at = None
            if self._daemon is not None:
                self._daemon.tell(signal.SIGKILL)
        if self._keeper.due_at is not None and now >= self._keeper.due_at:
            self._keeper.attach()
        if now >= self._look_at:
            # A machine that was busy or asleep gives the daemon no fewer looks for it.
            self._look_at = now + HEARTBEAT_SECONDS
            self._look()

    # The daemon.

    def _look(self) -> None:
        may_end = self._can_take_over or self._is_stopping
        if self._daemon is not None and may_end and self.watchdog.look():
            self.watchdog.note_sign()
            logger.error("the daemon hangs and is killed", extra={"daemon_pid": self._daemon.pid})
            # Its threads tell where they stand, if they still can; then it goes.
            self._daemon.tell(signal.SIGQUIT)
            self._replace_at = time.monotonic() + HEARTBEAT_SECONDS
        if self._on_look is not None:
            self._on_look()

    def _start_daemon(self) -> None:
        if self._trial is not None:
            self._daemon, configuration = self._trial.candidate, self._trial.configuration
            self._trial_ends_at = time.monotonic() + TRIAL_TIMEOUT_SECONDS
        else:
            self._daemon = DaemonProcess.forked(self._options.serve)
            configuration = self._handover.configuration
        message = handover_message(
            self._handover.init_request,
            "successor" if self._answered else "first",
            configuration,
        )
        self._attend(self._daemon)
        try:
            send(self._daemon.control, {**message, "parent_pid": os.getpid()}, self._handover.fd)
        except OSError:
            logger.info("a daemon ended before it got the mount")

    def _attend(self, daemon: DaemonProcess) -> None:
        self.watchdog.note_sign()
        self.watch(daemon.control, self._heed_daemon)
        self.watch(daemon.pidfd, self._daemon_ended)

    def _heed_daemon(self) -> None:
        assert self._daemon is not None
        try:
            message, _ = receive(self._daemon.control)
        except (OSError, ValueError):
            message = None
        if message is None:
            # Its death is told by the process itself.
            self.unwatch(self._daemon.control)
            return
        self.watchdog.note_sign()
        if message.get("state") == "ready":
            self._is_ready = self._answered = True
            self._budget.note_ready()
            if self._on_ready is not None:
                self._on_ready(self._daemon.pid, message)
            self._keeper.tell({"state": "ready"})
            if self._trial is not None and self._trial.candidate is self._daemon:
                self._pass_trial()
            if self._is_stopping:
                self._daemon.tell(signal.SIGTERM)

    def _daemon_ended(self) -> None:
        assert self._daemon is not None
        code = self._daemon.wait()
        was_ready = self._is_ready
        was_on_trial = self._trial is not None and self._trial.candidate is self._daemon
        self._forget_daemon()
        if code == EXIT_ENDED and was_ready:
            self._ending = Ending.ENDED
        elif code == EXIT_UNSENT and was_ready:
            self._ending = Ending.UNSENT
        elif self._is_stopping or code == EXIT_AWAY:
            if code != EXIT_AWAY:
                logger.error(
                    "the daemon died while it stopped; what it has not uploaded stays in the "
                    "state directory",
                    extra={"exit_code": code},
                )
            self._ending = ending_by_journal(self._handover.configuration)
        elif was_on_trial:
            self._fail_trial(f"the new daemon ended before it answered (exit code {code})")
            self._start_at = 0.0
        elif self._must_replace:
            self._must_replace = False
            self._replace_at = None
            self._start_at = 0.0
        else:
            self._restart_or_give_up(code)

    def _restart_or_give_up(self, code: int) -> None:
        self._keeper.tell({"state": "restarting"})
        if self._answered and not self._can_take_over:
            logger.error("the daemon died", extra={"exit_code": code})
            self._ending = Ending.LOST
            return
        delay_seconds = self._budget.delay_after_death()
        if code == EXIT_CONFIGURATION and not self._answered:
            # It would say the same the next time.
            delay_seconds = None
        if delay_seconds is None:
            logger.error(
                "the daemon keeps dying, giving up: the mount answers every program with an error",
                extra={"exit_code": code, "deaths": self._budget.num_deaths},
            )
            self._keeper.tell({"state": "gave_up", "reason": f"the daemon keeps dying ({code})"})
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
            self._forget_daemon()

    def _forget_daemon(self) -> None:
        assert self._daemon is not None
        self._is_ready = False
        self.unwatch(self._daemon.control)
        self.unwatch(self._daemon.pidfd)
        self._daemon.close()
        self._daemon = None

    # Another daemon in place of one that is well.

    def replace_by(
        self,
        candidate: DaemonProcess,
        configuration: dict[str, Any],
        tell: Callable[[str | None], None],
    ) -> None:
        """Let a started daemon of other code take over; where it does not answer in time, one of
        this code and configuration is back.

        `tell` is called once: with None where it serves, or in words why not. The candidate is
        this object's from here on.
        """
        self._trial = _Trial(candidate=candidate, configuration=configuration, tell=tell)
        if self._is_stopping:
            self._fail_trial("the mount ends")
        elif not self._can_take_over:
            self._fail_trial("this kernel hands no mount over; unmount it and mount it again")
        else:
            self._make_room()

    def _configure(self, configuration: dict[str, Any]) -> None:
        """Take new settings or credentials: the running daemon makes room for one that has them."""
        if configuration == self._handover.configuration:
            return
        self._handover = replace(self._handover, configuration=configuration)
        if not self._is_stopping and self._can_take_over:
            logger.info("the configuration changed, a successor takes over with it")
            self._make_room()

    def _make_room(self) -> None:
        if self._daemon is None:
            # Between two generations; the next one is the other one.
            self._start_at = 0.0
            return
        self._must_replace = True
        if self._is_ready:
            self._daemon.tell(signal.SIGUSR1)
            self._replace_at = time.monotonic() + REPLACE_TIMEOUT_SECONDS
        else:
            # It read the old configuration and has no request yet.
            self._daemon.tell(signal.SIGKILL)

    def _pass_trial(self) -> None:
        assert self._trial is not None
        trial, self._trial = self._trial, None
        self._trial_ends_at = None
        self._handover = replace(self._handover, configuration=trial.configuration)
        trial.tell(None)

    def _fail_trial(self, reason: str) -> None:
        """Forget the candidate; whoever calls this starts another daemon where none is left."""
        assert self._trial is not None
        trial, self._trial = self._trial, None
        self._trial_ends_at = None
        if trial.candidate is not self._daemon and trial.candidate.control.fileno() >= 0:
            trial.candidate.kill()
            trial.candidate.close()
        trial.tell(reason)

    # The end.

    def _heed_signal(self, wakened: socket.socket) -> None:
        for number in wakened.recv(64):
            if number == signal.SIGINT:
                self._num_interrupts += 1
            if number in STOP_SIGNALS:
                self._begin_stop()
            elif number == _RELEASED:
                self._note_stopping()
                self._stop_daemon()
        if self._num_interrupts > 1:
            # A person who is tired of waiting. A service manager may well ask twice.
            self._end_at_once()

    def _begin_stop(self) -> None:
        if self._is_stopping:
            return
        self._note_stopping()
        if self._release_mount is None or not self._is_ready:
            self._stop_daemon()
            return
        # In a thread, because it waits for the daemon to take what the kernel still has.
        threading.Thread(target=self._try_release, name="unmount", daemon=True).start()

    def _note_stopping(self) -> None:
        if not self._is_stopping:
            self._is_stopping = True
            logger.info("stopping")
            self.watchdog.hurry()
            if self._daemon is not None:
                self._daemon.wake()
            self._kill_at = time.monotonic() + self._options.stop_timeout_seconds

    def _try_release(self) -> None:
        assert self._release_mount is not None
        try:
            self._release_mount()
        finally:
            # Told even where the name is free: a copy of the mount in another namespace would keep
            # the daemon serving. Where there is none it ends by itself, and this finds it ending.
            self.stop_released()

    def _stop_daemon(self) -> None:
        if self._daemon is None:
            # Between two generations; what the last one wrote is found by the next mount.
            self._start_at = None
            self._ending = ending_by_journal(self._handover.configuration)
        elif self._is_ready:
            self._daemon.tell(signal.SIGTERM)

    def _end_at_once(self) -> None:
        logger.error(
            "the daemon did not end in time and is killed; what it has not uploaded stays in "
            "the state directory"
        )
        self._kill_daemon()
        self._ending = ending_by_journal(self._handover.configuration)


_RELEASED: Final = 0
"""Written into the wakeup socket where signal numbers arrive too; no signal has number 0."""
