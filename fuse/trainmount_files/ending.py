"""What has to happen at the interpreter's end, in the one order that is right: files that are still
open first, then the stores below them. Used by `transfer/` and `bucket/`.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Final

__all__ = ["close_files_at_end", "close_stores_at_end"]

_FILES: Final[list[Callable[[], None]]] = []

_STORES: Final[list[Callable[[], None]]] = []


def close_files_at_end(close: Callable[[], None]) -> None:
    """Have `close` called at the end, while all stores still work."""
    _FILES.append(close)


def close_stores_at_end(close: Callable[[], None]) -> None:
    """Have `close` called at the end, after all files."""
    _STORES.append(close)


def _end() -> None:
    for close in (*_FILES, *_STORES):
        close()


atexit.register(_end)
