"""A process beside the daemon that fetches whole small files, which cost the interpreter more than
the network: two interpreters have two locks. Started by `session.daemon`, used by `prefetch`.

It is a fork of the daemon from before its first thread, with the volume, one end of a socket pair
and memory that both have. Asked for a range, it fills a part of that memory and says whether it
could; what is done with the bytes is the daemon's. It knows neither mount nor cache, writes nothing
down, and ends with its daemon. Where it ends before, the daemon fetches in threads of its own.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from trainmount_files.volume import ByteRange, Volume
from trainmount_files.waiting import wait_here
from trainmount_fuse.cache.shared_memory import SharedBuffer, SharedMemory
from trainmount_fuse.lifetime import end_with_parent

__all__ = ["FetchProcess", "fork_fetch_process"]

log = logging.getLogger(__name__)

_MAX_GUESSES: Final = 32
"""At once. What they wait for is the store's latency."""

_MAX_FETCHES: Final = 48
"""With those that a program waits for."""

_ANSWER: Final = struct.Struct("<Q?")
_MAX_QUESTION_BYTES: Final = 64 << 10
_LEFT_TO_THE_DAEMON: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGHUP,
)
"""It is told to end, and then the process ends with it."""


class FetchProcess:
    """The daemon's side. The event loop's thread only."""

    def __init__(self, pid: int, connection: socket.socket, memory: SharedMemory) -> None:
        self.memory = memory
        self.pid = pid
        self._connection = connection
        self._asked: dict[int, Callable[[bool], None]] = {}
        self._last_number = 0
        self._is_alive = True

    def is_ready(self, *, for_guess: bool) -> bool:
        """Whether another fetch can begin at once."""
        limit = _MAX_GUESSES if for_guess else _MAX_FETCHES
        return self._is_alive and len(self._asked) < limit

    def ask(
        self,
        path: str,
        version: str,
        byte_range: ByteRange,
        buffer: SharedBuffer,
        on_end: Callable[[bool], None],
    ) -> None:
        """Have a range of that version put into the buffer, which is a part of `memory`. `on_end`
        is called from `attend` or `close`, or here, and told whether it is there.
        """
        self._last_number += 1
        question = json.dumps(
            [self._last_number, path, version, byte_range.start, byte_range.end, buffer.offset]
        )
        self._asked[self._last_number] = on_end
        try:
            self._connection.send(question.encode())
        except OSError:
            # Too long a path, or the process is gone, which `attend` will notice.
            self._answered(self._last_number, is_there=False)

    async def attend(self) -> None:
        """Take answers until the process has ended or is told to by `close`."""
        with suppress(trio.ClosedResourceError):
            while self._is_alive:
                await trio.lowlevel.wait_readable(self._connection)
                self._take_answers()

    def close(self) -> None:
        """End the process; what it was asked for does not come. Safe to repeat."""
        if not self._is_alive:
            return
        self._is_alive = False
        # No part of the memory is given to anybody from here on, so it may go on writing to one.
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # A disk that hangs may keep it, and must not keep the event loop.
        threading.Thread(target=_wait_for, args=(self.pid,), daemon=True).start()
        trio.lowlevel.notify_closing(self._connection)
        self._connection.close()
        for number in list(self._asked):
            self._answered(number, is_there=False)

    def _take_answers(self) -> None:
        while self._is_alive:
            try:
                answer = self._connection.recv(_ANSWER.size)
            except BlockingIOError:
                return
            except OSError:
                answer = b""
            if answer:
                self._answered(*_ANSWER.unpack(answer))
            else:
                log.warning("The process that fetches small files has ended")
                self.close()

    def _answered(self, number: int, is_there: bool) -> None:
        self._asked.pop(number)(is_there)


def _wait_for(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def fork_fetch_process(
    volume: Volume, memory_bytes: int, leave: Sequence[int]
) -> FetchProcess | None:
    """Start the process; None where there are threads already, of which a fork takes the locks
    along, or where the system has no room for it. At most `memory_bytes` are shared. The
    descriptors of `leave` are the daemon's alone.
    """
    if threading.active_count() > 1:
        log.debug("Small files are fetched in this process, which has threads already")
        return None
    try:
        memory = SharedMemory(memory_bytes)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent_pid = os.getpid()
        pid = os.fork()
    except OSError as error:
        log.warning("Small files are fetched in this process", extra={"error": str(error)})
        return None
    if pid == 0:
        try:
            for descriptor in (*leave, ours.detach()):
                os.close(descriptor)
            for number in _LEFT_TO_THE_DAEMON:
                signal.signal(number, signal.SIG_IGN)
            if end_with_parent(parent_pid):
                _serve(volume, theirs, memory.view)
        finally:
            os._exit(1)
    theirs.close()
    ours.setblocking(False)
    return FetchProcess(pid, ours, memory)


def _serve(volume: Volume, questions: socket.socket, memory: memoryview) -> None:
    """Answer until the daemon has closed its end. Never returns."""
    # No thread and no client before they are needed: most mounts never are.
    select.select([questions], [], [])
    for _number in range(_MAX_FETCHES):
        threading.Thread(target=_fetch, args=(volume, questions, memory), daemon=True).start()
    threading.Event().wait()


def _fetch(volume: Volume, questions: socket.socket, memory: memoryview) -> None:
    # Every thread waits at the socket itself: a queue would cost a change of threads a file.
    wait_here()
    while question := questions.recv(_MAX_QUESTION_BYTES):
        number, path, version, start, end, offset = json.loads(question)
        target = memory[offset : offset + end - start]
        try:
            volume.read_into(path, ByteRange(start, end), target, version=version)
        except Exception:
            # Whoever reads there asks again and gets the error. No question may be left unanswered.
            log.debug("Read-ahead failed", exc_info=True, extra={"path": path})
            is_there = False
        else:
            is_there = True
        try:
            questions.send(_ANSWER.pack(number, is_there))
        except OSError:
            break
    os._exit(0)
