"""What the local Files API server can be told; made by `__main__`, `trainmount serve` and tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from trainmount_files.server.endpoints import DEFAULT_ENDPOINTS, ENDPOINTS
from trainmount_files.server.grants import is_token
from trainmount_files.server.paths import is_object_name
from trainmount_files.volume import MIB

__all__ = ["ServerSettings", "parse_volume_name"]

GIB: Final = 1 << 30


def parse_volume_name(name: str) -> tuple[str, str, str]:
    """Split `catalog.schema.volume`. Raises ValueError with one clear line."""
    parts = name.split(".")
    if len(parts) != 3 or not all(is_object_name(part) for part in parts):
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
    """The bearer token with all rights. Every call but a presigned one must carry it or one of
    `grants`; it may be empty only with those.
    """

    grants: Path | None = None
    """JSON file of further tokens and what each may; see `grants`."""

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

    tls_certificate: Path | None = None
    """PEM file of the certificate, and those that signed it. With `tls_key` the wire is HTTPS."""

    tls_key: Path | None = None
    """PEM file of the private key."""

    endpoints: tuple[str, ...] = DEFAULT_ENDPOINTS
    """What `GET /api/2.0/fs/endpoints` tells clients to use, best first; of `ENDPOINTS`."""

    resumable: bool = False
    """Large files go up as on Google Cloud Storage, by one resumable upload and not in parts. For
    SDKs up to 0.158; newer ones send one PUT.
    """

    implicit_directories: bool = False
    """A directory that came with a file goes with the last one in it, as on Google Cloud Storage;
    one that was made by name stays. The disk must have extended attributes.
    """

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

    max_url_lifetime_seconds: float = 7 * 24 * 3600.0
    """A signed URL expires then at the latest, whatever its client asked for."""

    upload_lifetime_seconds: float = 24 * 3600.0
    """An upload that is older is dropped with everything it stored."""

    num_threads: int = 16
    """Threads that touch the disk; the event loop itself asks only for what is in memory."""

    num_senders: int = 8
    """Threads that send files. More downloads than that take turns."""

    def __post_init__(self) -> None:
        if not is_token(self.token) and (self.token or self.grants is None):
            raise ValueError("token must be printable ASCII without spaces, and not empty")
        for name in ("max_put_bytes", "max_url_lifetime_seconds", "upload_lifetime_seconds"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be greater than 0, got {value}")
        if self.min_part_bytes < 0:
            raise ValueError(f"min_part_bytes must be at least 0, got {self.min_part_bytes}")
        if self.num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {self.num_threads}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key must be given together")
        for name in self.endpoints:
            if name not in ENDPOINTS:
                raise ValueError(f"endpoints must be of {', '.join(ENDPOINTS)}; got {name}")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        for name in self.volumes:
            parse_volume_name(name)
