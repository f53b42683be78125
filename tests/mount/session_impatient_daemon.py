"""The real daemon over a Files API volume that retries for a second and not for two minutes, and
takes two seconds of silence for a broken connection and not a minute. A supervisor's child runs it.
"""

from __future__ import annotations

from typing import Any

from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.transport import TransportOptions
from trainmount_files.retry import RetryPolicy
from trainmount_fuse.filesystem import Filesystem
from trainmount_fuse.session.daemon import run_daemon, settings_of

RETRY = RetryPolicy(deadline_seconds=1.0, first_delay_seconds=0.1, max_delay_seconds=0.2)
TRANSPORT = TransportOptions(inactivity_timeout_seconds=2.0)


def _impatient(configuration: dict[str, Any]) -> Filesystem:
    settings = settings_of(configuration)
    options = FilesApiOptions(retry=RETRY, transport=TRANSPORT)
    volume = FilesApiVolume(settings.source, Credentials(), options)
    return Filesystem(volume, settings)


def serve_impatiently(control_fd: int) -> int:
    """What a supervisor's child runs."""
    return run_daemon(control_fd, _impatient)
