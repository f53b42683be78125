"""Bytes that were fetched ahead, put into the kernel's page cache before a program asks for them:
its read(2) then finds them there and no request reaches us.

The kernel takes what it is given for the content of the inode, whatever it had there. So a push is
of the version that the inode shows, and only while it has no writer: `close` comes before an inode
is given up, opened for writing or cut, and `wait` lasts until the last push before it has ended.

A push waits, uninterruptibly, for every page that a read in flight holds, so

- it comes from a thread, never from the event loop's, and from one that no read waits for,
- it leaves out what is being read as far as we know of it.

One page of each range is left out as well, the first: the read of it tells how far the reader is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["HOLE_BYTES", "Pages", "PushCounter", "StorePages"]

log = logging.getLogger(__name__)

StorePages = Callable[[int, int, memoryview], None]
"""(ino, offset, bytes): put them into the pages of an inode. Waits. Raises OSError."""

HOLE_BYTES: Final = 4096
"""What is left out at the start of a range: the smallest page there is."""

_PIECE_BYTES: Final = 2 << 20
"""Pushed at once. Between two pieces we look which reads have come; smaller ones cost more calls
and make nothing faster.
"""

_MAX_HOLES: Final = 64


class PushCounter:
    """Counts the pushes of one mount. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pushed_bytes = 0
        self.num_refused = 0
        """Pushes that the kernel did not take: it had forgotten the inode."""

    def note_pushed(self, num_bytes: int) -> None:
        with self._lock:
            self.pushed_bytes += num_bytes

    def note_refused(self) -> None:
        with self._lock:
            self.num_refused += 1


class Pages:
    """The kernel's pages of one inode at one version. Any thread may call."""

    def __init__(
        self,
        ino: int,
        store_pages: StorePages,
        counter: PushCounter,
        num_blocks: int,
        block_size_bytes: int,
    ) -> None:
        self._ino = ino
        self._store_pages = store_pages
        self._counter = counter
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_under_way = 0
        self._reads: list[tuple[int, int]] = []
        self._holes: dict[int, bytes] = {}
        self._asked = bytearray(num_blocks)
        self._block_size_bytes = block_size_bytes

    @property
    def is_busy(self) -> bool:
        """A push is under way."""
        return self._num_under_way > 0

    def ask(self, first: int, last: int) -> bool:
        """Somebody will fetch and push the blocks, both ends included; false where that was said of
        all of them before. The event loop's thread only, as `note_read`.
        """
        if self._is_closed or self._asked.find(0, first, last + 1) < 0:
            return False
        self._asked[first : last + 1] = b"\1" * (last + 1 - first)
        return True

    def note_read(self, offset: int, size: int) -> None:
        """The kernel asks for these bytes: what was pushed there is gone, or has not come."""
        first = offset // self._block_size_bytes
        end = (offset + size - 1) // self._block_size_bytes + 1
        self._asked[first:end] = bytes(end - first)

    def push(self, offset: int, data: memoryview) -> None:
        """Give the kernel these bytes, apart from what is being read and the first page.

        `offset` is a multiple of the page size, and so is the end unless the file ends there. Does
        nothing after `close`.
        """
        with self._changed:
            if self._is_closed:
                return
            self._num_under_way += 1
            while len(self._holes) >= _MAX_HOLES:
                # The reader went another way; whoever comes asks the block cache.
                del self._holes[next(iter(self._holes))]
            self._holes[offset] = bytes(data[:HOLE_BYTES])
        try:
            at = HOLE_BYTES
            while at < len(data):
                start, end = self._next_piece(offset + at, offset + len(data))
                if start < end:
                    self._store_pages(self._ino, start, data[start - offset : end - offset])
                    self._counter.note_pushed(end - start)
                at = end - offset
        except OSError:
            self._counter.note_refused()
            log.debug("The kernel did not take pages", exc_info=True, extra={"ino": self._ino})
        finally:
            with self._changed:
                self._num_under_way -= 1
                self._changed.notify_all()

    def hole(self, offset: int, size: int) -> bytes | None:
        """The bytes, where they are those that a push left out."""
        data = self._holes.get(offset)
        if data is None or len(data) < size:
            return None
        with self._changed:
            self._holes.pop(offset, None)
        return data[:size]

    def begin_read(self, offset: int, size: int) -> None:
        """A request for these bytes is here, so the kernel holds their pages."""
        with self._changed:
            self._reads.append((offset, offset + size))

    def end_read(self, offset: int, size: int) -> None:
        """It is answered."""
        with self._changed:
            self._reads.remove((offset, offset + size))

    def close(self) -> None:
        """No push begins any more."""
        with self._changed:
            self._is_closed = True
            self._holes.clear()

    def wait(self) -> None:
        """Until no push is under way."""
        with self._changed:
            while self._num_under_way:
                self._changed.wait()

    def _next_piece(self, start: int, end: int) -> tuple[int, int]:
        """The next bytes from `start` on that nobody is reading; nothing after `close`."""
        with self._changed:
            if self._is_closed:
                return end, end
            moved = True
            while moved:
                moved = False
                for first, last in self._reads:
                    if first <= start < last:
                        # Up to a whole page: the end of a read may lie inside its last one.
                        start, moved = -(-last // HOLE_BYTES) * HOLE_BYTES, True
            stop = min(end, start + _PIECE_BYTES)
            for first, _last in self._reads:
                if start < first < stop:
                    stop = first
            return min(start, end), max(min(start, end), stop)
