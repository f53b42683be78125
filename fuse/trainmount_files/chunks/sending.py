"""All chunks of a file at once, a few at a time. Used by `volume.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial
from typing import Final

from trainmount_files.cancellation import LinkedEvent
from trainmount_files.transfer.workers import Workers, raise_first

__all__ = ["SendChunk", "send_all"]

_END_SECONDS: Final = 60.0
"""Threads of an upload that was given up end at once; this only bounds the wait for them."""

SendChunk = Callable[[int, int, int, threading.Event], None]
"""Stores a chunk: its number from 1, its start in the file, its bytes, and when to give up."""


def send_all(
    send: SendChunk,
    size_bytes: int,
    chunk_bytes: int,
    *,
    parallelism: int,
    cancel: threading.Event | None,
) -> None:
    """Return when all are stored. After a failure none is begun, those under way give up, and all
    have ended when this raises.
    """
    stop = LinkedEvent(cancel)
    workers = Workers(parallelism, "trainmount-chunks")
    try:
        futures = [
            workers.submit(partial(send, number, start, min(chunk_bytes, size_bytes - start), stop))
            for number, start in enumerate(range(0, size_bytes, chunk_bytes), start=1)
        ]
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        stop.set()
        # Nothing may be stored after it was removed.
        workers.close(_END_SECONDS)
    raise_first(futures)
