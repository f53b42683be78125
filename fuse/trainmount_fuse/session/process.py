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
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainmount_fuse.session.exit_codes import EXIT_FAILED

__all__ = ["DaemonProcess"]

logger = logging.getLogger(__name__)


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

    def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal. Once only."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        """End it whatever it does, and wait."""
        self.tell(signal.SIGKILL)
        self.wait()

    def close(self) -> None:
        """Give up this side's descriptors; the process is ended and waited for."""
        self.control.close()
        os.close(self.pidfd)


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
