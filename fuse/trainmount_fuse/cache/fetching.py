"""Fetching blocks that are not here: each once, whoever wants it. Used by `blocks`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from trainmount_files.volume import ByteRange
from trainmount_fuse.cache.block_file import BlockFile, HeldRange
from trainmount_fuse.cache.shared_cells import SharedCells
from trainmount_fuse.cache.shared_memory import SharedMemory
from trainmount_fuse.cache.write_behind import WriteBehind

__all__ = ["Fetch", "Fetching", "OnFetched"]

log = logging.getLogger(__name__)

Fetch = Callable[[ByteRange, memoryview], None]
"""Fills the buffer with exactly that range of the right version, or raises."""

OnFetched = Callable[[int, memoryview], None]
"""Told of each range that came from the store, in the thread that fetched it, as soon as others
can read it: its offset in the file and its bytes, which are valid during the call only. May wait
for readers of these blocks. Must not raise.
"""

_CLAIM_SECONDS: Final = 0.5
"""How long a range that another mount is fetching is waited for.

A process that was killed keeps its claims for as long as the kernel holds one of its threads, and a
program may wait for the range.
"""

_CLAIM_POLL_SECONDS: Final = 0.005


class Fetching:
    """The fetches of one mount. Thread-safe."""

    def __init__(self, cells: SharedCells | None, held: WriteBehind, max_blocks: int) -> None:
        """`max_blocks` is the largest range asked for at once."""
        self._cells = cells
        self._held = held
        self._max_blocks = max_blocks
        self._lock = threading.Lock()
        self.fetched_bytes = 0
        """What came from the store."""

    def have(
        self,
        file: BlockFile,
        first: int,
        last: int,
        fetch: Fetch,
        on_fetched: OnFetched | None,
        *,
        is_ahead: bool,
    ) -> set[int]:
        """Have blocks in memory or on disk; returns those fetched here. See `BlockCache.ensure`.

        `is_ahead`: nobody waits for them, so they may wait for memory.
        """
        fetched: set[int] = set()
        wanted: list[int] = list(range(first, last + 1))
        while wanted:
            with file.lock:
                wanted = [index for index in wanted if not file.has(index, index)]
                mine = [index for index in wanted if index not in file.in_flight]
                others = {i: file.in_flight[i] for i in wanted if i in file.in_flight}
                ended = threading.Event()
                for index in mine:
                    file.in_flight[index] = ended
            pinned: list[HeldRange] | None = None if on_fetched is None else []
            try:
                for run in _runs(mine, self._max_blocks):
                    fetched.update(self._fetch_run(file, run, fetch, pinned, is_ahead))
            finally:
                with file.lock:
                    for index in mine:
                        del file.in_flight[index]
                ended.set()
                # Whoever is told may wait for a reader of any of these blocks, so they are readable
                # by now and claimed no more.
                for held in pinned or ():
                    self._tell(held, on_fetched, is_ahead)
            # Own fetches end before others are waited for, so two threads never wait for each
            # other.
            for event in others.values():
                event.wait()
            wanted = list(others)
        return fetched

    def begin(
        self, file: BlockFile, first: int, last: int, shared: SharedMemory
    ) -> HeldRange | None:
        """As `have`, for another process that fills the range's buffer: `end` has to follow. None
        where a block is here or on its way, or where something would have to be waited for.
        """
        held = self._held.try_take_shared(file, first, last, shared)
        if held is None:
            return None
        with file.lock:
            is_ours = not any(
                index in file.in_flight or file.has(index, index)
                for index in range(first, last + 1)
            )
            if is_ours:
                ended = threading.Event()
                file.in_flight.update(dict.fromkeys(range(first, last + 1), ended))
        if not is_ours:
            self._held.discard(held)
            return None
        if self._cells is None:
            return held
        try:
            held.has_claim = self._cells.try_claim(file.block_key(first), last - first + 1)
        except OSError:
            log.debug("The cache file cannot be locked", exc_info=True)
        if not held.has_claim:
            # Another mount is at it. Nobody may wait for what will not come.
            self.end(held, is_there=False)
            return None
        return held

    def end(self, held: HeldRange, *, is_there: bool) -> None:
        """The buffer of a range that was begun is full, or nobody writes to it any more."""
        file, num_bytes = held.file, held.num_unread_bytes
        if is_there:
            self._held.hold(held)
            with self._lock:
                self.fetched_bytes += num_bytes
        else:
            self._held.discard(held)
        with file.lock:
            for index in range(held.first, held.last + 1):
                ended = file.in_flight.pop(index)
        ended.set()

    def _fetch_run(
        self,
        file: BlockFile,
        run: list[int],
        fetch: Fetch,
        pinned: list[HeldRange] | None,
        is_ahead: bool,
    ) -> list[int]:
        """Fetch blocks without a gap, but for those that another mount has brought meanwhile."""
        # Memory before the claim: nobody waits for somebody who waits for memory.
        held = self._held.take(file, run[0], run[-1], is_ahead=is_ahead)
        try:
            held.has_claim = self._claim(file, run)
            left = [index for index in run if not file.has(index, index)]
            if left == run:
                self._fetch_into(held, fetch)
        except BaseException:
            self._held.discard(held)
            raise
        if left == run:
            self._held.hold(held, is_pinned=pinned is not None)
            if pinned is not None:
                pinned.append(held)
            return run
        self._held.discard(held)
        for part in _runs(left, len(run)):
            self._fetch_run(file, part, fetch, pinned, is_ahead)
        return left

    def _fetch_into(self, held: HeldRange, fetch: Fetch) -> None:
        start = held.file.offset_of(held.first)
        buffer = held.buffer.view[: held.num_unread_bytes]
        fetch(ByteRange(start, start + len(buffer)), buffer)
        with self._lock:
            self.fetched_bytes += len(buffer)

    def _tell(self, held: HeldRange, on_fetched: OnFetched | None, is_ahead: bool) -> None:
        file = held.file
        start = file.offset_of(held.first)
        size = file.offset_of(held.last) + file.length_of(held.last) - start
        try:
            if on_fetched is not None:
                on_fetched(start, held.buffer.view[:size])
        finally:
            if is_ahead:
                # Whoever was told has them; a reader of its own comes for them nevertheless.
                held.num_unread_bytes = 0
                self._held.was_read(held)
            self._held.unpin(held)

    def _claim(self, file: BlockFile, run: list[int]) -> bool:
        """Let one mount fetch what several want; false where the other comes to no end."""
        if self._cells is None:
            return False
        key = file.block_key(run[0])
        deadline = time.monotonic() + _CLAIM_SECONDS
        while not self._cells.try_claim(key, len(run)):
            if time.monotonic() > deadline or file.has(run[0], run[-1]):
                return False
            time.sleep(_CLAIM_POLL_SECONDS)
        return True


def _runs(indices: list[int], max_length: int) -> list[list[int]]:
    """Ascending numbers cut into runs without gaps, none longer than `max_length`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1 and len(runs[-1]) < max_length:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
