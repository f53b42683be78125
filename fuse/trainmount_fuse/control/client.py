"""Commands on mounts of this machine: which mount a path means, what its daemon says. Called by
`command_line` here and by `trainmount_cli`.

Nothing looks into a mount: its socket is found by the mountpoint's name, so that a daemon that
hangs makes no command hang but the one that waits for its answer.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.control.protocol import (
    CONTROL_SOCKET,
    ControlError,
    WrongName,
    control_address,
    request_messages,
)
from trainmount_fuse.session.registry import MountRecord, find_record, list_records
from trainmount_fuse.session.wire import connect, receive, send

__all__ = [
    "Answer",
    "DaemonEnded",
    "Mount",
    "NoDaemon",
    "Note",
    "ask",
    "find_mount",
    "group_by_mount",
    "list_mounts",
]

Note = Callable[[Mapping[str, Any]], None]
"""Gets each message of a daemon before its last one."""

_CONNECT_SECONDS: Final = 10.0
"""A daemon that is replaced listens again within a second."""

_RETRY_SECONDS: Final = 0.1

_MAX_REPEATS: Final = 20
"""Daemons that may end while one command is asked for."""


class DaemonEnded(ControlError):
    """The daemon died, or was replaced, before it had answered."""


class NoDaemon(ControlError):
    """Nobody answers for the mount, and nobody has come to for a while."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount as commands reach it."""

    mountpoint: Path
    source: str
    address: Path
    record: MountRecord | None
    """What its holder registered; None where its socket was named, as in a mount pod, where nobody
    registers."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a daemon said."""

    result: dict[str, Any]

    failed: list[dict[str, str]]
    """What could not be done: `path` and `reason`."""

    files: list[dict[str, Any]]
    text: str


def list_mounts() -> list[Mount]:
    """Every mount of this user, by mountpoint."""
    found = [_mount(record) for record in list_records()]
    return sorted(found, key=lambda mount: mount.mountpoint)


def find_mount(mountpoint: Path | None) -> Mount:
    """The mount at a path or above it, or behind a `control.sock`; the only one there is for None.

    Raises:
        WrongName: there is none, or there are several.
    """
    if mountpoint is not None and mountpoint.name == CONTROL_SOCKET:
        return Mount(mountpoint, "", mountpoint, None)
    mounts = list_mounts()
    if mountpoint is not None:
        path = _unlinked(os.path.abspath(mountpoint), mounts)  # noqa: PTH100 - keeps ".." of links
        found = [mount for mount in mounts if _below(str(mount.mountpoint), path) is not None]
        if found:
            return max(found, key=lambda mount: len(mount.mountpoint.parts))
        record = find_record(mountpoint)
        if record is None:
            raise WrongName(f"{mountpoint}: no mount of yours is there; see trainmount status")
        return _mount(record)
    if not mounts:
        raise WrongName("nothing is mounted; mount with: trainmount mount SOURCE MOUNTPOINT")
    if len(mounts) > 1:
        raise WrongName(f"name the mount, there are several: {_names(mounts)}")
    return mounts[0]


def group_by_mount(patterns: Sequence[str], mount: Mount | None) -> list[tuple[Mount, list[str]]]:
    """Which mount each pattern is of, and what it is below the volume's root.

    A pattern is a path on a mount, a path in the volume (`/Volumes/...`, `s3://...`), or relative:
    to the working directory where that is on a mount, else to the volume's root.

    Raises:
        WrongName: no mount has it.
    """
    mounts = [mount] if mount is not None else list_mounts()
    grouped: dict[Path, tuple[Mount, list[str]]] = {}
    for pattern in patterns:
        owner, rest = _owner(pattern, mounts)
        grouped.setdefault(owner.address, (owner, []))[1].append(rest)
    return list(grouped.values())


def ask(
    mount: Mount,
    request: str,
    patterns: Sequence[str] = (),
    *,
    note: Note = lambda _message: None,
    timeout_seconds: float | None = None,
    may_repeat: bool = False,
) -> Answer:
    """Ask a mount's daemon for something and wait for the end of it; leaving (an exception, Ctrl-C)
    ends it there too.

    `timeout_seconds` is for each message. With `may_repeat` a daemon that ends meanwhile is no
    failure: its successor is asked again.

    Raises:
        ControlError: it cannot be done. NoDaemon: nobody answers. DaemonEnded: nobody does any
        more, or several daemons in a row have died of it.
    """
    for _ in range(_MAX_REPEATS if may_repeat else 0):
        try:
            return _ask_once(mount, request, patterns, note, timeout_seconds)
        except DaemonEnded:
            continue
    return _ask_once(mount, request, patterns, note, timeout_seconds)


