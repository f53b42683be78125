"""Whether a machine has a cloud's metadata service, the last place where obstore looks for
credentials. Elsewhere it would ask there until the deadline. Called by `volume.py` before the first
request.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trainmount_files.bucket.answers import CREDENTIALS_HINT
from trainmount_files.bucket.location import Location
from trainmount_files.bucket.s3_settings import has_keys
from trainmount_files.errors import Unauthenticated
from trainmount_files.per_process import PerProcess

__all__ = ["check_credentials"]

_ADDRESS: Final = ("169.254.169.254", 80)
"""Of all three clouds."""

_CONNECT_SECONDS: Final = 2.0

_KNOWN_SECONDS: Final = 60.0
"""How long a machine without one is not asked again."""

_SOURCES: Final = {
    "s3": ("metadata_endpoint",),
    "gs": (
        "service_account",
        "service_account_path",
        "service_account_key",
        "application_credentials",
        "bearer_token",
        "skip_signature",
    ),
    "az": (
        "account_key",
        "storage_account_key",
        "access_key",
        "storage_access_key",
        "storage_key",
        "client_secret",
        "sas_key",
        "storage_sas_key",
        "sas_token",
        "storage_sas_token",
        "token",
        "bearer_token",
        "storage_token",
        "federated_token_file",
        "msi_endpoint",
        "identity_endpoint",
        "use_azure_cli",
        "use_emulator",
        "storage_use_emulator",
        "use_fabric_endpoint",
        "fabric_token_service_url",
        "skip_signature",
    ),
}
"""Settings that say where credentials are; each may be a variable with the prefix below."""

_PREFIXES: Final = {"s3": "AWS", "gs": "GOOGLE", "az": "AZURE"}

_GCLOUD: Final = Path(".config/gcloud/application_default_credentials.json")


class _Missing:
    """When no service answered last. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until = 0.0
        self._was_there = False

    def is_missing(self) -> bool:
        with self._lock:
            if self._was_there:
                return False
            if time.monotonic() < self._until:
                return True
            try:
                socket.create_connection(_ADDRESS, _CONNECT_SECONDS).close()
            except OSError:
                self._until = time.monotonic() + _KNOWN_SECONDS
                return True
            self._was_there = True
            return False


_MISSING: Final = PerProcess(_Missing)


def check_credentials(location: Location, given: Mapping[str, str], provider: object) -> None:
    """Return where credentials are named, or a metadata service is there to ask for some.

    `given` are options by obstore's own names. Takes up to two seconds, once a minute.

    Raises:
        Unauthenticated: there is neither.
    """
    scheme = location.scheme
    if scheme not in _SOURCES or provider is not None or _is_named(scheme, given):
        return
    is_disabled = scheme == "s3" and os.environ.get("AWS_EC2_METADATA_DISABLED") == "true"
    if is_disabled or _MISSING.get().is_missing():
        raise Unauthenticated("open", location.url, CREDENTIALS_HINT)


def _is_named(scheme: str, given: Mapping[str, str]) -> bool:
    if scheme == "s3" and has_keys(given):
        return True
    if scheme == "gs" and (Path.home() / _GCLOUD).exists():
        return True
    prefix = _PREFIXES[scheme]
    return any(
        given.get(name) or os.environ.get(f"{prefix}_{name.upper()}") for name in _SOURCES[scheme]
    )
