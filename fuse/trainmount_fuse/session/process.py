"""One daemon process as its supervisor sees it: started, told, waited for. supervisor.py calls
this.

A daemon is a fork of the process that keeps it: everything is imported already, so its successor
answers within a tenth of a second, most of its memory is shared, and an installation that changes
on disk meanwhile cannot break it. One of newly installed code is a program of its own instead,
which then gets the mount handed over (`started`).
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_fuse.session.exit_codes import EXIT_FAILED

__all__ = ["DEATH_POLL_SECONDS", "DaemonProcess", "has_died"]

logger = logging.getLogger(__name__)

_STUCK_SECONDS: Final = 0.3
"""Threads of a killed process that can end have done so long before."""

_POLL_SECONDS: Final = 0.05

DEATH_POLL_SECONDS: Final = 0.25
"""Programs wait so much longer where a daemon died with a thread in the kernel."""

_stuck: Final[set[int]] = set()
"""Ended children of this process with a thread that the kernel does not let go."""


@dataclass(frozen=True, slots=True, eq=False)
class DaemonProcess:
    """A child of this process, until `close`."""

    pid: int

    control: socket.socket
    """This end of the socket over which the two speak."""

    pidfd: int
    """Readable when the process has ended."""

    @classmethod
    def forked(cls, serve: Callable[[int], int]) -> DaemonProcess:
        """Fork; the child runs `serve(control_fd)` and ends with what it returns.

        Only from the main thread, and best while there is no other.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            pid = os.fork()
            if pid == 0:
                _be_daemon(serve, theirs.fileno())
        return cls.adopted(pid, ours)

    @classmethod
    def started(cls, command: Sequence[str], environment: Mapping[str, str]) -> DaemonProcess:
        """Start a program; `--control-fd N` is added to its command. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = subprocess.Popen(
                [*command, "--control-fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        # Waited for by number, like every other daemon.
        child.returncode = 0
        return cls.adopted(child.pid, ours)

    @classmethod
    def adopted(cls, pid: int, control: socket.socket) -> DaemonProcess:
        """A child that this process had before it became another program."""
        return cls(pid, control, os.pidfd_open(pid))

    def tell(self, number: signal.Signals) -> None:
        """Send a signal; fine where the process has ended and nobody waited for it yet."""
        signal.pidfd_send_signal(self.pidfd, number)

    def wake(self) -> None:
        """Let it go on if somebody stopped it (SIGSTOP): then it heeds nothing but SIGKILL."""
        self.tell(signal.SIGCONT)

    @property
    def is_dead(self) -> bool:
        """It has ended, or all that is left of it is a thread which the kernel does not let go:
        `pidfd` says nothing of such an end.
        """
        return _stat_fields(self.pid)[0] in "ZX"

    def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal. Once only.

        A thread may be stuck in the kernel, on a disk that hangs or on a page that only a successor
        can bring. It runs no code of ours any more and is not waited for; `has_died` sweeps up.
        """
        dead_since: float | None = None
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if not self.is_dead:
                dead_since = None
            elif dead_since is None:
                dead_since = time.monotonic()
            elif time.monotonic() - dead_since > _STUCK_SECONDS:
                _stuck.add(self.pid)
                logger.warning("a thread of the ended daemon is stuck in the kernel")
                return os.waitstatus_to_exitcode(int(_stat_fields(self.pid)[-1]))
            select.select([self.pidfd], [], [], _POLL_SECONDS)

    def kill(self) -> None:
        """End it whatever it does, and wait."""
        self.tell(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Give up this side's descriptors; the process is ended and waited for."""
        self.control.close()
        os.close(self.pidfd)


def has_died(daemon: DaemonProcess | None) -> bool:
    """Whether there is a daemon and it `is_dead`. To be asked every DEATH_POLL_SECONDS."""
    for pid in list(_stuck):
        # The kernel may have let go of its thread meanwhile.
        if os.waitpid(pid, os.WNOHANG)[0]:
            _stuck.discard(pid)
    return daemon is not None and daemon.is_dead


def _stat_fields(pid: int) -> list[str]:
    """Of /proc/PID/stat from the state on; the last one is what waitpid would say."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()


def _be_daemon(serve: Callable[[int], int], control_fd: int) -> None:
    """Never returns."""
    code = EXIT_FAILED
    try:
        _leave_parent_behind(control_fd)
        code = serve(control_fd)
    except BaseException:
        logger.exception("the daemon ended in a way nobody planned for")
    finally:
        logging.shutdown()
        # The frames above belong to the supervisor and must not be unwound here.
        os._exit(code)


def _leave_parent_behind(control_fd: int) -> None:
    # Ctrl-C in a terminal is for the supervisor, which ends the daemon in order.
    os.setsid()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # The mount's descriptor comes as a message; locks and listening sockets are the parent's.
    os.closerange(3, control_fd)
    os.closerange(control_fd + 1, os.sysconf("SC_OPEN_MAX"))
