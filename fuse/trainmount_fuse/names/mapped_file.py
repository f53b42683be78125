"""Small files that are mapped into memory: what is written to them outlives the process, and takes
no call of the system. Used by `handle_slots` and `saved_rows`.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

__all__ = ["mapped_file"]


def mapped_file(path: Path, size_bytes: int, *, keep: bool) -> mmap.mmap:
    """The file, of that size at least, made where it is not there; of zeros unless `keep`.

    Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if not keep:
            os.ftruncate(descriptor, 0)
        # A page of the map that found no room on the disk would end the process.
        os.posix_fallocate(descriptor, 0, size_bytes)
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
