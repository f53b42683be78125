"""What can be wrong with a mount before there is one. Called by the holder, and by a daemon that is
to take over a mount with other settings.

MountError is raised everywhere: one line that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import queue
import select
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from trainmount_files import (
    FileStat,
    NotFound,
    PermissionDenied,
    Unauthenticated,
    Unavailable,
    VolumeError,
)
from trainmount_files.files_api.sdk import Credentials
from trainmount_fuse.session.mounting import MountError, find_mount, list_mounts, normalized
from trainmount_fuse.session.registry import list_records
from trainmount_fuse.settings import MountSettings, parse_address
from trainmount_fuse.source import look_at_root, open_source

__all__ = [
    "check_folders",
    "check_metrics_port",
    "check_places",
    "check_ready_file",
    "check_volume",
    "check_volume_aside",
    "lock_folder",
    "told_by_child",
]

logger = logging.getLogger(__name__)

CHECK_TIMEOUT_SECONDS: Final = 30.0
"""Long enough for a token exchange and a slow store, short enough for a person who waits."""

EARLY_SECONDS: Final = 4.0
"""When a store that gave no answer yet is looked at more closely: a volume retries what will not
get better by that, like a wrong name of the host."""

CONNECT_SECONDS: Final = 3.0

ENDING_SECONDS: Final = 3.0
"""How long a mount that was just unmounted, or whose holder died, may take to end."""

_HINTS: Final[dict[type[VolumeError], str]] = {
    NotFound: "there is no such directory or volume",
    Unauthenticated: "the credentials are missing, wrong or expired: look at DATABRICKS_TOKEN",
    PermissionDenied: "this identity may not read it: ask for READ VOLUME and USE SCHEMA",
    Unavailable: "the store cannot be reached: look at DATABRICKS_HOST",
}

_BUCKET_HINTS: Final[dict[type[VolumeError], str]] = {
    Unauthenticated: "the credentials are missing, wrong or expired: look at the cloud's variables "
    "(AWS_ACCESS_KEY_ID and its like)",
    PermissionDenied: "this identity may not read it: ask for the right to list and read",
    Unavailable: "the store cannot be reached: look at --endpoint and --region",
}
"""Where they are others than for volumes."""


def check_volume(settings: MountSettings, timeout_seconds: float = CHECK_TIMEOUT_SECONDS) -> None:
    """Raises MountError where the source is not a directory that this identity may look at, or no
    answer comes."""
    source = settings.source
    answers: queue.SimpleQueue[FileStat | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            volume = open_source(settings)
            try:
                answers.put(look_at_root(volume))
            finally:
                volume.close()
        except Exception as error:
            answers.put(error)

    # In a thread, because a volume keeps trying for longer than a person in front of a terminal
    # waits.
    threading.Thread(target=ask, name="check-volume", daemon=True).start()
    answer = _first(answers, timeout_seconds, settings)
    if isinstance(answer, VolumeError):
        hints = _HINTS if source.startswith("/") else {**_HINTS, **_BUCKET_HINTS}
        hint = next((text for kind, text in hints.items() if isinstance(answer, kind)), None)
        reason = answer.reason if hint is None else f"{hint} ({answer.reason})"
        raise MountError(f"cannot mount {source}: {reason}") from answer
    if isinstance(answer, Exception):
        raise answer
    if not answer.is_directory:
        raise MountError(f"cannot mount {source}: it is a file, a directory is needed")


def _first(
    answers: queue.SimpleQueue[FileStat | Exception],
    timeout_seconds: float,
    settings: MountSettings,
) -> FileStat | Exception:
    """The first answer. Raises MountError where none comes, early where the reason is plain."""
    cannot = f"cannot mount {settings.source}"
    early_seconds = min(EARLY_SECONDS, timeout_seconds)
    try:
        return answers.get(timeout=early_seconds)
    except queue.Empty:
        if settings.source.startswith("/"):
            reason = _connection_fault(settings)
            if reason is not None:
                raise MountError(f"{cannot}: {_HINTS[Unavailable]} ({reason})") from None
    try:
        return answers.get(timeout=timeout_seconds - early_seconds)
    except queue.Empty:
        raise MountError(
            f"{cannot}: the store gave no answer in {timeout_seconds:g} s: look at its address and "
            "the network"
        ) from None


def _connection_fault(settings: MountSettings) -> str | None:
    """Why no connection to the workspace can be made; None where one can, or nobody knows."""
    try:
        address = urlsplit(Credentials(profile=settings.profile or None).host)
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), CONNECT_SECONDS).close()
    except VolumeError:
        return None
    except (OSError, ValueError) as error:
        return f"{address.netloc}: {getattr(error, 'strerror', None) or error}"
    return None


def check_volume_aside(settings: MountSettings) -> None:
    """`check_volume` in a child, which takes along what a client library brings: 50 MiB where
    tokens are exchanged."""

    def fault() -> str | None:
        try:
            check_volume(settings)
        except MountError as error:
            return str(error)
        return None

    try:
        told = told_by_child(fault, 2 * CHECK_TIMEOUT_SECONDS)
    except TimeoutError as error:
        told = f"cannot mount {settings.source}: the look at it failed ({error})"
    if told is not None:
        raise MountError(told)


def check_places(settings: MountSettings, mountpoint: Path) -> None:
    """Raises MountError where the mount would hide its own folders or what is in the mountpoint, or
    show itself in itself, and where a mount is that somebody keeps."""
    target = normalized(mountpoint)
    folders = {"--cache-dir": settings.cache_dir, "--state-dir": settings.state_dir}
    resolved = {option: folder.resolve() for option, folder in folders.items()}
    if resolved["--cache-dir"] == resolved["--state-dir"]:
        raise MountError("the cache and the state need two folders (--cache-dir, --state-dir)")
    for option, folder in resolved.items():
        if folder.is_relative_to(target):
            raise MountError(f"{folder} lies inside the mountpoint: name another one ({option})")
        if target.is_relative_to(folder):
            raise MountError(
                f"mountpoint {target} lies inside a folder of the mount itself: name another one "
                f"({option})"
            )
    taken = find_mount(mountpoint)
    if taken is not None and any(
        record.device_minor == taken.device_minor for record in list_records()
    ):
        raise MountError(
            f"mountpoint {target} is busy: {taken.source} is mounted there; unmount it first "
            f"(trainmount unmount {target}), or change its options (trainmount remount)"
        )
    with contextlib.suppress(OSError):
        # One that is missing or unreadable is told by whoever mounts.
        if taken is None and any(target.iterdir()):
            raise MountError(
                f"mountpoint {target} is not empty, and the mount would hide what is in it: name "
                "an empty directory"
            )
    if settings.source.startswith("file://"):
        source = Path(settings.source.removeprefix("file://")).resolve()
        if target.is_relative_to(source):
            raise MountError(f"mountpoint {target} lies inside {source}, which it would show")


def check_ready_file(file: Path) -> None:
    """Raises MountError where the file cannot be made."""
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".check-"):
            pass
    except OSError as error:
        reason = (error.strerror or "failed").lower()
        raise MountError(
            f"cannot write {file}: {reason}; name another file (--ready-file)"
        ) from error


def check_folders(settings: MountSettings) -> None:
    """Make the folders of the cache and of the state where they are missing.

    Raises MountError where they cannot be written.
    """
    folders = {"--cache-dir": settings.cache_dir, "--state-dir": settings.state_dir}
    for option, folder in folders.items():
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".check-") as file:
                file.write(b"?")
                file.flush()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                # It is room for reading, and others may give some back.
                logger.warning("no room is left for what is written", extra={"folder": str(folder)})
                continue
            raise _unusable(folder, error, option) from error


def check_metrics_port(settings: MountSettings) -> None:
    """Raises MountError where Prometheus cannot be answered at the address that the settings name,
    if they name one. Waits a while for a mount that is just ending.
    """
    if not settings.metrics_address:
        return
    host, port = parse_address(settings.metrics_address)
    deadline = time.monotonic() + ENDING_SECONDS
    while (error := _refusal_of(host, port)) is not None:
        if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
            time.sleep(0.1)
            continue
        reason = (error.strerror or "failed").lower()
        raise MountError(
            f"cannot answer Prometheus at {host}:{port}: {reason}; name another port "
            "(--metrics-port), or end the program that has it"
        ) from error


def _refusal_of(host: str, port: int) -> OSError | None:
    """Why nobody can listen there; None where everybody can. As the daemon does, at each address
    of the host.
    """
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            with socket.socket(family, kind, protocol) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
                # Two may be bound to a port, but one alone can listen.
                listener.listen()
    except OSError as error:
        return error
    return None


def lock_folder(folder: Path) -> int:
    """Make the folder of a mount's state and hold it until the descriptor is closed.

    Waits a while for a mount that is just ending. Raises MountError where another mount has it.
    """
    lock = folder.with_name(f"{folder.name}.lock")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error, "--state-dir") from error
    try:
        deadline = time.monotonic() + ENDING_SECONDS
        while not _try_lock(fd):
            if time.monotonic() > deadline or _is_mounted(_owner(fd)):
                raise MountError(
                    f"{folder} belongs to a mount that is there (process {_owner(fd)}); "
                    "name another folder, or unmount that one"
                )
            time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _unusable(folder: Path, error: OSError, option: str) -> MountError:
    reason = (error.strerror or "failed").lower()
    return MountError(f"cannot use {folder}: {reason}; name another folder ({option})")


def told_by_child(function: Callable[[], str | None], timeout_seconds: float) -> str | None:
    """What a function says, run in a fork: whatever it gets stuck in or imports, this process does
    not.

    Raises:
        TimeoutError: it did not end in time, or died.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _tell(function, writer)
    os.close(writer)
    pidfd = os.pidfd_open(pid)
    try:
        with open(reader, "rb") as answers:  # noqa: PTH123 - a descriptor
            if not select.select([answers], [], [], timeout_seconds)[0]:
                raise TimeoutError(f"no end within {timeout_seconds:g} s")
            said, end, text = answers.read().partition(b"\0")
        if not end:
            raise TimeoutError("it died")
        return text.decode(errors="surrogateescape") if said == b"told" else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        # One that hangs inside the kernel stays for as long as that lasts.
        if select.select([pidfd], [], [], 1.0)[0]:
            os.waitpid(pid, 0)
        os.close(pidfd)


def _tell(function: Callable[[], str | None], writer: int) -> None:
    """Never returns."""
    try:
        # Locks are the parent's.
        os.closerange(3, writer)
        os.closerange(writer + 1, os.sysconf("SC_OPEN_MAX"))
        answer = function()
        text = (answer or "").encode(errors="surrogateescape")
        with open(writer, "wb") as answers:
            answers.write((b"nothing\0" if answer is None else b"told\0") + text)
    except Exception:
        logger.exception("a check ended in a way nobody planned for")
    finally:
        logging.shutdown()
        os._exit(0)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_mounted(holder_pid: str) -> bool:
    """Whether the mount of a process is still where it was made, so that it will not end soon."""
    minors = {mount.path: mount.device_minor for mount in list_mounts()}
    return any(
        minors.get(record.mountpoint) == record.device_minor
        for record in list_records()
        if str(record.holder_pid) == holder_pid
    )


def _owner(fd: int) -> str:
    """The process that has the lock."""
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
