"""Child processes of the run's first process, which has to reap every orphan of its namespace.

One thread; signals and deaths wake `wait`. Called by `agent`, `services` and `gang`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

__all__ = ["Children", "exit_code_of"]


class Children:
    """Starts programs, and knows how each of them ended."""

    def __init__(self) -> None:
        self.exit_codes: dict[int, int] = {}
        """By process id, as a shell tells it: 128 + n for signal n."""
        self.is_stopping = False
        """Whether SIGTERM or SIGINT came."""
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._wakened, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        # The first process of a namespace ignores every signal that it has no handler for.
        signal.signal(signal.SIGCHLD, self._note)
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def start(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        directory: Path,
    ) -> int:
        """Start a program in a session of its own, its output appended to `log`; its process id."""
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                env=environment,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started[process.pid] = process
        return process.pid

    def is_running(self, pid: int) -> bool:
        return pid not in self.exit_codes

    def wait(self, timeout_seconds: float) -> None:
        """Return after a signal, a death or the time, with every dead child reaped."""
        select.select([self._wakened], [], [], timeout_seconds)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakened, 4096)
        self.reap()

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = exit_code_of(status)
            self.exit_codes[pid] = code
            if process := self._started.pop(pid, None):
                process.returncode = code  # or its destructor would wait for somebody else

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            self.is_stopping = True


def exit_code_of(wait_status: int) -> int:
    """What a shell would show for the status that waitpid gave."""
    code = os.waitstatus_to_exitcode(wait_status)
    return code if code >= 0 else 128 - code
