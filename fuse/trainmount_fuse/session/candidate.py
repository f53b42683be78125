"""A daemon of newly installed code that is to take a mount over: looks at everything first, while
the old one serves. `main.py` calls this, upgrade.py started it."""

from __future__ import annotations

import importlib
import os
import socket
from typing import Any, Final

from trainmount_fuse.session.checks import check_folders, check_metrics_port, check_volume
from trainmount_fuse.session.daemon import run_daemon, settings_of
from trainmount_fuse.session.exit_codes import EXIT_CONFIGURATION
from trainmount_fuse.session.mounting import MountError
from trainmount_fuse.session.succession import Estate
from trainmount_fuse.session.wire import receive, send
from trainmount_fuse.settings import MountSettings, SettingsError, parse_address

__all__ = ["run_candidate"]

STORE_TIMEOUT_SECONDS: Final = 8.0
"""A store that serves a mount answers sooner."""


def run_candidate(control_fd: int) -> int:
    """Look, tell the holder, and serve when it hands the mount over; an exit code."""
    control = socket.socket(fileno=os.dup(control_fd))
    with control:
        message, _ = receive(control)
        if message is None:
            return EXIT_CONFIGURATION
        reason = _fault(message)
        send(control, {} if reason is None else {"reason": reason})
    return EXIT_CONFIGURATION if reason is not None else run_daemon(control_fd)


def _fault(message: dict[str, Any]) -> str | None:
    """Why this program cannot serve the mount as it is described; None where it can."""
    try:
        # The holder becomes this program too, and then there is no way back.
        importlib.import_module("trainmount_fuse.session.holder")
        estate = Estate.from_document(message["estate"])
        settings = settings_of(message["configuration"])
        check_folders(settings)
        if _metrics_port(settings) != _metrics_port(settings_of(estate.configuration)):
            # The same one is still the old daemon's.
            check_metrics_port(settings)
        check_volume(settings, STORE_TIMEOUT_SECONDS)
    except (MountError, SettingsError, ValueError) as error:
        return str(error)
    return None


def _metrics_port(settings: MountSettings) -> int | None:
    return parse_address(settings.metrics_address)[1] if settings.metrics_address else None
