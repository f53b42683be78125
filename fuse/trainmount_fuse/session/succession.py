"""What a holder leaves to the newly installed program that it becomes. holder.py writes and reads
it.

The process stays the same, and with it its children, locks and open descriptors, the mount's among
them; only the program changes (execve). What that program cannot ask the kernel for travels in a
file that is in no directory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn, Self

from trainmount_fuse.session.wire import decoded_init, encoded_init

__all__ = ["Estate"]

VERSION: Final = 1
"""Raised where a field changes its meaning; fields may be added without."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estate:
    """A mount in the hands of its holder. Descriptors are numbers of this process."""

    mountpoint: Path
    device_minor: int
    mounted_by: str
    init_request: bytes
    fuse_fd: int
    daemon_pid: int
    control_fd: int
    lock_fd: int
    """Of the state directory."""

    listener_fd: int
    """Where commands arrive; -1 where there is no such place."""

    client_fd: int
    """The command that waits for the end of this."""

    configuration: dict[str, Any] = field(repr=False)
    """Of the handover; may hold credentials."""

    takeover_fault: str | None
    kernel: dict[str, Any]
    ready_file: Path | None
    read_ahead_kib: int
    stop_timeout_seconds: float
    hang_timeout_seconds: float

    def to_document(self) -> dict[str, Any]:
        """As JSON can carry it."""
        values = asdict(self)
        values["init_request"] = encoded_init(self.init_request)
        values["mountpoint"] = os.fspath(self.mountpoint)
        values["ready_file"] = None if self.ready_file is None else os.fspath(self.ready_file)
        return {"version": VERSION, **values}

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Raises ValueError where another version of this program wrote something else."""
        values = dict(document)
        if values.pop("version", None) != VERSION:
            raise ValueError("the holder is of a version that this one cannot go on from")
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values}
        if len(known) < len(cls.__dataclass_fields__):
            raise ValueError("the holder left too little to go on from")
        known["init_request"] = decoded_init(known["init_request"])
        known["mountpoint"] = Path(known["mountpoint"])
        if known["ready_file"] is not None:
            known["ready_file"] = Path(known["ready_file"])
        return cls(**known)

    def become(self, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
        """Become `command`, with the mountpoint and `--estate-fd N` added.

        Raises OSError; nothing has changed then.
        """
        fds = [self.fuse_fd, self.control_fd, self.lock_fd]
        fds += [fd for fd in (self.listener_fd, self.client_fd) if fd >= 0]
        estate_fd = os.memfd_create("trainmount-estate", 0)
        try:
            with open(estate_fd, "w", encoding="utf-8", closefd=False) as file:
                json.dump(self.to_document(), file)
            os.lseek(estate_fd, 0, os.SEEK_SET)
            for fd in fds:
                os.set_inheritable(fd, True)
            # The mountpoint is for people who look at the list of processes.
            arguments = [*command, "holder", str(self.mountpoint), "--estate-fd", str(estate_fd)]
            os.execve(command[0], arguments, dict(environment))  # noqa: S606 - no shell
        finally:
            for fd in fds:
                os.set_inheritable(fd, False)
            os.close(estate_fd)

    @classmethod
    def inherited(cls, estate_fd: int) -> Self:
        """What the program before this one left. Raises ValueError."""
        with open(estate_fd, encoding="utf-8") as file:
            estate = cls.from_document(json.load(file))
        for fd in (estate.fuse_fd, estate.control_fd, estate.lock_fd):
            os.set_inheritable(fd, False)
        for fd in (estate.listener_fd, estate.client_fd):
            if fd >= 0:
                os.set_inheritable(fd, False)
        return estate
