"""A directory of this machine as a volume."""

from trainmount_files.directory.volume import DirectoryVolume

__all__ = ["DirectoryVolume"]
