"""One generation of the daemon: gets the mount's descriptor from its supervisor, serves, and ends.
`main.py` calls this.

A generation starts with a handshake that no kernel sees. The kernel's saved INIT goes to libfuse
through a socket pair whose near end pyfuse3 takes for /dev/fuse. The first generation's answer is
improved and sent to the kernel; a successor's is dropped. Then the real descriptor is put in the
place of the near end with dup2, and a successor asks the kernel to repeat what its predecessor
left unanswered.
"""

from __future__ import annotations

import enum
import errno
import faulthandler
import logging
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import trio

from trainmount_files import Unavailable, VolumeError
from trainmount_fuse.adapter import (
    FuseAdapter,
    RememberedNames,
    open_session,
    serve_session,
    store_pages,
)
from trainmount_fuse.control.commands import Commands
from trainmount_fuse.control.server import serve_control
from trainmount_fuse.filesystem import Filesystem
from trainmount_fuse.lifetime import end_with_parent
from trainmount_fuse.memory import bound_allocator
from trainmount_fuse.reads.fetch_process import fork_fetch_process
from trainmount_fuse.session.exit_codes import (
    EXIT_AWAY,
    EXIT_CONFIGURATION,
    EXIT_ENDED,
    EXIT_REPLACED,
    EXIT_UNSENT,
)
from trainmount_fuse.session.init_reply import (
    InitRequest,
    KernelLimits,
    granted_limits,
    improved_reply,
    max_pages_limit,
)
from trainmount_fuse.session.stacks import describe_stacks
from trainmount_fuse.session.watchdog import HEARTBEAT_SECONDS
from trainmount_fuse.session.wire import decoded_init, receive, send, try_send
from trainmount_fuse.settings import MountSettings, SettingsError
from trainmount_fuse.source import open_source

__all__ = ["open_filesystem", "run_daemon", "settings_of"]

logger = logging.getLogger(__name__)

FUSE_NOTIFY_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)

HANDSHAKE_TIMEOUT_SECONDS: Final = 30.0
"""libfuse answers in milliseconds; later than this it never will."""

STORE_PATIENCE_SECONDS: Final = 5.0
"""How long a store may take to answer one request, asked at the end of a mount, before it counts as
away. Then neither a request in progress nor an upload comes to an end, and both keep their
bytes."""

MAX_REPLY_BYTES: Final = 4096


class _Reason(enum.Enum):
    """Why a generation ends."""

    UNMOUNTED = "the mount is gone"
    STOP = "told to stop"
    REPLACE = "told to make room for a successor"
    ORPHANED = "the supervisor is gone"


def run_daemon(
    control_fd: int, make_filesystem: Callable[[dict[str, Any]], Filesystem] | None = None
) -> int:
    """Serve the mount whose handover waits on the control socket; the exit code
    (session/exit_codes.py).

    `make_filesystem` opens what is served from a handover's configuration; `open_filesystem` where
    it is None.
    """
    _raise_descriptor_limit()
    bound_allocator()
    # Tells where each thread stands, also where the event loop does not move any more.
    faulthandler.register(signal.SIGQUIT)
    control = socket.socket(fileno=control_fd)
    message, fuse_fd = receive(control)
    if message is None or fuse_fd is None:
        # The supervisor ended, or keeps another daemon.
        return EXIT_REPLACED
    if not end_with_parent(message["parent_pid"]):
        # Nobody keeps the mount any more.
        return EXIT_REPLACED
    configuration = message["configuration"]
    os.environ.update(configuration.get("environment", {}))
    try:
        if make_filesystem is None:
            filesystem = open_filesystem(configuration, leave=(control_fd, fuse_fd))
        else:
            filesystem = make_filesystem(configuration)
    except (SettingsError, VolumeError) as error:
        logger.error("the mount's settings are wrong", extra={"reason": str(error)})
        return EXIT_CONFIGURATION
    # A filesystem that a caller made has no parts that commands know.
    settings = settings_of(configuration) if make_filesystem is None else None
    generation = _Generation(control, fuse_fd, decoded_init(message["init"]), filesystem, settings)
    for number in (signal.SIGTERM, signal.SIGUSR1):
        # What stands again when nobody listens any more: whoever ends already needs no telling.
        signal.signal(number, signal.SIG_IGN)
    return trio.run(generation.run, message["role"])


def settings_of(configuration: dict[str, Any]) -> MountSettings:
    """The settings of a handover's configuration. Raises SettingsError."""
    settings = configuration.get("settings")
    if isinstance(settings, str):
        return MountSettings.from_json(settings)
    return MountSettings.from_mapping(settings or {})


def open_filesystem(configuration: dict[str, Any], leave: Sequence[int] = ()) -> Filesystem:
    """The filesystem that a configuration describes, with this process's credentials.

    Forks: the child leaves the descriptors of `leave` to this process.
    """
    settings = settings_of(configuration)
    volume = open_source(settings)
    process = None
    if settings.prefetch_max_bytes:
        process = fork_fetch_process(volume, settings.memory_bytes, leave)
    return Filesystem(volume, settings, store_pages, process)


