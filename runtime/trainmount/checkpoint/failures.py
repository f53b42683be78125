"""How a rank learns that another one failed: so that none uploads for minutes what will never be
committed, and none ends with no more than a lost connection. Called by `writer` and `checkpointer`.

The process group's own key-value store carries the word: asking it costs no collective, and no
request to the volume.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist

from trainmount.distributed import grid_of_process, is_distributed

__all__ = ["FailureBoard", "note_first_failure"]

_PREFIX: Final = "trainmount-failed/"

_STORE_SECONDS: Final = 5.0
"""How long a rank that ends waits for the store, which may be on a node that is gone."""


_NOBODY_TOLD: Final = (
    "no rank told of a failure: one was killed, hangs, or has lost its node; torchrun's report on "
    "the node of a killed one has a root cause with an exitcode below 0"
)


class FailureBoard:
    """What ranks told of their failures, of one save or one end. Without a process group it stays
    empty.
    """

    def __init__(self, name: str) -> None:
        self._key = _PREFIX + name
        self._store: Any = None
        if is_distributed():
            self._store = dist.distributed_c10d._get_default_store()

    def tell(self, rank: int, error: BaseException) -> str | None:
        """Let the others know. Returns the failure that was told first, this or another; None where
        nobody can be told. Never raises.
        """
        if self._store is None:
            return None
        try:
            return bytes(self._store.compare_set(self._key, "", _told(rank, error))).decode()
        except RuntimeError:
            # The collective that follows says it again; this is only sooner.
            return None

    def read(self) -> str | None:
        """The failure that was told first; None as long as there is none."""
        if self._store is None:
            return None
        try:
            if self._store.check([self._key]):
                return bytes(self._store.get(self._key)).decode()
        except RuntimeError as error:
            # The store lives in the first rank.
            return f"the first rank cannot be reached: {error}"
        return None


def note_first_failure(end: str, error: Exception) -> None:
    """Let the others know of the error that ends this rank. To one that is only a lost connection,
    as all ranks have it that wait for one that failed, add a note of what that one told.

    `end` names what ends, on all ranks alike. Nothing is added to an error that all ranks have.
    """
    if not is_distributed():
        return
    board, (rank, _) = FailureBoard(end), grid_of_process()
    if _is_lost_connection(error):
        told = _answer_of(board.read)
        error.add_note(f"{told}; look into its log first" if told else _NOBODY_TOLD)
        return
    told = _answer_of(lambda: board.tell(rank, error))
    if told and _reason(told) != _reason(_told(rank, error)):
        error.add_note(f"before, {told}")


def _is_lost_connection(error: Exception) -> bool:
    # What gloo raises is a RuntimeError like any other, but for its file's name in front; a
    # CheckpointError may have it inside.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def _answer_of(ask: Callable[[], str | None]) -> str | None:
    """None also where there was no answer in time."""
    answers: list[str | None] = []
    asking = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    asking.start()
    asking.join(_STORE_SECONDS)
    return answers[0] if answers else None


def _told(rank: int, error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    # A file's name need not be UTF-8, and the store takes nothing else.
    first_line = first_line.encode(errors="backslashreplace").decode()
    return f"rank {rank} failed: {type(error).__name__}: {first_line}"


def _reason(told: str) -> str:
    return told.partition(": ")[2]
