"""What a started plugin does with a mount that an earlier plugin process left. Called by the
daemons.

The plugin's own descriptor died with it, but the supervisor has one: as long as it lives the mount
works, and it gives the descriptor, INIT and configuration back. Where nobody holds the descriptor
any more the mount is dead for good; it is taken away so that the next publication mounts afresh.
"""

from __future__ import annotations

import logging
import time
from typing import Final

from trainmount_csi import served_mount
from trainmount_csi.daemon_spec import DaemonFolder
from trainmount_csi.launchers import Launcher
from trainmount_csi.mounts import Mounter, mounts_at
from trainmount_csi.served_mount import ServedMount
from trainmount_fuse.session.handover import HandoverError, reclaim
from trainmount_fuse.session.mounting import MountError

__all__ = ["recover"]

logger = logging.getLogger(__name__)

ASK_SECONDS: Final = 2.0

GIVE_UP_SECONDS: Final = 30.0
"""How long a supervisor that exists may be silent. A mount that is served must not be taken away
from under a job because its node is slow."""


def recover(folder: DaemonFolder, launcher: Launcher, mounter: Mounter) -> ServedMount | None:
    """Get the mount of `folder` back, or clear its mount path and return None.

    The caller holds the daemon.
    """
    if not mounts_at(mounter.entries(), folder.mount_path):
        return None
    deadline = time.monotonic() + GIVE_UP_SECONDS
    while True:
        try:
            handover = reclaim(folder.reclaim_address, ASK_SECONDS)
            served = served_mount.adopt(folder, handover, launcher.owner_uid)
        except (HandoverError, MountError, OSError) as error:
            if launcher.is_running(folder) and time.monotonic() < deadline:
                continue
            logger.warning(
                "a mount could not be taken over and is cleared",
                extra={"daemon": folder.daemon_id, "reason": str(error)},
            )
            served_mount.clear_mount_path(folder)
            return None
        logger.info("mount taken over", extra={"daemon": folder.daemon_id})
        return served
