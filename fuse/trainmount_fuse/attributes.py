"""The values that cross between the filesystem and whatever speaks FUSE. Plain data, no FUSE types.

Made by `filesystem`, turned into the kernel's structures by `adapter`.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass
from typing import Final

__all__ = ["ROOT_INO", "AttributeChanges", "Attributes", "DirEntry", "OpenFile", "StatFs"]

ROOT_INO: Final = 1
"""Inode number of the mount's root; the kernel fixes it."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What `stat` shows of one inode, and for how long the kernel may remember it."""

    ino: int
    """0 is a negative entry: the name is not there, to be remembered for `entry_timeout_seconds`.
    """

    mode: int = 0
    """Type and permission bits, as in st_mode."""

    nlink: int = 1
    """0 for a file that lives only through its open handles."""

    uid: int = 0
    gid: int = 0
    size: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    entry_timeout_seconds: float = 0.0
    attr_timeout_seconds: float = 0.0

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttributeChanges:
    """What `setattr` asks for; None leaves the field as it is."""

    size: int | None = None
    mode: int | None = None
    """Permission bits; type bits are ignored."""

    uid: int | None = None
    gid: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True, slots=True)
class OpenFile:
    """An open handle and how the kernel is to treat its pages."""

    fh: int

    keep_cache: bool = False
    """The pages the kernel has of this inode are of the version that was opened."""

    direct_io: bool = False


@dataclass(frozen=True, slots=True)
class DirEntry:
    """One name of a directory with its attributes."""

    name: bytes
    attributes: Attributes

    next_id: int
    """`start_id` of the call that goes on after this entry. Means the same to a successor of this
    process.
    """


@dataclass(frozen=True, slots=True)
class StatFs:
    """What `statvfs` shows."""

    block_size: int
    num_blocks: int
    num_free_blocks: int
    num_files: int
    num_free_files: int
    name_max: int