class _Generation:
    """The life of one daemon process."""

    def __init__(
        self,
        control: socket.socket,
        fuse_fd: int,
        init_request: bytes,
        filesystem: Filesystem,
        settings: MountSettings | None,
    ) -> None:
        """Commands are answered where there are `settings`."""
        self._control = control
        self._fuse_fd = fuse_fd
        self._init_request = init_request
        self._filesystem = filesystem
        self._settings = settings
        self._reason = _Reason.UNMOUNTED
        self._scope = trio.CancelScope()
        self._ends = trio.Event()

    async def run(self, role: str) -> int:
        # The number `near` is what pyfuse3 keeps; what stands behind it changes in _take_over.
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        near, far = pair[0].detach(), pair[1]
        adapter = FuseAdapter(self._filesystem)
        open_session(adapter, near)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._give_signs)
            with far:
                reply = await self._handshake(far)
            await self._filesystem.start()
            # Started before the supervisor hears of us, or its first signal would kill us.
            await nursery.start(self._heed_signals)
            nursery.start_soon(self._heed_supervisor)
            nursery.start_soon(self._end_without_the_store)
            limits = self._take_over(near, reply, role)
            send(self._control, {"state": "ready", "pid": os.getpid(), "kernel": limits})
            async with trio.open_nursery() as commands:
                if self._settings is not None:
                    kernel = RememberedNames(near)
                    answers = Commands(self._filesystem, adapter.requests, kernel)
                    commands.start_soon(serve_control, answers, self._settings)
                with self._scope:
                    await serve_session()
                # What they use is freed next.
                commands.cancel_scope.cancel()
            logger.info("the daemon ends", extra={"reason": self._reason.value})
            code = await self._finish()
            nursery.cancel_scope.cancel()
        return code

    async def _handshake(self, far: socket.socket) -> bytes:
        """Let libfuse answer the kernel's INIT; its answer."""
        far.send(self._init_request)
        with trio.fail_after(HANDSHAKE_TIMEOUT_SECONDS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_session)
                await trio.lowlevel.wait_readable(far)
                reply = far.recv(MAX_REPLY_BYTES)
                nursery.cancel_scope.cancel()
        return reply

    def _take_over(self, near: int, reply: bytes, role: str) -> dict[str, int | bool]:
        """Put the kernel where the handshake was; answer INIT or ask for what is unanswered.

        Returns what was agreed with the kernel.
        """
        request = InitRequest.parse(self._init_request)
        improved = improved_reply(reply, request, KernelLimits(), max_pages_limit())
        first = role == "first" and self._answer_init(improved)
        # A blocking read would stop the whole process where a request is taken back.
        os.set_blocking(self._fuse_fd, False)
        trio.lowlevel.notify_closing(near)
        os.dup2(self._fuse_fd, near, inheritable=False)
        os.close(self._fuse_fd)
        if not first:
            self._ask_again(near)
        logger.info("serving", extra={"role": "first" if first else "successor"})
        return granted_limits(improved)

    def _answer_init(self, reply: bytes) -> bool:
        """False where a predecessor answered before it died."""
        try:
            os.write(self._fuse_fd, reply)
        except FileNotFoundError:
            return False
        return True

    def _ask_again(self, fd: int) -> None:
        try:
            os.write(fd, FUSE_NOTIFY_RESEND)
        except OSError as error:
            if error.errno == errno.EINVAL:
                logger.warning(
                    "this kernel cannot repeat requests: some program may wait for ever; "
                    "unmount and mount again"
                )
            else:
                # The mount is gone; the first read will say so.
                logger.info("the mount ended meanwhile", extra={"errno": error.errno})

    async def _heed_signals(self, task_status: trio.TaskStatus[None]) -> None:
        reasons = {signal.SIGTERM: _Reason.STOP, signal.SIGUSR1: _Reason.REPLACE}
        with trio.open_signal_receiver(*reasons, signal.SIGUSR2) as received:
            task_status.started()
            async for number in received:
                reason = reasons.get(signal.Signals(number))
                if reason is None:
                    logger.info("stacks were asked for", extra={"stacks": describe_stacks()})
                else:
                    self._end(reason)

    async def _heed_supervisor(self) -> None:
        """The supervisor says nothing more; the socket's end is its death."""
        await trio.lowlevel.wait_readable(self._control)
        message, _ = receive(self._control)
        if message is None:
            # Whoever takes the mount next must not find us there too.
            logger.error("the supervisor is gone, so is this daemon")
            os._exit(EXIT_REPLACED)

    async def _give_signs(self) -> None:
        """Let the supervisor know that the event loop runs."""
        while True:
            try_send(self._control, {"state": "alive"})
            await trio.sleep(HEARTBEAT_SECONDS)

    def _end(self, reason: _Reason) -> None:
        self._reason = reason
        if reason is _Reason.STOP:
            self._ends.set()
        self._scope.cancel()

    async def _end_without_the_store(self) -> None:
        """Once the mount ends: do not wait for a store that is away, or that sends no bytes."""
        await self._ends.wait()
        while True:
            await trio.sleep(STORE_PATIENCE_SECONDS)
            # What was written gets more time; who reads on would not get far.
            self._filesystem.give_up_reads()
            with trio.move_on_after(STORE_PATIENCE_SECONDS) as waiting:
                try:
                    await self._filesystem.ask_store()
                except Unavailable:
                    break
                except (VolumeError, OSError) as error:
                    # It answers, so whatever waits for it comes to an end.
                    logger.info("the store refuses", extra={"reason": str(error)})
            if waiting.cancelled_caught:
                break
        logger.error("the mount ends while the store is away; what is unsent is kept")
        logging.shutdown()
        # Threads that wait for the store would keep the process.
        os._exit(EXIT_AWAY)

    async def _finish(self) -> int:
        if self._reason is _Reason.REPLACE:
            # What is written lies in the state directory; the successor goes on from there.
            return EXIT_REPLACED
        self._ends.set()
        try:
            await self._filesystem.stop()
        except OSError as error:
            logger.error("the mount ends with bytes only here", extra={"reason": error.strerror})
            return EXIT_UNSENT
        except Exception:
            logger.exception("the mount ended in a way nobody planned for")
            return EXIT_UNSENT
        return EXIT_ENDED


def _raise_descriptor_limit() -> None:
    """Each open file with local bytes takes a descriptor, each cached one, and each connection."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
