"""Which calls are in progress. Used by the node and the controller to answer ABORTED to a second
one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from trainmount_csi.errors import Pending

__all__ = ["PendingOperations"]


class PendingOperations:
    """A set of keys that are being worked on. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()  # guarded by _lock

    @contextmanager
    def exclusive(self, key: str) -> Iterator[None]:
        """Hold `key` for the block; never waits.

        Raises:
            Pending: another block holds it.
        """
        with self._lock:
            if key in self._keys:
                raise Pending(f"another operation on {key} has not ended; it will be tried again")
            self._keys.add(key)
        try:
            yield
        finally:
            with self._lock:
                self._keys.remove(key)
