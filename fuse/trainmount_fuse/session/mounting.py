"""Mount and unmount a FUSE file system with our own hands; the holder and the CSI node plugin call
this.

Nothing here parses data of the mount or touches a path inside it: until a daemon answers, every
`stat` of a FUSE mount hangs, and after its death it fails. So all that is asked about a mount is
asked of /proc/self/mountinfo, by name.

MountError     the mount cannot be made or removed; `str()` is one line for a person
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import select
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NoReturn

from trainmount_fuse.session.fusermount import fusermount_mount, fusermount_unmount

__all__ = [
    "FILESYSTEM_TYPE",
    "READ_AHEAD_KIB",
    "FuseConnection",
    "MountError",
    "MountPoint",
    "abort",
    "check_device",
    "check_mountpoint",
    "connection_of",
    "find_mount",
    "list_mounts",
    "mount_fuse",
    "normalized",
    "read_ahead_kib",
    "set_read_ahead",
    "unmount",
]

logger = logging.getLogger(__name__)

FILESYSTEM_TYPE: Final = "fuse.trainmount"
"""What `mount` and /proc/self/mountinfo show as the type."""

CONTROL_FOLDER: Final = Path("/sys/fs/fuse/connections")

FUSE_DEVICE: Final = Path("/dev/fuse")

MIB: Final = 1 << 20

READ_AHEAD_KIB: Final = 1024
"""What the kernel reads ahead of a sequential reader, on its own; its default is 128. The daemon
puts what comes next into the pages of the kernel. With 16 MiB here the kernel asked for what was
about to be put there: 351 requests instead of 53, a fifth more processor time."""

INIT_BUFFER_BYTES: Final = MIB
"""The kernel refuses to deliver a request into a buffer below 8 KiB."""

MS_RDONLY, MS_NOSUID, MS_NODEV = 1, 2, 4
MNT_FORCE, MNT_DETACH = 1, 2

_MAX_LINKS: Final = 40
"""Symbolic links on one way, as in the kernel."""

_libc = ctypes.CDLL(None, use_errno=True)


class MountError(Exception):
    """The mount cannot be made or removed. One line that says what to do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FuseConnection:
    """A mounted FUSE connection, seen from the process that owns its descriptor."""

    fd: int
    """An open /dev/fuse. The connection ends when its last copy in any process is closed."""

    init_request: bytes
    """The kernel's FUSE_INIT as it was read, header included. Each daemon generation gets it
    replayed."""

    device_minor: int
    """The minor number of the mount's device; its name under /sys/fs/fuse/connections."""

    mountpoint: Path
    """Absolute, without symbolic links."""

    mounted_by: str = "mount(2)"
    """`fusermount3` for an ordinary user: then requests are smaller and read-ahead is 128 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MountPoint:
    """One line of /proc/self/mountinfo."""

    path: Path
    device_minor: int
    filesystem_type: str
    source: str
    options: str
    """Of the file system, as it tells them."""


def mount_fuse(
    mountpoint: Path,
    *,
    name: str,
    allow_other: bool,
    read_only: bool,
    max_read_bytes: int = MIB,
    default_permissions: bool = True,
) -> FuseConnection:
    """Mount at a directory and return the connection, whose INIT nobody has answered yet.

    `name` is what `mount` shows as the source. As root, and as root of a user and mount namespace,
    mount(2) is called directly; an ordinary user gets the descriptor from fusermount3 where that
    is installed. With `default_permissions` the kernel itself checks owner and mode of each file.

    Raises:
        MountError: no /dev/fuse, no permission, or the mountpoint is missing, not a directory or
        taken.
    """
    target = check_mountpoint(mountpoint)
    options = [f"max_read={max_read_bytes}"]
    options += ["allow_other"] if allow_other else []
    options += ["default_permissions"] if default_permissions else []
    fd = _open_device()
    mounted_by = "mount(2)"
    try:
        code = _mount(target, fd, name, options, read_only)
        if code in (errno.EPERM, errno.EACCES):
            mounted_by = "fusermount3"
            os.close(fd)
            fd = -1
            fd = _mount_through_fusermount(target, name, options, read_only)
        elif code:
            raise MountError(f"cannot mount at {target}: {os.strerror(code)}")
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return replace(_adopt(fd, target), mounted_by=mounted_by)


def unmount(mountpoint: Path, *, lazy: bool = False) -> None:
    """Remove the mount at `mountpoint`, by name. Fine where nothing is mounted.

    With `lazy` the name is free at once and open files go on until they are closed.

    Raises:
        MountError: the mount is in use, or this process may not unmount it.
    """
    target = normalized(mountpoint)
    # UMOUNT_NOFOLLOW is not asked for: the parent has no symbolic links any more.
    if _libc.umount2(os.fsencode(target), MNT_DETACH if lazy else 0) == 0:
        return
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        return
    if code == errno.EBUSY:
        raise MountError(f"cannot unmount {target}: a program has files or its directory there")
    if code == errno.EPERM:
        reason = fusermount_unmount(target, lazy=lazy)
        if reason is None:
            return
        raise MountError(f"cannot unmount {target}: {reason}")
    raise MountError(f"cannot unmount {target}: {os.strerror(code)}")


def check_device() -> None:
    """Raises MountError where this process cannot open /dev/fuse."""
    os.close(_open_device())


def read_ahead_kib(connection: FuseConnection) -> int | None:
    """What the kernel reads ahead on the mount; None where this process cannot see it."""
    try:
        return int(_read_ahead_knob(connection).read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _read_ahead_knob(connection: FuseConnection) -> Path:
    return Path(f"/sys/class/bdi/0:{connection.device_minor}/read_ahead_kb")


def set_read_ahead(connection: FuseConnection, kib: int) -> bool:
    """Let the kernel read `kib` KiB ahead in a sequentially read file; tells whether it took.

    The kernel's default is 128 KiB. The knob belongs to root of the machine, so elsewhere the
    answer is False.
    """
    try:
        _read_ahead_knob(connection).write_text(f"{kib}\n", encoding="ascii")
    except OSError as error:
        logger.info(
            "read-ahead of the mount stays at the kernel's default",
            extra={"mountpoint": str(connection.mountpoint), "errno": error.errno},
        )
        return False
    return True


def abort(connection: FuseConnection) -> bool:
    """End the connection at once: whatever waits on the mount gets an error instead of hanging.
    Tells whether it took.

    The mount itself stays, and answers ENOTCONN, so that nobody writes into the directory below it
    by mistake.
    """
    if _press_abort(CONTROL_FOLDER, connection) or _press_abort_on_a_mount_of_our_own(connection):
        return True
    # In a user namespace nobody may have the control file system. A forced unmount aborts first and
    # then also takes the name away, where no program uses it.
    return bool(_libc.umount2(os.fsencode(connection.mountpoint), MNT_FORCE) == 0)


def _press_abort(folder: Path, connection: FuseConnection) -> bool:
    try:
        (folder / str(connection.device_minor) / "abort").write_text("1\n", encoding="ascii")
    except OSError:
        return False
    return True


def _press_abort_on_a_mount_of_our_own(connection: FuseConnection) -> bool:
    """Containers often have no control file system at its usual place."""
    with tempfile.TemporaryDirectory(prefix="trainmount-") as name:
        if _libc.mount(b"fusectl", os.fsencode(name), b"fusectl", ctypes.c_ulong(0), None) != 0:
            return False
        try:
            return _press_abort(Path(name), connection)
        finally:
            _libc.umount2(os.fsencode(name), MNT_DETACH)


def is_over(connection: FuseConnection) -> bool:
    """Whether the mount is gone everywhere, so that no program waits for its daemon any more."""
    poll = select.poll()
    poll.register(connection.fd, 0)
    return bool(poll.poll(0))


def list_mounts() -> Iterator[MountPoint]:
    """Every mount that this process sees, in the order they were made; a later one at a path hides
    an earlier."""
    for line in (
        Path("/proc/self/mountinfo")
        .read_text(encoding="utf-8", errors="surrogateescape")
        .splitlines()
    ):
        head, _, tail = line.partition(" - ")
        fields, filesystem = head.split(" "), tail.split(" ")
        yield MountPoint(
            path=Path(_unescaped(fields[4])),
            device_minor=int(fields[2].partition(":")[2]),
            filesystem_type=filesystem[0],
            source=_unescaped(filesystem[1]),
            options=filesystem[2],
        )


def find_mount(mountpoint: Path) -> MountPoint | None:
    """The uppermost mount at exactly this path, or None; never looks into it."""
    target = normalized(mountpoint)
    found = None
    for mount in list_mounts():
        if mount.path == target:
            found = mount
    return found


def connection_of(mountpoint: Path, fd: int, init_request: bytes) -> FuseConnection:
    """The connection of a mount that is there already, for a process that got its descriptor back.

    Raises:
        MountError: nothing of ours is mounted at `mountpoint`.
    """
    mount = find_mount(mountpoint)
    if mount is None or not mount.filesystem_type.startswith("fuse"):
        raise MountError(f"nothing is mounted at {mountpoint}")
    return FuseConnection(
        fd=fd, init_request=init_request, device_minor=mount.device_minor, mountpoint=mount.path
    )


def normalized(mountpoint: Path) -> Path:
    """Absolute and without symbolic links. Nothing on a FUSE mount is looked at: its daemon may be
    dead or hang."""
    mountpoints = {one.path for one in list_mounts() if one.filesystem_type.startswith("fuse")}
    place = Path("/")
    left = _names(os.path.abspath(mountpoint))  # noqa: PTH100 - Path.absolute keeps ".."
    num_links = 0
    while left:
        name = left.pop()
        place = place.parent if name == ".." else place / name
        if place in mountpoints:
            return Path(os.path.normpath(place.joinpath(*reversed(left))))
        try:
            target = place.readlink()
        except OSError:
            # No link, or nothing at all.
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            return place
        place = Path("/") if target.is_absolute() else place.parent
        left += _names(target)
    return place


def _names(path: str | Path) -> list[str]:
    """The parts of a path, the last one first."""
    return [name for name in reversed(Path(path).parts) if name != "/"]


def check_mountpoint(mountpoint: Path) -> Path:
    """The directory to mount at, without symbolic links. Raises MountError where it cannot be."""
    target = normalized(mountpoint)
    _refuse_taken(target)
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        raise MountError(f"mountpoint {target} is missing: make the directory first") from None
    except OSError as error:
        raise MountError(f"mountpoint {target} cannot be looked at: {error.strerror}") from None
    if not stat.S_ISDIR(mode):
        raise MountError(f"mountpoint {target} is not a directory")
    return target


def _refuse_taken(target: Path) -> None:
    taken = find_mount(target)
    if taken is not None:
        raise MountError(
            f"mountpoint {target} is busy: {taken.source} is mounted there; "
            f"unmount it first (umount {target})"
        )


def _open_device() -> int:
    try:
        return os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        reason = (
            "is missing: load the module (modprobe fuse), or pass the device into the container"
        )
    except PermissionError:
        reason = (
            "may not be opened by this user: run as root, or give it mode 0666 as distributions do"
        )
    except OSError as error:
        reason = f"cannot be opened: {error.strerror}"
    raise MountError(f"{FUSE_DEVICE} {reason}")


def _mount(target: Path, fd: int, name: str, options: list[str], read_only: bool) -> int:
    """Call mount(2); 0 or the error number."""
    data = [
        f"fd={fd}",
        "rootmode=40000",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
        *options,
    ]
    flags = MS_NOSUID | MS_NODEV | (MS_RDONLY if read_only else 0)
    ok = _libc.mount(
        os.fsencode(name),
        os.fsencode(target),
        FILESYSTEM_TYPE.encode(),
        ctypes.c_ulong(flags),
        ",".join(data).encode(),
    )
    return 0 if ok == 0 else ctypes.get_errno()


def _mount_through_fusermount(target: Path, name: str, options: list[str], read_only: bool) -> int:
    answer = fusermount_mount(target, name, [*options, "ro" if read_only else "rw"])
    if isinstance(answer, int):
        return answer
    if "user_allow_other" in answer:
        raise MountError(
            "--allow-other is not open to ordinary users here: add the line user_allow_other to "
            "/etc/fuse.conf, or leave the option out"
        )
    raise MountError(
        f"not permitted to mount at {target}: run as root, or in a namespace of your own "
        f"(unshare -Urm), or install fuse3 ({answer})"
    )


def _adopt(fd: int, target: Path) -> FuseConnection:
    """Read INIT and find the device of a mount that was just made; undo it where that fails."""
    try:
        # mount(2) queues INIT before it returns, so this does not wait.
        init_request = os.read(fd, INIT_BUFFER_BYTES)
        return connection_of(target, fd, init_request)
    except BaseException as error:
        _undo(fd, target, error)


def _undo(fd: int, target: Path, error: BaseException) -> NoReturn:
    try:
        unmount(target, lazy=True)
    finally:
        os.close(fd)
    if isinstance(error, OSError):
        raise MountError(
            f"the kernel did not start a FUSE session at {target}: {error.strerror}"
        ) from error
    raise error


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)
