"""Disks that take two names for one: by case, or by how Unicode spells them. Called by `store`.

Such a disk would let a write to one name replace the file of another. Here the other name counts as
missing for reads and deletes, and as an error for writes. Blocking; any thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["FoldedNameError", "Folding"]

# Linux: the attributes of a file, and the one of a directory that ignores case (`chattr +F`).
_FS_IOC_GETFLAGS: Final = 0x8008_6601
_FS_CASEFOLD_FL: Final = 0x4000_0000

_PROBE: Final = "probe-\N{LATIN SMALL LETTER E WITH ACUTE}"
_PROBE_FOLDED: Final = (
    "PROBE-\N{LATIN CAPITAL LETTER E WITH ACUTE}",
    "probe-e\N{COMBINING ACUTE ACCENT}",
)


class FoldedNameError(FileNotFoundError):
    """The name is not there, but the disk would give it the file of another one."""


def _exists(directory_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory_fd, follow_symlinks=False)
    except OSError:
        return False
    return True


class Folding:
    """Which names of a disk are taken for another."""

    def __init__(self, *, everywhere: bool, lookup: Callable[[int, str], bool] = _exists) -> None:
        """`everywhere` is for disks that fold all over; single directories tell it themselves.
        `lookup` says whether the disk finds a name.
        """
        self._everywhere = everywhere
        self._lookup = lookup

    @classmethod
    def probe(cls, folder: Path) -> Folding:
        """Find out with a file in `folder`. Raises OSError if none can be made there."""
        prefix = secrets.token_hex(8)
        probe = folder / (prefix + _PROBE)
        probe.touch()
        try:
            folds = any((folder / (prefix + name)).exists() for name in _PROBE_FOLDED)
        finally:
            with contextlib.suppress(FileNotFoundError):
                probe.unlink()
        return cls(everywhere=folds)

    def require_exact(self, directory_fd: int, name: str) -> None:
        """Raises FoldedNameError if the disk has `name` only under another spelling."""
        if not self._everywhere and not _ignores_case(directory_fd):
            return
        if self._lookup(directory_fd, name) and name not in os.listdir(directory_fd):
            raise FoldedNameError(name)


def _ignores_case(directory_fd: int) -> bool:
    try:
        answer = fcntl.ioctl(directory_fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return False  # the filesystem has no such attributes
    return bool(struct.unpack_from("@I", answer)[0] & _FS_CASEFOLD_FL)
