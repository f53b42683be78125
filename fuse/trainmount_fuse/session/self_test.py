"""Find out whether this kernel lets a successor take a mount over. The holder asks before it
mounts.

Kernels from 6.9 on say so in INIT. Here one is put to it: a directory is mounted, a program asks
for its attributes, the request is read and left unanswered as by a daemon that dies, the kernel is
asked to repeat it, and what comes is answered. Nothing of libfuse takes part, so it takes
milliseconds.
"""

from __future__ import annotations

import os
import select
import stat
import struct
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from trainmount_fuse.session.checks import told_by_child
from trainmount_fuse.session.init_reply import InitRequest
from trainmount_fuse.session.mounting import FuseConnection, MountError, mount_fuse, unmount

__all__ = ["takeover_fault", "takeover_fault_here"]

FUSE_GETATTR: Final = 3
ENOSYS: Final = 38
FUSE_NOTIFY_RESEND: Final = struct.pack("<IiQ", 16, 7, 0)

REQUEST_TIMEOUT_SECONDS: Final = 5.0
TEST_TIMEOUT_SECONDS: Final = 15.0
BUFFER_BYTES: Final = 1 << 17


def takeover_fault_here() -> str | None:
    """`takeover_fault` in a process of its own, which can be killed whatever it gets stuck in."""
    try:
        return told_by_child(takeover_fault, TEST_TIMEOUT_SECONDS)
    except TimeoutError as error:
        return f"the self-test did not end ({error})"


def takeover_fault() -> str | None:
    """None where a successor gets the requests of a dead daemon; otherwise in words why not."""
    with tempfile.TemporaryDirectory(prefix="trainmount-self-test-") as folder:
        mountpoint = Path(folder)
        try:
            connection = mount_fuse(
                mountpoint, name="trainmount-self-test", allow_other=False, read_only=True
            )
        except MountError as error:
            return str(error)
        try:
            return _fault_on(connection)
        except (OSError, TimeoutError) as error:
            return f"the kernel did not repeat a request ({error})"
        finally:
            unmount(mountpoint, lazy=True)
            # Ends whatever still waits on the mount.
            os.close(connection.fd)


def _fault_on(connection: FuseConnection) -> str | None:
    request = InitRequest.parse(connection.init_request)
    if not request.can_resend:
        return "the kernel is older than 6.9"
    reply = struct.pack("<7I", 7, min(request.minor, 31), 1 << 17, 0, 0, 1 << 16, 1)
    _answer(connection.fd, request.unique, reply.ljust(64, b"\0"))
    seen: list[os.stat_result] = []
    asker = threading.Thread(
        target=lambda: seen.append(connection.mountpoint.stat()), name="asker", daemon=True
    )
    asker.start()
    first = _next_getattr(connection.fd)
    os.write(connection.fd, FUSE_NOTIFY_RESEND)
    second = _next_getattr(connection.fd)
    _answer(connection.fd, second, _root_attributes())
    asker.join(REQUEST_TIMEOUT_SECONDS)
    if asker.is_alive() or not seen:
        return f"a repeated request could not be answered ({first}, {second})"
    return None


def _next_getattr(fd: int) -> int:
    """The number of the next GETATTR request; others are refused. Raises TimeoutError."""
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([fd], [], [], left)[0]:
            break
        message = os.read(fd, BUFFER_BYTES)
        _, opcode, unique = struct.unpack_from("<IIQ", message)
        if opcode == FUSE_GETATTR:
            return int(unique)
        os.write(fd, struct.pack("<IiQ", 16, -ENOSYS, unique))
    raise TimeoutError("no request within the time")


def _answer(fd: int, unique: int, payload: bytes) -> None:
    os.write(fd, struct.pack("<IiQ", 16 + len(payload), 0, unique) + payload)


def _root_attributes() -> bytes:
    """`struct fuse_attr_out` of an empty directory, valid for a second."""
    valid = struct.pack("<QII", 1, 0, 0)
    sizes_and_times = struct.pack("<6Q", 1, 0, 0, 0, 0, 0)
    mode = stat.S_IFDIR | 0o555
    rest = struct.pack("<10I", 0, 0, 0, mode, 2, os.getuid(), os.getgid(), 0, 4096, 0)
    return valid + sizes_and_times + rest
