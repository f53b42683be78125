"""A filesystem over a volume that is open already, with the options of its test."""

from __future__ import annotations

from trainmount_files import Volume
from trainmount_files.filesystem import VolumesFileSystem

_ROOT = "test:volume"


def over(volume: Volume, **options: object) -> VolumesFileSystem:
    """Paths are those of the volume after a slash."""
    fs = VolumesFileSystem(root=_ROOT, skip_instance_cache=True, **options)  # type: ignore[arg-type, unused-ignore]
    fs._locations._kept[_ROOT] = volume
    return fs
