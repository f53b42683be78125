"""Where commands find a living mount of this user by a path in it. The holder registers, commands
look up.

One small JSON file a mount, named after the number of its device, which is the same in every mount
namespace that sees it. Nothing of the mount itself is touched, so a daemon that hangs makes no
command hang.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from trainmount_fuse.session.mounting import FILESYSTEM_TYPE, list_mounts, normalized
from trainmount_fuse.session.wire import connect

__all__ = [
    "MountRecord",
    "find_record",
    "list_records",
    "own_folder",
    "remove_record",
    "write_record",
]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MountRecord:
    """One mount that somebody keeps."""

    mountpoint: Path
    """Absolute, without symbolic links, as the holder's mount namespace has it."""

    source: str

    holder_pid: int

    device_minor: int

    holder_socket: Path
    """Takes the commands that concern the mount as such (session/commands.py)."""

    cache_dir: Path

    state_dir: Path

    uid: int = field(default_factory=os.getuid)
    """Whose mount it is."""

    def is_alive(self) -> bool:
        """A holder listens, even where it is stopped or busy."""
        try:
            connect(self.holder_socket, timeout_seconds=1.0).close()
        except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True
        return True


def find_record(path: Path) -> MountRecord | None:
    """The living mount that `path` lies in, of this user or, for root, of anybody; None where
    there is none.

    A mount whose name was taken away while copies of it are still used is found by that name.
    """
    target = normalized(path)
    found = None
    for mount in list_mounts():
        if mount.filesystem_type == FILESYSTEM_TYPE and target.is_relative_to(mount.path):
            found = mount
    alive = list_records()
    for record in alive:
        if found is not None and record.device_minor == found.device_minor:
            return record
    if found is None:
        for record in alive:
            if record.mountpoint == target:
                return record
    return None


def list_records() -> list[MountRecord]:
    """Every living mount of this user, and after them, for root, of the others; what dead holders
    left is removed."""
    found = []
    for folder, uid in _folders():
        for file in sorted(folder.glob("*.json")):
            record = _read(file, uid)
            if record is not None and record.is_alive():
                found.append(record)
            elif uid == os.getuid():
                remove_record(file)
    return found


def write_record(record: MountRecord) -> Path:
    """Let commands find a mount; the file, for `remove_record`. The holder listens already.

    Raises OSError.
    """
    file = record.holder_socket.with_suffix(".json")
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(record), default=str) + "\n", encoding="utf-8")
    temporary.replace(file)
    return file


def remove_record(file: Path) -> None:
    """Forget a mount and its socket. Safe to call again."""
    try:
        file.unlink(missing_ok=True)
        file.with_suffix(".sock").unlink(missing_ok=True)
    except OSError as error:
        logger.info("cannot remove what a mount left", extra={"path": file, "errno": error.errno})


def own_folder() -> Path:
    """Where this user's mounts register. Raises OSError where there is no place for it."""
    failure: OSError | None = None
    for folder in _candidates():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError as error:
            failure = error
    raise failure or PermissionError(f"{_candidates()[-1]} belongs to another user")


def _folders() -> Iterator[tuple[Path, int]]:
    """With the user to whom each belongs."""
    own = _candidates()
    for folder in own:
        if _is_ours(folder):
            yield folder, os.getuid()
    if os.getuid() == 0:
        others = [*Path("/run/user").glob("*/trainmount"), *Path("/tmp").glob("trainmount-*")]  # noqa: S108
        for folder in others:
            uid = _owner(folder)
            # Named after its owner, so that nobody can pretend to be another one.
            if folder not in own and uid is not None and str(uid) in folder.as_posix():
                yield folder, uid


def _candidates() -> list[Path]:
    """By the user's number alone: a command finds the mount whatever environment either was
    started with."""
    uid = os.getuid()
    first = Path("/run/trainmount") if uid == 0 else Path(f"/run/user/{uid}/trainmount")
    return [first, Path(f"/tmp/trainmount-{uid}")]  # noqa: S108 - its owner is checked


def _is_ours(folder: Path) -> bool:
    return _owner(folder) == os.getuid()


def _owner(folder: Path) -> int | None:
    """None where it is no directory."""
    try:
        status = folder.lstat()
    except OSError:
        return None
    return status.st_uid if stat.S_ISDIR(status.st_mode) else None


def _read(file: Path, uid: int) -> MountRecord | None:
    try:
        values = {**json.loads(file.read_text(encoding="utf-8")), "uid": uid}
        # A later version may know more of a mount; what is asked here stays.
        known = {one.name: values[one.name] for one in fields(MountRecord)}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name in ("mountpoint", "holder_socket", "cache_dir", "state_dir"):
        known[name] = Path(known[name])
    return MountRecord(**known)
