"""The volume that a mount's settings name. Opened by the daemon to serve it, and looked at by
whoever must know whether its store is there: at the start of a mount, before its upgrade and at its
end.
"""

from __future__ import annotations

from trainmount_files import FileStat, Volume, open_volume
from trainmount_fuse.settings import MountSettings

__all__ = ["look_at_root", "open_source"]


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
