"""The volume that a mount's settings name. Opened by the daemon to serve it, and by the holder to
see that it can be, before anything is mounted.
"""

from __future__ import annotations

from trainmount_files import Volume, open_volume
from trainmount_fuse.settings import MountSettings

__all__ = ["open_source"]


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
