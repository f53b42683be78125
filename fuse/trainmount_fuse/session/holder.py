"""`trainmount mount`: makes a mount, keeps its descriptor, and keeps a daemon on it until it is
unmounted or stopped.

Whatever can be wrong with what was asked is found before anything is mounted. Afterwards this
process never opens or looks at anything on its own mount: a request of its own that no daemon
answers could not be killed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trainmount_files import (
    FileStat,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    VolumeError,
)
from trainmount_fuse.session.handover import Handover
from trainmount_fuse.session.mounting import (
    FILESYSTEM_TYPE,
    FuseConnection,
    MountError,
    abort,
    find_mount,
    mount_fuse,
    normalized,
    set_read_ahead,
    unmount,
)
from trainmount_fuse.session.restarts import RestartBudget
from trainmount_fuse.session.self_test import takeover_fault_here
from trainmount_fuse.session.supervisor import STOP_SIGNALS, Ending, Supervisor, SupervisorOptions
from trainmount_fuse.settings import MountSettings
from trainmount_fuse.source import open_source

__all__ = ["HolderOptions", "check_volume", "hold"]

logger = logging.getLogger(__name__)

MAX_READ_BYTES: Final = 16 << 20
"""Upper bound for one read; fs.fuse.max_pages_limit and the session's max_pages lower it."""

PROBE_TIMEOUT_SECONDS: Final = 3.0
"""A dead connection answers at once."""

CHECK_TIMEOUT_SECONDS: Final = 30.0
"""Long enough for a token exchange and a slow store, short enough for a person who waits."""

_HINTS: Final[dict[type[VolumeError], str]] = {
    NotFound: "there is no such directory or volume",
    Unauthenticated: "the credentials are missing, wrong or expired: look at DATABRICKS_TOKEN",
    PermissionDenied: "this identity may not read it: ask for READ VOLUME and USE SCHEMA",
    Unavailable: "the store cannot be reached: look at DATABRICKS_HOST",
}

_PROBE: Final = """
import os, sys
try:
    os.statvfs(sys.argv[1])
except OSError as error:
    sys.exit(error.errno)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class HolderOptions:
    """One mount on this machine."""

    mountpoint: Path

    settings: MountSettings

    ready_file: Path | None = None
    """Gets `{"holder_pid", "daemon_pid", ...}` whenever a daemon answers, in one step; removed at
    the end."""

    read_ahead_kib: int = 16 * 1024
    """What the kernel reads ahead of a sequential reader; takes effect as root. At 16 MiB a cold
    sequential read went from 283 MB/s to 1.7 GB/s."""

    on_mounted: Callable[[], None] | None = None
    """Called once, when the first daemon answers."""

    self_test: Callable[[], str | None] = takeover_fault_here
    """Tells in words why a mount dies with its daemon on this machine; None where it survives."""

    environment: dict[str, str] = field(default_factory=dict, repr=False)
    """Added to the daemon's environment; may hold credentials."""

    supervisor: SupervisorOptions = field(default_factory=SupervisorOptions)


def hold(options: HolderOptions) -> int:
    """Mount and serve until the end; an exit code (exit_codes.py).

    Raises:
        MountError: nothing is mounted then.
    """
    settings = options.settings
    if settings.cache_dir == settings.state_dir:
        raise MountError("the cache and the state need two folders (--cache-dir, --state-dir)")
    check_volume(settings)
    with ExitStack() as stack:
        for folder in (settings.state_dir, settings.cache_dir):
            stack.enter_context(_locked(folder))
        _remove_dead_mount(options.mountpoint)
        fault = options.self_test()
        # A stop that comes in between would leave a mount without a server. The supervisor lets it
        # through.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, STOP_SIGNALS)
        connection = _mount(options)
        logger.info("mounted", extra={"death_of_a_daemon_costs": fault or "nothing"})
        return _Holder(options, connection, can_take_over=fault is None).run()


