"""Read the kernel's FUSE_INIT and improve libfuse's answer to it; daemon.py calls this. Pure.

pyfuse3 offers no way to ask for parallel directory operations, more background requests or larger
reads, but its answer passes through our hands, so it is written there. The layout is `struct
fuse_init_in` and `struct fuse_init_out` of linux/fuse.h, each after its header of 40 and 16 bytes;
fields are only ever added at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

__all__ = ["InitRequest", "KernelLimits", "granted_limits", "improved_reply", "max_pages_limit"]

FUSE_INIT: Final = 26

MAX_PAGES: Final = 1 << 22
PARALLEL_DIROPS: Final = 1 << 18
HANDLE_KILLPRIV_V2: Final = 1 << 28
INIT_EXT: Final = 1 << 30
HAS_RESEND: Final = 1 << 39
"""Offered from Linux 6.9 on: the kernel understands FUSE_NOTIFY_RESEND."""

IN_HEADER = struct.Struct("<IIQQIIII")
OUT_HEADER = struct.Struct("<IiQ")
INIT_IN = struct.Struct("<IIIII")
INIT_OUT = struct.Struct("<IIIIHHIIHHII")

DEFAULT_MAX_PAGES: Final = 256
"""The kernel's limit before it became a setting (6.13), and that setting's default."""

DEFAULT_PAGES: Final = 32
"""Pages in one request where the two sides agreed on no other number."""

MAX_PAGES_LIMIT_FILE: Final = Path("/proc/sys/fs/fuse/max_pages_limit")

READ_AHEAD_CEILING_BYTES: Final = 1 << 30
"""The kernel takes the smaller of this and what the device's read_ahead_kb says, so this never
holds it back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelLimits:
    """What to ask of the kernel at the start of a session."""

    max_background: int = 1024
    """Requests in flight that no program waits for: read-ahead above all.

    12, the kernel's default, held a store with 20 ms latency to 176 MB/s; 64 gave 707. Far above
    that, so that readers whose store keeps silent do not use it up for those whose bytes are
    cached: each of them holds a few.
    """

    max_pages: int = 4096
    """Pages in one request, cut to the machine's fs.fuse.max_pages_limit. 4096 are 16 MiB."""

    parallel_directory_operations: bool = True
    """Lookups in one directory at the same time: 320 slow ones took 0.64 s instead of 7.26."""

    drop_privileges_here: bool = True
    """Take over clearing set-uid bits and capabilities of a file that is written.

    Otherwise the kernel asks for `security.capability` before every write, which doubles the
    requests. The mount is nosuid and has no such attribute, so there is nothing to clear.
    """

    @property
    def congestion_threshold(self) -> int:
        # The kernel's own proportion.
        return self.max_background * 3 // 4


@dataclass(frozen=True, kw_only=True, slots=True)
class InitRequest:
    """What the kernel offers."""

    unique: int
    major: int
    minor: int
    max_read_ahead_bytes: int
    flags: int
    """All 64 bits; the upper half is 0 from a kernel that does not know it."""

    @classmethod
    def parse(cls, message: bytes) -> Self:
        """Raises ValueError where `message` is not a FUSE_INIT request."""
        if len(message) < IN_HEADER.size + 16:
            raise ValueError(f"FUSE_INIT must have at least 56 bytes, got {len(message)}")
        length, opcode, unique = IN_HEADER.unpack_from(message)[:3]
        if opcode != FUSE_INIT or length != len(message):
            raise ValueError(f"not a FUSE_INIT request: opcode {opcode}, length {length}")
        padded = message.ljust(IN_HEADER.size + INIT_IN.size, b"\0")
        major, minor, read_ahead, flags, flags2 = INIT_IN.unpack_from(padded, IN_HEADER.size)
        upper = flags2 if flags & INIT_EXT else 0
        return cls(
            unique=unique,
            major=major,
            minor=minor,
            max_read_ahead_bytes=read_ahead,
            flags=flags | upper << 32,
        )

    @property
    def can_resend(self) -> bool:
        """The kernel repeats unanswered requests when asked, so a successor can take the session
        over."""
        return bool(self.flags & HAS_RESEND)


@dataclass(frozen=True, slots=True)
class _Reply:
    """`struct fuse_init_out` up to the field that matters here, in its order."""

    major: int
    minor: int
    max_readahead: int
    flags: int
    max_background: int
    congestion_threshold: int
    max_write: int
    time_gran: int
    max_pages: int
    map_alignment: int
    flags2: int
    max_stack_depth: int


def improved_reply(
    reply: bytes, request: InitRequest, limits: KernelLimits, pages_limit: int
) -> bytes:
    """libfuse's answer with `limits` written in, of what the kernel offered; nothing else changes.

    `pages_limit` is the machine's fs.fuse.max_pages_limit.

    Raises:
        ValueError: `reply` is not a successful answer to `request`.
    """
    if len(reply) < OUT_HEADER.size + INIT_OUT.size:
        raise ValueError(f"the answer to FUSE_INIT has {len(reply)} bytes")
    length, error, unique = OUT_HEADER.unpack_from(reply)
    if error or unique != request.unique or length != len(reply):
        raise ValueError(f"libfuse refused FUSE_INIT: error {error}, length {length}")
    old = _Reply(*INIT_OUT.unpack_from(reply, OUT_HEADER.size))
    new = replace(
        old,
        max_readahead=max(old.max_readahead, READ_AHEAD_CEILING_BYTES),
        max_background=limits.max_background,
        congestion_threshold=limits.congestion_threshold,
    )
    wanted = PARALLEL_DIROPS if limits.parallel_directory_operations else 0
    wanted |= HANDLE_KILLPRIV_V2 if limits.drop_privileges_here else 0
    new = replace(new, flags=new.flags | (request.flags & wanted))
    if old.flags & MAX_PAGES:
        new = replace(new, max_pages=max(1, min(limits.max_pages, pages_limit)))
    tail = reply[OUT_HEADER.size + INIT_OUT.size :]
    values = [getattr(new, name) for name in new.__dataclass_fields__]
    return reply[: OUT_HEADER.size] + INIT_OUT.pack(*values) + tail


def granted_limits(reply: bytes) -> dict[str, int | bool]:
    """What an answer to FUSE_INIT settles, for people who look at a mount."""
    values = _Reply(*INIT_OUT.unpack_from(reply, OUT_HEADER.size))
    return {
        "max_pages": values.max_pages if values.flags & MAX_PAGES else DEFAULT_PAGES,
        "max_background": values.max_background,
        "parallel_directory_operations": bool(values.flags & PARALLEL_DIROPS),
    }


def max_pages_limit() -> int:
    """The machine's limit on pages in one request."""
    try:
        return int(MAX_PAGES_LIMIT_FILE.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return DEFAULT_MAX_PAGES
