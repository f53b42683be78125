"""One FUSE mount of the node with its descriptor and Keeper. Made by daemons and recovery."""

from __future__ import annotations

import json
import logging
import os
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from trainmount_csi.credentials import Credentials
from trainmount_csi.daemon_spec import DaemonFolder, DaemonSpec
from trainmount_csi.errors import CsiError, FailedPrecondition
from trainmount_fuse.session.handover import Handover, Keeper
from trainmount_fuse.session.mounting import (
    READ_AHEAD_KIB,
    FuseConnection,
    MountError,
    connection_of,
    mount_fuse,
    set_read_ahead,
    unmount,
)

__all__ = ["ServedMount", "adopt", "clear_mount_path", "mount"]

logger = logging.getLogger(__name__)

FUSE_DEVICE: Final = Path("/dev/fuse")


@dataclass(slots=True)
class ServedMount:
    """A mount whose descriptor this process holds. Guarded by the lock of its daemon."""

    connection: FuseConnection

    keeper: Keeper

    configuration: dict[str, Any] = field(repr=False)
    """What the daemon was told last; holds credentials."""

    last_used: float = field(default_factory=time.monotonic)
    """When a publication last asked for it, on the monotonic clock."""

    @property
    def device(self) -> str:
        """As in the mount table. FUSE mounts have an anonymous device, whose major number is 0."""
        return f"0:{self.connection.device_minor}"

    def is_connected(self) -> bool:
        """Whether the kernel still takes answers; False after an abort or the last unmount."""
        poller = select.poll()
        poller.register(self.connection.fd, 0)
        return not any(events & (select.POLLERR | select.POLLNVAL) for _, events in poller.poll(0))

    def refresh(self, credentials: Credentials) -> None:
        """Give the daemon these credentials, where they are new."""
        self.configuration = {**self.configuration, "environment": credentials.environment()}
        self.keeper.update_configuration(self.configuration)


def mount(
    folder: DaemonFolder, spec: DaemonSpec, credentials: Credentials, owner_uid: int
) -> ServedMount:
    """Mount at the daemon's folder and offer the descriptor; nobody serves it yet.

    Raises:
        InvalidArgument: the mount does not take an option.
        FailedPrecondition: this machine cannot mount.
    """
    # The id tells this kernel mount from an earlier one of the same daemon.
    settings = spec.settings(folder, mount_id=uuid4().hex)
    configuration = {
        "settings": json.loads(settings.to_json()),
        "environment": credentials.environment(),
    }
    if not FUSE_DEVICE.exists():
        raise FailedPrecondition(
            f"{FUSE_DEVICE} is missing on the node: load the module (modprobe fuse), "
            "and let the driver's container have it"
        )
    try:
        connection = mount_fuse(
            folder.mount_path, name=folder.mount_name, allow_other=True, read_only=False
        )
    except MountError as error:
        raise FailedPrecondition(str(error)) from error
    set_read_ahead(connection, READ_AHEAD_KIB)
    keeper = Keeper(
        folder.keeper_address, connection, configuration, allowed_uids=frozenset({owner_uid})
    )
    try:
        keeper.start()
    except OSError as error:
        unmount(folder.mount_path, lazy=True)
        keeper.close()
        raise CsiError(f"cannot listen at {folder.keeper_address}: {error.strerror}") from error
    logger.info("mounted", extra={"daemon": folder.daemon_id, "source": spec.source})
    return ServedMount(connection, keeper, configuration)


def adopt(folder: DaemonFolder, handover: Handover, owner_uid: int) -> ServedMount:
    """Go on with a mount whose descriptor a supervisor gave back.

    Raises:
        MountError: it is not mounted at the daemon's folder any more.
        OSError: nothing can listen at the Keeper's address.
    """
    try:
        connection = connection_of(folder.mount_path, handover.fd, handover.init_request)
    except MountError:
        os.close(handover.fd)
        raise
    keeper = Keeper(
        folder.keeper_address,
        connection,
        handover.configuration,
        allowed_uids=frozenset({owner_uid}),
        role="successor",
    )
    try:
        keeper.start()
    except OSError:
        keeper.close()
        raise
    return ServedMount(connection, keeper, handover.configuration)


def clear_mount_path(folder: DaemonFolder) -> None:
    """Take away whatever is left at the mount path, dead or alive, without looking at it."""
    try:
        unmount(folder.mount_path, lazy=True)
    except MountError as error:
        raise FailedPrecondition(str(error)) from error