def check_volume(settings: MountSettings, timeout_seconds: float = CHECK_TIMEOUT_SECONDS) -> None:
    """Raises MountError where the source is not a directory that this identity may look at, or no
    answer comes."""
    source = settings.source
    answers: queue.SimpleQueue[FileStat | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            volume = open_source(settings)
            try:
                found = volume.stat("")
                if not volume.capabilities.keeps_directories:
                    # Of a bucket the root is there unasked.
                    volume.list_page("")
                answers.put(found)
            finally:
                volume.close()
        except Exception as error:
            answers.put(error)

    # In a thread, because a volume keeps trying for longer than a person in front of a terminal
    # waits.
    threading.Thread(target=ask, name="check-volume", daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_seconds)
    except queue.Empty:
        raise MountError(
            f"cannot mount {source}: the store gave no answer in {timeout_seconds:g} s"
        ) from None
    if isinstance(answer, VolumeError):
        hint = next((text for kind, text in _HINTS.items() if isinstance(answer, kind)), None)
        reason = answer.reason if hint is None else f"{hint} ({answer.reason})"
        raise MountError(f"cannot mount {source}: {reason}") from answer
    if isinstance(answer, Exception):
        raise answer
    if not answer.is_directory:
        raise MountError(f"cannot mount {source}: it is a file, a directory is needed")


class _Holder:
    """A mount that was made. Its name, its descriptor and its supervisor live as long as this."""

    def __init__(
        self, options: HolderOptions, connection: FuseConnection, *, can_take_over: bool
    ) -> None:
        self._options = options
        self._connection = connection
        self._can_take_over = can_take_over
        self._budget = RestartBudget()
        self._on_mounted = options.on_mounted

    def run(self) -> int:
        try:
            ending = self._serve()
            while ending is Ending.LOST:
                ending = self._remount()
        except BaseException:
            # Nothing of ours answers any more, so nobody shall wait.
            abort(self._connection)
            raise
        finally:
            if self._options.ready_file is not None:
                self._options.ready_file.unlink(missing_ok=True)
        if ending in (Ending.ENDED, Ending.UNSENT):
            self._clear()
        else:
            self._give_up()
        return ending.exit_code

    def _serve(self) -> Ending:
        # Handles of another mount must not be taken for this one's.
        settings = replace(self._options.settings, mount_id=uuid.uuid4().hex)
        handover = Handover(
            fd=self._connection.fd,
            init_request=self._connection.init_request,
            role="first",
            configuration={
                "settings": json.loads(settings.to_json()),
                "environment": self._options.environment,
            },
        )
        options = replace(self._options.supervisor, can_take_over=self._can_take_over)
        supervisor = Supervisor(
            handover,
            options,
            self._budget,
            on_ready=self._note_ready,
            release_mount=self._release,
        )
        return supervisor.run()

    def _remount(self) -> Ending:
        """Where no successor can take over: a new mount at the same place. Open files are lost,
        new ones work."""
        delay_seconds = self._budget.delay_after_death(was_ready=True)
        if delay_seconds is None:
            return Ending.GAVE_UP
        logger.warning("mounting again; programs that had files open get an error")
        self._clear()
        self._connection = _mount(self._options)
        return self._serve()

    def _note_ready(self, daemon_pid: int) -> None:
        set_read_ahead(self._connection, self._options.read_ahead_kib)
        if self._options.ready_file is not None:
            document = {
                "holder_pid": os.getpid(),
                "daemon_pid": daemon_pid,
                "mountpoint": str(self._connection.mountpoint),
                "survives_daemon": self._can_take_over,
            }
            _write_whole(self._options.ready_file, document)
        if self._on_mounted is not None:
            self._on_mounted()
            self._on_mounted = None

    def _release(self) -> None:
        try:
            unmount(self._connection.mountpoint)
        except MountError as error:
            logger.info("the mount is still used", extra={"reason": str(error)})

    def _clear(self) -> None:
        """Free the name; whoever still has files open there gets an error, because nobody serves
        them."""
        if self._is_mounted():
            unmount(self._connection.mountpoint, lazy=True)
        os.close(self._connection.fd)

    def _give_up(self) -> None:
        # The dead mount stays at its name. Without it programs would write into the directory
        # below, and nobody would notice.
        # Closing the last descriptor aborts the connection.
        os.close(self._connection.fd)
        logger.error(
            "the mount is dead and has to be unmounted by hand",
            extra={"command": f"umount {self._connection.mountpoint}"},
        )

    def _is_mounted(self) -> bool:
        mount = find_mount(self._connection.mountpoint)
        return mount is not None and mount.device_minor == self._connection.device_minor


def _mount(options: HolderOptions) -> FuseConnection:
    settings = options.settings
    return mount_fuse(
        options.mountpoint,
        name=settings.source,
        allow_other=settings.allow_other,
        read_only=settings.read_only,
        max_read_bytes=MAX_READ_BYTES,
    )


def _remove_dead_mount(mountpoint: Path) -> None:
    """Free the name of a mount whose holder was killed. The caller has the lock of its state, so
    nobody serves it."""
    mount = find_mount(mountpoint)
    if mount is not None and mount.filesystem_type == FILESYSTEM_TYPE and _is_aborted(mountpoint):
        logger.info("removing a dead mount", extra={"mountpoint": str(mountpoint)})
        unmount(mountpoint, lazy=True)


def _is_aborted(mountpoint: Path) -> bool:
    """Whether a mount answers ENOTCONN; asked by a child, since a mount that hangs does not answer
    at all."""
    command = [sys.executable, "-S", "-c", _PROBE, os.fspath(normalized(mountpoint))]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        return child.wait(timeout=PROBE_TIMEOUT_SECONDS) == errno.ENOTCONN
    except subprocess.TimeoutExpired:
        child.kill()
        return False


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder of this mount's and hold it; raises MountError where another mount has it."""
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(f"cannot use {folder}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MountError(
                f"{folder} belongs to a mount that is there; name another one"
            ) from None
        yield
    finally:
        os.close(fd)


def _write_whole(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document) + "\n", encoding="utf-8")
    temporary.replace(path)
