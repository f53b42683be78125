"""What the local Files API server can be told; made by `__main__`, `trainmount serve` and tests."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainmount_files.volume import MIB

__all__ = ["ServerSettings", "parse_volume_name"]

GIB: Final = 1 << 30

# Unity Catalog's own rule for the names of catalogs, schemas and volumes.
_OBJECT_NAME: Final = re.compile(r"[^\x00-\x20./\x7f]{1,255}")


def parse_volume_name(name: str) -> tuple[str, str, str]:
    """Split `catalog.schema.volume`. Raises ValueError with one clear line."""
    parts = name.split(".")
    if len(parts) != 3 or not all(_OBJECT_NAME.fullmatch(part) for part in parts):
        raise ValueError(f"volume must be CATALOG.SCHEMA.VOLUME, got {name!r}")
    return parts[0], parts[1], parts[2]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The server's options."""

    directory: Path
    """Holds the volumes as `CATALOG/SCHEMA/VOLUME`. Must exist. The server keeps its own state in
    `.trainmount` there.
    """

    token: str = field(repr=False)
    """The bearer token that every call but a presigned one must carry."""

    host: str = "127.0.0.1"
    """Address to listen at. The wire is plain HTTP, so anything but loopback needs a network that
    is trusted.
    """

    port: int = 0
    """0 takes a free one."""

    volumes: tuple[str, ...] = ()
    """`catalog.schema.volume` names whose directories are made at start."""

    faults: Path | None = None
    """JSON file with faults to inject; read again whenever it changes."""

    admin: bool = False
    """Serve `/admin/faults` and `/admin/statistics`. Off, since it can break every client."""

    fsync: bool = True
    """Whether a write is on the disk before it is acknowledged. False is faster and loses the
    newest files in a power cut.
    """

    min_part_bytes: int = 5 * MIB
    """Smallest part of an upload, but for its last; object stores refuse less, so that is the
    default here too.
    """

    max_put_bytes: int = 5 * GIB
    """Largest body of one request; the service's own limit."""

    upload_lifetime_seconds: float = 24 * 3600.0
    """An upload that is older is dropped with everything it stored."""

    num_threads: int = 16
    """Threads that touch the disk; the event loop itself asks only for what is in memory."""

    num_senders: int = 8
    """Threads that send files. More downloads than that take turns."""

    def __post_init__(self) -> None:
        if not self.token or any(ord(letter) <= 32 or ord(letter) > 126 for letter in self.token):
            raise ValueError("token must be printable ASCII without spaces, and not empty")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        for name in self.volumes:
            parse_volume_name(name)
