"""The volume that a mount's settings name. Opened by the daemon to serve it, and looked at by
whoever must know whether its store is there: at the start of a mount, before its upgrade and at its
end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from trainmount_files import FileStat, Volume, open_volume
from trainmount_files.errors import VolumeError
from trainmount_fuse.settings import MountSettings

__all__ = ["look_at_root", "open_source", "source_identity"]

_SERVICE_VARIABLES: Final = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AWS_PROFILE",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ENDPOINT",
    "GOOGLE_BASE_URL",
)
"""What decides, besides the settings, which service a bucket's name is looked up at."""


def open_source(settings: MountSettings) -> Volume:
    """The volume, with this process's credentials; no request is sent yet.

    Raises:
        VolumeError: the source is no volume, or one that does not take an option.
    """
    options = {"endpoint": settings.endpoint, "region": settings.region}
    return open_volume(
        settings.source,
        profile=settings.profile or None,
        options={name: value for name, value in options.items() if value} or None,
        chunk_above_bytes=settings.chunk_above_bytes or None,
    )


def look_at_root(volume: Volume) -> FileStat:
    """The root of the volume, as its store tells it now. Raises VolumeError."""
    found = volume.stat("")
    if not volume.capabilities.keeps_directories:
        # Of a bucket the root is there unasked.
        volume.list_page("")
    return found


def source_identity(settings: MountSettings, environment: Mapping[str, str]) -> str:
    """What two mounts have in common if a path and a version mean the same bytes in both: the
    service and the place in it, not who asks.

    Of the Files API the credentials are asked for the host; no request is sent.
    """
    remote = settings.source.removeprefix("dbfs:").rstrip("/")
    if remote == "/Volumes" or remote.startswith("/Volumes/"):
        services = [_host(settings.profile)]
    else:
        variables = (environment.get(name, "") for name in _SERVICE_VARIABLES)
        services = [settings.endpoint, settings.region, *variables]
    return "\n".join((remote, str(settings.chunk_above_bytes), *services))


def _host(profile: str) -> str:
    # Imported late: mounts of buckets have no use for it.
    from trainmount_files.files_api import Credentials

    try:
        return Credentials(profile=profile or None).host
    except VolumeError:
        # Nothing can be read then, so it does not matter where it would be kept.
        return ""
