"""What `status` tells of one mount, as far as its daemon knows it. Called by `commands`."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.core import Core
from trainmount_fuse.writes.journal import StagedState
from trainmount_fuse.writes.staged_file import StagedFile

__all__ = ["LocalFile", "conflicting_files", "local_files", "mount_status", "resident_bytes"]

_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file whose last bytes are only on this machine."""

    path: str
    """In the volume."""

    state: str
    """`dirty`: an upload is still to come. `failed`: the last close reported an error, and the
    bytes are kept until an upload of them succeeds. `conflict`: the store had a later version, and
    the bytes were put beside it."""

    size_bytes: int | None
    """None where only the store knows."""

    reason: str
    """Why the last upload failed; empty where none did."""

    local_path: str
    """Where the bytes are; of a conflict, in the volume."""


def local_files(core: Core) -> list[LocalFile]:
    """Every file whose last bytes the store does not have, by path. Waits for the disk."""
    dirty = [core.staging.find(ino) for ino in core.staging.inos()]
    staged = [one for one in dirty if one is not None and one.state is StagedState.DIRTY]
    found = [_local_file(one) for one in [*staged, *core.staging.failed()]]
    return sorted(found, key=lambda one: one.path)


def conflicting_files(core: Core) -> list[LocalFile]:
    """The last files that were put beside a later version, oldest first. Waits for the disk."""
    reason = "a later version was in the store"
    return [
        LocalFile(one.path, "conflict", None, reason, one.kept_path)
        for one in core.staging.conflicts()
    ]


def _local_file(staged: StagedFile) -> LocalFile:
    reason = staged.reason if staged.error is None else str(staged.error)
    try:
        size_bytes = staged.path.stat().st_size
    except OSError:
        # Uploaded and gone meanwhile.
        size_bytes = 0
    return LocalFile(staged.volume_path, staged.state.value, size_bytes, reason, str(staged.path))


def mount_status(core: Core, files: list[LocalFile], started_at: float) -> dict[str, Any]:
    """The numbers of a mount; `started_at` is the daemon's, on the monotonic clock."""
    settings = core.settings
    memory = core.memory.statistics()
    return {
        "source": settings.source,
        "daemon_pid": os.getpid(),
        "daemon_uptime_seconds": round(time.monotonic() - started_at, 1),
        "read_only": settings.read_only,
        "cache": {**asdict(core.blocks.statistics()), "directory": str(settings.cache_dir)},
        "memory": {**asdict(memory), "resident_bytes": resident_bytes()},
        "state_directory": str(settings.state_dir),
        "num_open_inodes": len(core.handles.open_inos()),
        "num_hidden_names": core.metadata.num_hidden,
        "num_dirty_files": sum(one.state == "dirty" for one in files),
        "num_failed_files": sum(one.state == "failed" for one in files),
    }


def resident_bytes() -> int:
    """Memory of this process as the kernel counts it (RSS)."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
