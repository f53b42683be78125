"""How full a mount is and whether it answers at all. Called by the node for NodeGetVolumeStats.

Asked by a process of its own: a call on a mount whose daemon hangs can only be ended by killing who
made it, and as long as it waits the mount cannot be unmounted.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

from trainmount_csi.wire import csi_pb2

__all__ = ["volume_statistics"]

TIMEOUT_SECONDS: Final = 5.0
"""A mount that hangs must not hold up the kubelet's round over all volumes."""

# Unit; blocks in all, free, available; inodes in all, free. See stat(1).
_FORMAT: Final = "%S %b %f %a %c %d"


def volume_statistics(path: Path) -> csi_pb2.NodeGetVolumeStatsResponse:
    """Usage and condition of the mount at `path`; a condition alone where it does not answer."""
    try:
        asked = subprocess.run(
            ["stat", "--file-system", "--format", _FORMAT, "--", path],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return _abnormal(f"the volume has not answered for {TIMEOUT_SECONDS:g} s")
    if asked.returncode != 0:
        reason = asked.stderr.strip().rpartition(": ")[2]
        return _abnormal(f"the volume is lost on this node: {reason}")
    unit, blocks, free, available, inodes, free_inodes = map(int, asked.stdout.split())
    bytes_used = csi_pb2.VolumeUsage(
        unit=csi_pb2.VolumeUsage.BYTES,
        total=blocks * unit,
        available=available * unit,
        used=(blocks - free) * unit,
    )
    inodes_used = csi_pb2.VolumeUsage(
        unit=csi_pb2.VolumeUsage.INODES,
        total=inodes,
        available=free_inodes,
        used=inodes - free_inodes,
    )
    return csi_pb2.NodeGetVolumeStatsResponse(
        usage=[bytes_used, inodes_used],
        volume_condition=csi_pb2.VolumeCondition(abnormal=False, message="the volume answers"),
    )


def _abnormal(message: str) -> csi_pb2.NodeGetVolumeStatsResponse:
    condition = csi_pb2.VolumeCondition(abnormal=True, message=message)
    return csi_pb2.NodeGetVolumeStatsResponse(volume_condition=condition)
