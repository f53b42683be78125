"""How a rank learns that another one failed to write, so that none uploads for minutes what will
never be committed. Called by `writer`.

The process group's own key-value store carries the word: asking it costs no collective, and no
request to the volume.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

import torch.distributed as dist

__all__ = ["FailureBoard"]

_PREFIX: Final = "trainmount-failed/"


class FailureBoard:
    """What ranks told of their failures in one save. Without a process group it stays empty."""

    def __init__(self, generation: str) -> None:
        self._key = _PREFIX + generation
        self._store: Any = None
        if dist.is_available() and dist.is_initialized():
            self._store = dist.distributed_c10d._get_default_store()

    def tell(self, rank: int, error: BaseException) -> None:
        """Let the others know. Never raises."""
        if self._store is not None:
            # The collective that follows says it again; this is only sooner.
            with contextlib.suppress(RuntimeError):
                self._store.set(self._key, f"rank {rank} failed: {type(error).__name__}: {error}")

    def read(self) -> str | None:
        """The failure that was told last; None as long as there is none."""
        if self._store is None:
            return None
        try:
            if self._store.check([self._key]):
                return bytes(self._store.get(self._key)).decode(errors="replace")
        except RuntimeError as error:
            # The store lives in the first rank.
            return f"the first rank cannot be reached: {error}"
        return None
