"""Which daemon serves a volume, and where its files are. Called by the node and the daemons.

Two publications share one mount when source, host, identity and options are the same. Read-only is
not among the options: it belongs to a single bind, so that a reader and a writer on one node share
the cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from trainmount_csi.credentials import Credentials
from trainmount_csi.errors import InvalidArgument
from trainmount_csi.volume_context import KEY_OF_SETTING, MountFlags, VolumeContext
from trainmount_fuse.settings import MountSettings, SettingsError

__all__ = ["DaemonFolder", "DaemonSpec", "daemon_folders", "daemon_id_of"]

_DAEMON_ID: Final = re.compile(r"[0-9a-f]{20}")

_MOUNT_NAME_PREFIX: Final = "trainmount-"

_FILE_MODE: Final = 0o666
_DIRECTORY_MODE: Final = 0o777
"""A volume keeps no owner, and any pod that may mount it may use it: as the token allows, not the
uid."""

_GROUP_FILE_MODE: Final = 0o664
_GROUP_DIRECTORY_MODE: Final = 0o775
"""Where the pod's fsGroup or a `gid` says who shall write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DaemonSpec:
    """What tells one daemon of a node from another."""

    source: str

    host: str | None

    identity: str
    """Digest of whose access it is; the same for everybody where a volume needs none."""

    cache_size_bytes: int | None

    block_size_bytes: int | None

    memory_bytes: int | None

    metadata_timeout_seconds: float | None

    negative_timeout_seconds: float | None

    open_timeout_seconds: float | None

    uid: int

    gid: int

    file_mode: int

    directory_mode: int

    @classmethod
    def of(
        cls,
        context: VolumeContext,
        flags: MountFlags,
        credentials: Credentials,
        mount_group: str,
    ) -> DaemonSpec:
        """`mount_group` is the pod's fsGroup as the kubelet passes it, or empty.

        What the volume's attributes say wins over its mount options, those over the fsGroup.

        Raises:
            InvalidArgument: `mount_group` is not a number.
        """
        gid = context.gid if context.gid is not None else flags.gid
        if gid is None and mount_group:
            if not (mount_group.isascii() and mount_group.isdigit()):
                raise InvalidArgument(f"volume_mount_group must be a number, got {mount_group!r}")
            gid = int(mount_group)
        uid = context.uid if context.uid is not None else flags.uid
        umask = flags.umask
        if umask is not None:
            modes = (0o666 & ~umask, 0o777 & ~umask)
        elif gid is not None:
            modes = (_GROUP_FILE_MODE, _GROUP_DIRECTORY_MODE)
        else:
            modes = (_FILE_MODE, _DIRECTORY_MODE)
        return cls(
            source=context.source,
            host=credentials.host,
            identity=credentials.digest,
            cache_size_bytes=context.cache_size_bytes,
            block_size_bytes=context.block_size_bytes,
            memory_bytes=context.memory_bytes,
            metadata_timeout_seconds=context.metadata_timeout_seconds,
            negative_timeout_seconds=context.negative_timeout_seconds,
            open_timeout_seconds=context.open_timeout_seconds,
            uid=uid or 0,
            gid=gid or 0,
            file_mode=modes[0] if context.file_mode is None else context.file_mode,
            directory_mode=modes[1] if context.directory_mode is None else context.directory_mode,
        )

    @property
    def daemon_id(self) -> str:
        """Name of the daemon on its node; letters and digits only, safe in paths and labels."""
        canonical = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:20]

    def settings(self, folder: DaemonFolder, mount_id: str) -> MountSettings:
        """What the daemon is told.

        Raises:
            InvalidArgument: an option has a value that the mount does not take.
        """
        values: dict[str, object] = {
            "source": self.source,
            "cache_dir": folder.cache_path,
            "state_dir": folder.state_path,
            "mount_id": mount_id,
            "allow_other": True,
            "uid": self.uid,
            "gid": self.gid,
            "file_mode": self.file_mode,
            "directory_mode": self.directory_mode,
        }
        chosen = {
            "cache_size_bytes": self.cache_size_bytes,
            "block_size_bytes": self.block_size_bytes,
            "memory_bytes": self.memory_bytes,
            "entry_timeout_seconds": self.metadata_timeout_seconds,
            "attr_timeout_seconds": self.metadata_timeout_seconds,
            "directory_timeout_seconds": self.metadata_timeout_seconds,
            "negative_timeout_seconds": self.negative_timeout_seconds,
            "open_timeout_seconds": self.open_timeout_seconds,
        }
        values.update({name: value for name, value in chosen.items() if value is not None})
        try:
            return MountSettings.from_mapping(values)
        except SettingsError as error:
            key = KEY_OF_SETTING.get(error.name)
            raise InvalidArgument(
                f"volumeAttributes.{key} {error.reason}" if key else f"volumeAttributes: {error}"
            ) from error


@dataclass(frozen=True, slots=True)
class DaemonFolder:
    """The files of one daemon on the node. Only `serve_path` is shown to the daemon itself."""

    path: Path

    @property
    def daemon_id(self) -> str:
        return self.path.name

    @property
    def mount_name(self) -> str:
        """What the mount table shows as the device, here and at every bind."""
        return f"{_MOUNT_NAME_PREFIX}{self.daemon_id}"

    @property
    def mount_path(self) -> Path:
        """Where the FUSE file system is mounted; never inside `serve_path`, or a daemon in a pod
        would hold its own mount."""
        return self.path / "mnt"

    @property
    def serve_path(self) -> Path:
        """What the daemon may use: sockets, state and cache."""
        return self.path / "serve"

    @property
    def keeper_address(self) -> Path:
        return self.serve_path / "keeper.sock"

    @property
    def reclaim_address(self) -> Path:
        return self.serve_path / "reclaim.sock"

    @property
    def state_path(self) -> Path:
        return self.serve_path / "state"

    @property
    def cache_path(self) -> Path:
        return self.serve_path / "cache"

    @property
    def pid_path(self) -> Path:
        """Which process serves, where it is a plain one."""
        return self.path / "supervisor.json"

    def create(self, owner_uid: int) -> None:
        """Make what is missing. Nobody but the daemon's uid and root can look in."""
        self.path.mkdir(mode=0o711, parents=True, exist_ok=True)
        # Until it is mounted on, nobody may write here by mistake. Never looked at otherwise.
        if not os.path.lexists(self.mount_path):
            self.mount_path.mkdir(mode=0o000)
        for directory in (self.serve_path, self.state_path, self.cache_path):
            directory.mkdir(mode=0o700, exist_ok=True)
            if directory.stat().st_uid != owner_uid:
                os.chown(directory, owner_uid, owner_uid)

    def remove(self) -> None:
        """Delete the folder with everything in it. The mount must be gone and the daemon ended."""
        # If the mount were still there, this fails instead of emptying the volume.
        if os.path.lexists(self.mount_path):
            self.mount_path.rmdir()
        shutil.rmtree(self.path)


def daemon_folders(root: Path) -> Iterator[DaemonFolder]:
    """Every daemon folder below the driver's root."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if _DAEMON_ID.fullmatch(path.name) and stat.S_ISDIR(path.lstat().st_mode):
            yield DaemonFolder(path)


def daemon_id_of(mount_name: str) -> str | None:
    """The daemon whose mount shows `mount_name` in the mount table, or None for another's mount."""
    daemon_id = mount_name.removeprefix(_MOUNT_NAME_PREFIX)
    if daemon_id == mount_name or _DAEMON_ID.fullmatch(daemon_id) is None:
        return None
    return daemon_id
