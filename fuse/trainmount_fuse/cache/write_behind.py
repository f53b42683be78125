"""Fetched blocks in memory, and the thread that puts them on disk behind their readers.

A fetched range is readable as soon as it is held. It goes when it is on disk and was read, or some
seconds later, or when its memory is needed: ranges on disk first, then those that were read and are
still waiting to be written. So a disk slower than the store loses blocks for the next epoch, but
hardly slows this one. Only read-ahead waits for it: a moment for ranges to be written, and longer
where nothing was read yet. Small ranges are gathered for a moment and written together.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trainmount_fuse.cache.block_file import BlockFile, HeldRange
from trainmount_fuse.cache.buffers import Buffer, BufferPool, padded_size
from trainmount_fuse.cache.cache_table import BlockKey
from trainmount_fuse.cache.open_cell import OpenCell, Piece
from trainmount_fuse.cache.shared_cells import SharedCells
from trainmount_fuse.cache.shared_memory import SharedBuffer, SharedMemory
from trainmount_fuse.memory import MemoryBudget, return_free_memory

__all__ = ["WriteBehind"]

log = logging.getLogger(__name__)

_MAX_BATCH: Final = 256
"""Ranges written at once: small files come by the hundred, and one call takes them all."""

_GATHER_SECONDS: Final = 0.2
"""How long less than a cell's worth waits for more: a write, and waking up for it, costs as much
for one small file as for forty.
"""

_YOUNG_NS: Final = 3_000_000_000
"""Files that came to the store less than this ago are not gathered: another content may get the
same version, whose bytes would be taken for what is written late.
"""

_SHARE_OF_MEMORY: Final = 0.75
"""Of the mount's memory, for read-ahead: readers and uploads find theirs in the rest."""

_UNREAD_SECONDS: Final = 2.0
"""How long a range that is on disk stays in memory for a reader that has not come yet."""

_TIDY_SECONDS: Final = 1.0
_CALM_ROUNDS: Final = (2, 12)
"""How often there was nothing to do when free memory is returned to the system: soon, and when
threads that had nothing to do either have ended.
"""

_ROOM_SECONDS: Final = 10.0
"""How long read-ahead waits for memory."""

_PATIENCE_SECONDS_A_BYTE: Final = 0.1 / (8 << 20)
"""How long read-ahead waits for the disk before a range that was read is lost. With 8 ranges under
way, a disk that takes 640 MB/s loses none, and a slower one slows reading to that.
"""

_POLL_SECONDS: Final = 0.025

_LOG_SECONDS: Final = 60.0


