"""A mount's entry among those that commands find (registry.py), and the socket behind it.
holder.py owns one."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

from trainmount_fuse.session.mounting import FuseConnection
from trainmount_fuse.session.registry import MountRecord, own_folder, remove_record, write_record
from trainmount_fuse.session.wire import listen
from trainmount_fuse.settings import MountSettings

__all__ = ["Registration"]

logger = logging.getLogger(__name__)


class Registration:
    """One mount's."""

    def __init__(self, connection: FuseConnection) -> None:
        self._connection = connection
        self._listener: socket.socket | None = None
        self._file: Path | None = None

    @property
    def listener_fd(self) -> int:
        """-1 where no command can find the mount."""
        return -1 if self._listener is None else self._listener.fileno()

    def inherit(self, listener_fd: int) -> None:
        """Take a socket that listens already at the mount's address."""
        if listener_fd >= 0:
            self._listener = socket.socket(fileno=listener_fd)

    def make(self, settings: MountSettings) -> socket.socket | None:
        """Write the entry, listening where nobody does yet; None where there is no place for it.
        The mount is as good without, only `status`, `remount` and others do not find it."""
        try:
            address = own_folder() / f"{self._connection.device_minor}.sock"
            if self._listener is None:
                self._listener = listen(address)
            self._file = write_record(
                MountRecord(
                    mountpoint=self._connection.mountpoint,
                    source=settings.source,
                    holder_pid=os.getpid(),
                    device_minor=self._connection.device_minor,
                    holder_socket=address,
                    cache_dir=settings.cache_dir,
                    state_dir=settings.state_dir,
                )
            )
        except OSError as error:
            logger.warning("commands will not find this mount", extra={"reason": str(error)})
        return self._listener

    def remove(self) -> None:
        """Safe to call again."""
        if self._file is not None:
            remove_record(self._file)
            self._file = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None