def _ask_once(
    mount: Mount,
    request: str,
    patterns: Sequence[str],
    note: Note,
    timeout_seconds: float | None,
) -> Answer:
    answer = Answer({}, [], [], "")
    pieces: list[str] = []
    with _connected(mount) as peer:
        peer.settimeout(timeout_seconds)
        try:
            for message in request_messages(request, patterns):
                send(peer, message)
            while True:
                received, _ = receive(peer)
                if received is None:
                    raise ConnectionResetError
                if "result" in received:
                    result = received["result"]
                    return Answer(result, answer.failed, answer.files, "".join(pieces))
                if "error" in received:
                    raise ControlError(f"{mount.mountpoint}: {received['error']}")
                if "failed" in received:
                    answer.failed.append(received["failed"])
                elif "file" in received:
                    answer.files.append(received["file"])
                elif "text" in received:
                    pieces.append(received["text"])
                note(received)
        except TimeoutError:
            raise ControlError(
                f"{mount.mountpoint}: the mount's daemon has not answered for {timeout_seconds:g} s"
            ) from None
        except OSError as error:
            raise DaemonEnded(
                f"{mount.mountpoint}: the mount's daemon ended before it had done it; "
                "its successor can be asked again"
            ) from error


def _connected(mount: Mount) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            peer = connect(mount.address, _CONNECT_SECONDS)
        except PermissionError:
            raise ControlError(f"{mount.mountpoint}: belongs to another user") from None
        except OSError as error:
            is_kept = mount.record is None or mount.record.is_alive()
            if time.monotonic() > deadline or not is_kept:
                raise NoDaemon(f"{mount.mountpoint}: no daemon of the mount answers") from error
            time.sleep(_RETRY_SECONDS)
        else:
            return peer


def _mount(record: MountRecord) -> Mount:
    return Mount(record.mountpoint, record.source, control_address(record.state_dir), record)


def _owner(pattern: str, mounts: Sequence[Mount]) -> tuple[Mount, str]:
    if not mounts:
        raise WrongName("nothing is mounted; mount with: trainmount mount SOURCE MOUNTPOINT")
    volume_path = pattern.removeprefix("dbfs:")
    is_whole = "://" in pattern or pattern.startswith("/")
    path = pattern if is_whole else f"{_working_directory()}/{pattern}"
    # As a shell means "./a" and "../a"; a daemon takes neither.
    path = _unlinked(os.path.normpath(path) if path.startswith("/") else path, mounts)
    best_length, best = -1, list[tuple[Mount, str]]()
    for mount in mounts:
        places = [(str(mount.mountpoint), path)]
        if mount.source:
            places.append((mount.source.rstrip("/"), volume_path))
        for root, whole in places:
            rest = _below(root, whole)
            if rest is not None and len(root) >= best_length:
                best = [(mount, rest)] if len(root) > best_length else [*best, (mount, rest)]
                best_length = len(root)
    if len(best) > 1:
        names = _names([mount for mount, _ in best])
        raise WrongName(f"{pattern}: name the mount (--mount), several have it: {names}")
    if best:
        return best[0]
    if is_whole:
        raise WrongName(f"{pattern}: is on no mount of yours; see trainmount status")
    if len(mounts) > 1:
        raise WrongName(f"{pattern}: name the mount (--mount), there are several: {_names(mounts)}")
    return mounts[0], os.path.normpath(pattern)


def _names(mounts: Sequence[Mount]) -> str:
    return ", ".join(str(mount.mountpoint) for mount in mounts)


def _unlinked(path: str, mounts: Sequence[Mount]) -> str:
    """The path without symbolic links on the way to a mount; nothing on a mount is looked at."""
    mountpoints = {str(mount.mountpoint) for mount in mounts}
    names = path.split("/")
    if names[0]:
        return path
    place = "/"
    for number, name in enumerate(names):
        if place in mountpoints:
            return "/".join([place, *names[number:]])
        place = os.path.join(place, name)  # noqa: PTH118 - "" is kept
        if place not in mountpoints:
            place = os.path.realpath(place)
    return place


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        # Removed, or on a mount that is dead.
        return "/"


def _below(root: str, path: str) -> str | None:
    path = path.rstrip("/") or "/"
    if path == root:
        return ""
    prefix = root if root.endswith("/") else f"{root}/"
    return path[len(prefix) :] if path.startswith(prefix) else None