class WriteBehind:
    """All held ranges of one mount. Any thread may call; only `take` waits."""

    def __init__(self, cells: SharedCells | None, memory: MemoryBudget) -> None:
        self.pool = BufferPool(memory)
        self.dropped_bytes = 0
        """What was not written since the disk was too slow or would not take it."""

        self._cells = cells
        self._memory = memory
        self._max_bytes = int(memory.statistics().limit_bytes * _SHARE_OF_MEMORY)
        # Guards everything below and the ranges. Taken before a file's lock, never after it.
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._has_work = threading.Condition(lock)
        """What the writer alone waits for."""
        # In the order of their coming; the oldest is written, and let go, first.
        self._queue: OrderedDict[HeldRange, None] = OrderedDict()
        self._queued_bytes = 0
        self._write_at = 0.0
        self._num_waiting = 0
        """Who waits for the disk."""
        self._clean: OrderedDict[HeldRange, None] = OrderedDict()
        self._held_bytes = 0
        self._num_writing = 0
        self._logged_at = -_LOG_SECONDS
        self._is_closing = False
        self._is_untidy = True
        self._num_calm = _CALM_ROUNDS[-1]
        # One, so that what is read together stands together.
        self._writer = threading.Thread(target=self._run, name="cache-write", daemon=True)
        if cells is not None:
            self._writer.start()

    @property
    def held_bytes(self) -> int:
        """Memory of all ranges."""
        return self._held_bytes

    def take(self, file: BlockFile, first: int, last: int, *, is_ahead: bool) -> HeldRange:
        """Memory to fetch blocks into, for `hold` or `discard`.

        Read-ahead (`is_ahead`) has a share of the mount's memory and waits for the disk; a reader
        waits only where the memory is taken by what nobody could do without.

        Raises:
            OSError: ENOSPC after 10 s without room for read-ahead.
        """
        num_bytes = file.offset_of(last) + file.length_of(last) - file.offset_of(first)
        size = self.pool.size_for(num_bytes)
        buffer = self._try_take(size, is_ahead=is_ahead)
        if buffer is None:
            self._memory.take(size)
            with self._changed:
                self._held_bytes += size
            buffer = Buffer(size)
        held = HeldRange(file, first, last, buffer)
        held.is_ahead = is_ahead
        return held

    def try_take_shared(
        self, file: BlockFile, first: int, last: int, shared: SharedMemory
    ) -> HeldRange | None:
        """As `take` for read-ahead, out of memory that another process fills; None where that would
        have to be waited for.
        """
        num_bytes = file.offset_of(last) + file.length_of(last) - file.offset_of(first)
        with self._changed:
            if self._held_bytes + padded_size(num_bytes) > self._max_bytes:
                return None
            buffer = shared.try_take(num_bytes)
            if buffer is None:
                return None
            if not self._memory.try_take(buffer.size_bytes):
                shared.put_back(buffer)
                return None
            self._held_bytes += buffer.size_bytes
        held = HeldRange(file, first, last, buffer)
        held.is_ahead = True
        return held

    def discard(self, held: HeldRange) -> None:
        """The fetch failed."""
        with self._changed:
            self._let_go(held)

    def hold(self, held: HeldRange, *, is_pinned: bool = False) -> None:
        """The bytes are there: readable from now on, and written soon. With `is_pinned`, the caller
        may look at the buffer until `unpin`.
        """
        with self._changed:
            held.num_pins += is_pinned
            self._show(held)
            if self._cells is None:
                self._lose(held)
            else:
                self._enqueue(held)
            self._changed.notify_all()

    def unpin(self, held: HeldRange) -> None:
        """The caller of `hold` does not look at the buffer any more."""
        with self._changed:
            held.num_pins -= 1
            if held.is_let_go and not held.num_pins:
                self._free(held)

    def was_read(self, held: HeldRange) -> None:
        """The last byte of a range was taken by a reader."""
        with self._changed:
            if held in self._clean:
                del self._clean[held]
                self._let_go(held)
            else:
                self._changed.notify_all()

    def rekey(self, old: BlockFile, new: BlockFile) -> None:
        """What is held of `old` is of `new` from now on."""
        with self._changed:
            for held in set(old.held.values()):
                with old.lock:
                    self._hide(held)
                self._give_up_claim(held)
                held.file = new
                self._show(held)

    def drop(self, file: BlockFile) -> None:
        """Nothing that is held of a file is wanted any more."""
        with self._changed:
            for held in set(file.held.values()):
                if held.is_writing:
                    held.is_dropped = True
                    continue
                self._clean.pop(held, None)
                if held in self._queue:
                    self._dequeue(held)
                self._let_go(held)

    def tidy_soon(self) -> None:
        """Cells may have become empty: give their space back to the disk."""
        with self._changed:
            self._is_untidy = True
            self._has_work.notify()

    def flush(self, seconds: float) -> bool:
        """Wait until all that was held before is on disk or lost; false after that time."""
        with self._changed, self._waiting_for_disk():
            return self._changed.wait_for(
                lambda: not self._queue and not self._num_writing, seconds
            )

    def close(self, seconds: float) -> None:
        """Write what waits, that long at most, and end the thread."""
        self.flush(seconds)
        with self._changed:
            self._is_closing = True
            self.dropped_bytes += self._queued_bytes
            self._queue.clear()
            self._queued_bytes = 0
            self._has_work.notify()
        if self._cells is not None:
            self._writer.join()

    def _try_take(self, size: int, *, is_ahead: bool) -> Buffer | None:
        start = time.monotonic()
        with self._changed:
            while True:
                is_beyond = self._held_bytes and self._held_bytes + size > self._max_bytes
                if not (is_ahead and is_beyond):
                    buffer = self.pool.try_take(size)
                    if buffer is not None:
                        self._held_bytes += size
                        return buffer
                    if self.pool.idle_bytes:
                        self.pool.trim()
                        continue
                waited_seconds = time.monotonic() - start
                is_patient = is_ahead and waited_seconds < size * _PATIENCE_SECONDS_A_BYTE
                if self._make_room(can_lose=not is_patient):
                    continue
                if not is_ahead:
                    return None
                if waited_seconds > _ROOM_SECONDS:
                    raise OSError(errno.ENOSPC, "no memory for read-ahead")
                with self._waiting_for_disk():
                    # Memory that others give back wakes nobody here.
                    self._changed.wait(_POLL_SECONDS)

    def _make_room(self, *, can_lose: bool) -> bool:
        """Let one range go that nobody misses now; one not written yet only where it may be
        lost.
        """
        if self._clean:
            self._let_go(self._clean.popitem(last=False)[0])
            return True
        for held in self._queue if can_lose else ():
            if held.may_be_lost:
                self._dequeue(held)
                self.dropped_bytes += held.buffer.size_bytes
                self._let_go(held)
                return True
        return False

    def _show(self, held: HeldRange) -> None:
        with held.file.lock:
            for index in range(held.first, held.last + 1):
                held.file.held[index] = held

    def _hide(self, held: HeldRange) -> None:
        for index in range(held.first, held.last + 1):
            if held.file.held.get(index) is held:
                del held.file.held[index]

    def _let_go(self, held: HeldRange) -> None:
        with held.file.lock:
            self._hide(held)
        self._give_up_claim(held)
        held.is_let_go = True
        if not held.num_pins:
            self._free(held)

    def _free(self, held: HeldRange) -> None:
        # In no file any more, not being written and not pinned: nobody looks at it.
        self._memory.give_back(held.buffer.size_bytes)
        if isinstance(held.buffer, SharedBuffer):
            held.buffer.home.put_back(held.buffer)
        elif self._memory.is_short:
            self.pool.trim()
        else:
            self.pool.put_back(held.buffer)
            # Who had nothing to do may have to give it to the system one day.
            self._has_work.notify()
        self._held_bytes -= held.buffer.size_bytes
        self._changed.notify_all()

    def _lose(self, held: HeldRange) -> None:
        """Keep the range for its reader, and do not write it."""
        self.dropped_bytes += held.buffer.size_bytes
        self._retain(held)

    def _retain(self, held: HeldRange) -> None:
        self._give_up_claim(held)
        if held.num_unread_bytes <= 0 or held.is_dropped or self._memory.is_short:
            self._let_go(held)
            return
        held.written_at = time.monotonic()
        self._clean[held] = None

    def _give_up_claim(self, held: HeldRange) -> None:
        if held.has_claim and self._cells is not None:
            held.has_claim = False
            self._cells.give_up_claim(held.file.block_key(held.first), held.last - held.first + 1)

    def _run(self) -> None:
        assert self._cells is not None
        cell = OpenCell(self._cells)
        while batch := self._next():
            try:
                pieces = deque(Piece(held, held.first, held.last) for held in batch)
                while pieces:
                    cell.write(pieces)
            except OSError as error:
                self._failed(batch, error)
            else:
                self._written(batch)
        try:
            cell.seal()
        except OSError:
            log.debug("A cell stays open until another mount joins", exc_info=True)

    def _enqueue(self, held: HeldRange) -> None:
        if time.time_ns() - held.file.key.stored_at_ns < _YOUNG_NS:
            self._write_at = 0.0
        elif not self._queue:
            self._write_at = time.monotonic() + _GATHER_SECONDS
        self._queue[held] = None
        self._queued_bytes += held.buffer.size_bytes
        if len(self._queue) == 1 or self._is_due():
            self._has_work.notify()

    def _dequeue(self, held: HeldRange) -> None:
        del self._queue[held]
        self._queued_bytes -= held.buffer.size_bytes

    def _is_due(self) -> bool:
        """Whether what is queued is written now."""
        assert self._cells is not None
        is_enough = self._queued_bytes >= self._cells.cell_bytes or len(self._queue) >= _MAX_BATCH
        return is_enough or self._num_waiting > 0 or time.monotonic() >= self._write_at

    @contextmanager
    def _waiting_for_disk(self) -> Iterator[None]:
        """With the lock held: what is queued is written at once meanwhile."""
        self._num_waiting += 1
        self._has_work.notify()
        try:
            yield
        finally:
            self._num_waiting -= 1

    def _wait_for_work(self) -> None:
        while not self._is_closing:
            if self._queue:
                if self._is_due():
                    return
                self._has_work.wait(max(0.0, self._write_at - time.monotonic()))
                continue
            if self._is_untidy:
                return
            is_calm = not self._clean and not self.pool.idle_bytes
            is_idle = is_calm and self._num_calm >= _CALM_ROUNDS[-1]
            if not self._has_work.wait(None if is_idle else _TIDY_SECONDS):
                return

    def _next(self) -> list[HeldRange]:
        """The next ranges to write; none at the end. Tidies up while there are none."""
        assert self._cells is not None
        while True:
            with self._changed:
                self._wait_for_work()
                if self._queue:
                    self._num_calm = 0
                    return self._batch()
                if self._is_closing:
                    return []
                self._is_untidy = False
                self._let_old_go()
                self._num_calm += not self._held_bytes
                is_due = self._num_calm in _CALM_ROUNDS
            if is_due:
                return_free_memory()
                self._cells.return_memory()
            self._trim()

    def _batch(self) -> list[HeldRange]:
        batch: list[HeldRange] = []
        assert self._cells is not None
        room = self._cells.cell_bytes
        while self._queue and len(batch) < _MAX_BATCH and room > 0:
            held = next(iter(self._queue))
            self._dequeue(held)
            held.is_writing = True
            held.written_file = held.file
            room -= held.buffer.size_bytes
            batch.append(held)
        self._num_writing = len(batch)
        return batch

    def _let_old_go(self) -> None:
        now = time.monotonic()
        while self._clean and next(iter(self._clean)).written_at + _UNREAD_SECONDS < now:
            self._let_go(self._clean.popitem(last=False)[0])
        if not self._held_bytes or self._memory.is_short:
            self.pool.trim()

    def _trim(self) -> None:
        assert self._cells is not None
        try:
            self._cells.trim()
        except OSError:
            log.debug("The cache could not be trimmed", exc_info=True)

    def _written(self, batch: list[HeldRange]) -> None:
        gone: list[BlockKey] = []
        with self._changed:
            for held in batch:
                file = held.written_file
                held.is_writing = False
                if held.is_dropped or held.file is not file:
                    # What was published has nobody's name.
                    gone += [file.block_key(i) for i in range(held.first, held.last + 1)]
                if held.file is not file and not held.is_dropped:
                    self._enqueue(held)
                else:
                    self._retain(held)
            self._num_writing = 0
            self._changed.notify_all()
        if gone and self._cells is not None:
            try:
                self._cells.remove(gone)
            except OSError:
                log.debug("Blocks of no name stay until they are thrown out", exc_info=True)

    def _failed(self, batch: list[HeldRange], error: OSError) -> None:
        with self._changed:
            for held in batch:
                held.is_writing = False
                self._lose(held)
            self._num_writing = 0
            self._changed.notify_all()
            now = time.monotonic()
            if self._logged_at + _LOG_SECONDS > now:
                return
            self._logged_at = now
        log.warning("Blocks could not be cached", extra={"error": str(error)})
