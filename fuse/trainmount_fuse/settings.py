"""What one mount is told to do. Built by the command line and the node plugin, read by every
module of the mount.

The settings travel as JSON through the handover, so they hold no credential.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

__all__ = ["GIB", "MIB", "MountSettings", "SettingsError", "parse_address"]

MIB: Final = 1 << 20
GIB: Final = 1 << 30

_PAGE_BYTES: Final = 4096
_BUCKETS: Final = ("s3://", "gs://", "az://", "abfss://")
_NOT_NEGATIVE: Final = (
    "chunk_above_bytes",
    "free_disk_floor_bytes",
    "gid",
    "prefetch_max_bytes",
    "stream_from_bytes",
    "uid",
)


class SettingsError(ValueError):
    """A setting is missing or impossible; `str()` is one line that names it."""

    def __init__(self, reason: str, *, name: str = "") -> None:
        """`name` is the setting that `reason` begins to speak of, where it is one alone."""
        super().__init__(f"{name} {reason}" if name else reason)
        self.name = name
        self.reason = reason


@dataclass(frozen=True, kw_only=True, slots=True)
class MountSettings:
    """Everything a daemon needs to serve one mount, apart from the descriptor and the
    credentials.
    """

    source: str
    """URL of the volume, as `open_volume` takes it."""

    cache_dir: Path
    """Directory of the block cache. May vanish at any time between two mounts; shared by any number
    of mounts of the user.
    """

    state_dir: Path
    """Directory of inode numbers, open handles and files not yet uploaded.

    Must outlive the daemon, and the machine's reboot where unsent writes shall. Belongs to this
    mount alone.
    """

    profile: str = ""
    """Section of `~/.databrickscfg` that counts before the environment; empty for none."""

    endpoint: str = ""
    """URL of the service that has the bucket; empty leaves it to the environment."""

    region: str = ""
    """Region of the bucket; empty leaves it to the environment."""

    chunk_above_bytes: int = 0
    """Larger files are stored in chunks beside each other and shown as one; 0 keeps every file one
    object. For storage that takes no uploads in parts: 5 GiB is the most it takes at once.
    """

    mount_id: str = ""
    """Names one kernel mount. The holder makes a new one for each mount(2) and repeats it to every
    successor.

    Open handles of another mount id mean nothing any more and are dropped at start. Empty: handles
    are always kept.
    """

    read_only: bool = False
    """Every change is EROFS, and nothing is staged."""

    allow_other: bool = False
    """Other users than the mounter may look in; the kernel checks `uid`, `gid` and the modes."""

    uid: int = field(default_factory=os.getuid)
    """Owner that every file shows."""

    gid: int = field(default_factory=os.getgid)
    """Group that every file shows."""

    file_mode: int = 0o644
    """Permission bits of files that nobody has changed by chmod; a volume keeps none."""

    directory_mode: int = 0o755
    """Permission bits of directories that nobody has changed by chmod."""

    cache_size_bytes: int = 10 * GIB
    """Upper bound of the blocks on disk."""

    block_size_bytes: int = 1 * MIB
    """Unit of the block cache, a multiple of 4096.

    1 MiB is the largest read the kernel sends without patched INIT; smaller blocks make small
    random reads cheaper and each sequential one dearer.
    """

    free_disk_floor_bytes: int = 512 * MIB
    """Below this much free space, nothing more is cached and no new byte is staged (ENOSPC)."""

    entry_timeout_seconds: float = 1.0
    """How long a name may be taken for what it was, here and in the kernel together."""

    attr_timeout_seconds: float = 1.0
    """How long size and time of a file that is not open may be taken for what they were."""

    directory_timeout_seconds: float = 1.0
    """How long a listing is used again. A file that another node made shows after this time at the
    latest.
    """

    negative_timeout_seconds: float = 1.0
    """How long a name that was not there stays so. Ended at once by a local create."""

    open_timeout_seconds: float = 0.0
    """Age up to which attributes are good enough for `open` without asking the store.

    0 is close-to-open: an open after another node's close always sees that close. Larger values
    save one request an open and are right for data that nobody changes.
    """

    memory_bytes: int = 256 * MIB
    """Upper bound of all bytes on their way: read ahead, not yet in the cache, being uploaded.

    What the process takes without load (about 70 MiB) comes on top. 256 MiB holds 32 ranges, which
    keeps a store with 20 ms latency busy.
    """

    metrics_address: str = ""
    """`HOST:PORT` at which Prometheus may ask for the mount's numbers; empty for none."""

    prefetch_max_bytes: int = 64 * MIB
    """Largest distance that read-ahead runs in front of one sequential reader; 0 turns it off."""

    prefetch_fetch_bytes: int = 8 * MIB
    """Largest range asked of the store at once; 8 MiB ranges measured best over 1, 4 and 16."""

    num_prefetch_threads: int = 8
    """Ranges under way ahead of the readers. Times `prefetch_fetch_bytes` is the memory they take.
    """

    stream_from_bytes: int = 48 * MIB
    """Size from which a file that is written from its start to its end is sent while it is written,
    so that `close` waits for the last parts only; 0 for never. Below, one request at `close` costs
    the store less.
    """

    rename_max_entries: int = 10_000
    """Files and directories below a directory up to which it can be renamed; above, EXDEV.

    A store moves single files, some of them through this machine. mv(1) and shutil.move copy after
    EXDEV, which takes as long, but can be seen and stopped, and leaves the old ones until the end.
    """

    num_worker_threads: int = 64
    """Requests that may wait for the store or the disk at once."""

    def __post_init__(self) -> None:
        self._check_source()
        _require_at_least(self, "block_size_bytes", _PAGE_BYTES)
        if self.block_size_bytes % _PAGE_BYTES:
            raise SettingsError(
                f"must be a multiple of {_PAGE_BYTES}, got {self.block_size_bytes}",
                name="block_size_bytes",
            )
        _require_at_least(self, "cache_size_bytes", self.block_size_bytes)
        _require_at_least(self, "prefetch_fetch_bytes", self.block_size_bytes)
        # One range must fit, or nothing could ever be read ahead.
        _require_at_least(self, "memory_bytes", self.prefetch_fetch_bytes)
        for name in ("num_prefetch_threads", "num_worker_threads", "rename_max_entries"):
            _require_at_least(self, name, 1)
        for name in _NOT_NEGATIVE:
            _require_at_least(self, name, 0)
        for one in fields(self):
            if one.name.endswith("_timeout_seconds"):
                _require_at_least(self, one.name, 0)
                if math.isinf(getattr(self, one.name)):
                    raise SettingsError("must be a number of seconds", name=one.name)
        for name in ("file_mode", "directory_mode"):
            mode = getattr(self, name)
            if not 0 <= mode <= 0o7777:
                raise SettingsError(f"must be between 0 and 0o7777, got {mode:#o}", name=name)
        if self.metrics_address:
            try:
                parse_address(self.metrics_address)
            except ValueError as error:
                raise SettingsError(str(error), name="metrics_address") from None

    def _check_source(self) -> None:
        if not self.source:
            raise SettingsError(
                "must name a volume, for example /Volumes/main/default/data", name="source"
            )
        for name in ("endpoint", "region"):
            if getattr(self, name) and not self.source.startswith(_BUCKETS):
                raise SettingsError(f"is for buckets, and {self.source} is none", name=name)
        address = urlsplit(self.endpoint)
        if self.endpoint and not (address.scheme in ("http", "https") and address.hostname):
            raise SettingsError(
                f"must be http:// or https:// and a host, got {self.endpoint!r}", name="endpoint"
            )

    def to_json(self) -> str:
        """The settings as one JSON object, for `from_json`."""
        return json.dumps(asdict(self), default=str, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises SettingsError, naming the field, for anything `to_json` cannot have written."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise SettingsError(f"mount settings are not JSON: {error}") from error
        if not isinstance(values, dict):
            raise SettingsError("mount settings must be a JSON object")
        return cls.from_mapping(values)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Raises SettingsError, naming the field."""
        known = {one.name: str(one.type) for one in fields(cls)}
        for name in values:
            if name not in known:
                raise SettingsError(f"unknown mount setting {name!r}")
        for name in ("source", "cache_dir", "state_dir"):
            if name not in values:
                raise SettingsError(f"mount setting {name!r} is missing")
        converted: dict[str, Any] = {}
        for name, value in values.items():
            converted[name] = _converted(name, known[name], value)
        return cls(**converted)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; `localhost` where the host is left out. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise ValueError(f"must be a port from 1 to 65535 or HOST:PORT, got {text!r}")
    return host.strip("[]") or "localhost", int(port)


def _require_at_least(settings: MountSettings, name: str, least: int) -> None:
    value = getattr(settings, name)
    # Also refuses what is no number.
    if not value >= least:
        raise SettingsError(f"must be at least {least}, got {value}", name=name)


def _converted(name: str, kind: str, value: object) -> object:
    if kind == "Path" and isinstance(value, str | Path):
        return Path(value)
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str):
        return value
    raise SettingsError(f"mount setting {name!r} must be of type {kind}, got {value!r}")
