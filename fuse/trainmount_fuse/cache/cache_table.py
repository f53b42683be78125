"""The table at the front of a cache file: which block of which file stands where. It is mapped into
the memory of every process that shares the cache.

The file is cut into cells of one size; a cell holds blocks one behind the other, and is filled by
one process and thrown out as a whole. Each cell has a generation. A place is a cell, its generation
and an offset; whoever throws a cell out raises the generation first, which makes all places in it
invalid at once. So a reader reads, looks at the generation again, and knows whether what it read
was the block.

Looking up takes no lock. What a lookup gives may be nonsense (a torn entry, a machine that lost its
power): the block's checksum, which stands in the entry, decides. Changes are made under the mutex
of `shared_cells`, the only user of this module.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

import xxhash

__all__ = ["BlockKey", "CacheTable", "CellState", "Geometry", "Place"]

_MAGIC: Final = int.from_bytes(b"tmcells1", "little")
_MASK: Final = (1 << 64) - 1
_WORD: Final = 8
_PAGE: Final = 4096

# Words of the header.
_GEOMETRY_CHECK: Final = 4
_CLOCK: Final = 8
_TOP: Final = 9
_LIMITS: Final = 256
_HEADER_WORDS: Final = 512

_WAYS: Final = 8
"""Entries of a bucket. A full bucket gives up the entry whose cell was used longest ago."""

_BLOCKS_A_BUCKET: Final = 4
"""So many neighbouring blocks of a file share a bucket."""

_RECORD_WORDS: Final = 5
_BUCKET_WORDS: Final = _WAYS * (1 + _RECORD_WORDS)

_BYTES_AN_ENTRY: Final = 32 << 10
"""One entry for so much of the capacity, 0.15 % of it; of files half as large, some are lost."""

_MIN_ENTRIES: Final = 32768
"""1.5 MiB: with fewer, a small cache of small files loses some of them to full buckets."""

_CELL_HEADROOM: Final = 16
"""The table has cells for so many times the capacity it was made for, since those cost little."""

# Odd, with its bits well mixed: the golden ratio.
_SPREAD: Final = 0x9E3779B97F4A7C15


class CellState:
    """What a byte of the state table says; a number from `FIRST_OWNER` on is the process that fills
    the cell.
    """

    FREE: Final = 0
    """Takes no space on disk."""

    EMPTY: Final = 1
    """Has space on disk and no block."""

    FULL: Final = 2
    """Nobody writes to it; may be thrown out."""

    FIRST_OWNER: Final = 3
    LAST_OWNER: Final = 255


class BlockKey(NamedTuple):
    """A block of a file of 128 bits of name."""

    low: int
    high: int
    number: int


class Place(NamedTuple):
    """Where a block stands, and the checksum of its bytes."""

    cell: int
    generation: int
    offset: int
    """From the start of the cell; a multiple of 4096."""

    length: int
    checksum: int

    def follows(self, other: Place) -> bool:
        """Whether it begins where the other ends."""
        is_near = (self.cell, self.generation) == (other.cell, other.generation)
        return is_near and self.offset == other.offset + other.length


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that never change in one cache file."""

    cell_bytes: int
    num_cells: int
    num_buckets: int

    @classmethod
    def for_capacity(cls, capacity_bytes: int, cell_bytes: int) -> Self:
        """For a new file."""
        num_cells = _CELL_HEADROOM * -(-capacity_bytes // cell_bytes)
        num_entries = max(_MIN_ENTRIES, capacity_bytes // _BYTES_AN_ENTRY)
        return cls(cell_bytes, num_cells, -(-num_entries // _WAYS))

    @property
    def table_bytes(self) -> int:
        """Where the first cell begins."""
        num_bytes = _WORD * (_HEADER_WORDS + 3 * self.num_cells)
        num_bytes += -(-self.num_cells // _WORD) * _WORD
        num_bytes += _WORD * _BUCKET_WORDS * self.num_buckets
        return -(-num_bytes // _PAGE) * _PAGE

    def to_header(self) -> bytes:
        """The first words of the file."""
        words = struct.pack("<4Q", _MAGIC, self.cell_bytes, self.num_cells, self.num_buckets)
        return words + struct.pack("<Q", xxhash.xxh3_64_intdigest(words))

    @classmethod
    def read(cls, fd: int) -> Self | None:
        """What a file says of itself; None where it is no cache file, or was cut."""
        header = os.pread(fd, 5 * _WORD, 0)
        if len(header) < 5 * _WORD:
            return None
        magic, cell_bytes, num_cells, num_buckets, check = struct.unpack("<5Q", header)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(header[: 4 * _WORD]):
            return None
        geometry = cls(cell_bytes, num_cells, num_buckets)
        return geometry if os.fstat(fd).st_size >= geometry.table_bytes else None


class CacheTable:
    """The mapped table of one cache file."""

    def __init__(self, fd: int, geometry: Geometry) -> None:
        """Map it. The space must be there: a page that cannot be had would end the process."""
        self.geometry = geometry
        self._mapping = mmap.mmap(fd, geometry.table_bytes)
        self._bytes = memoryview(self._mapping)
        self._words = self._bytes.cast("Q")
        num_cells = geometry.num_cells
        self._generations = _HEADER_WORDS
        self._used = self._generations + num_cells
        self._live = self._used + num_cells
        self._states = _WORD * (self._live + num_cells)
        self._buckets = self._live + num_cells + -(-num_cells // _WORD)

    def close(self) -> None:
        """Nothing may be asked afterwards."""
        self._words.release()
        self._bytes.release()
        self._mapping.close()

    def let_pages_go(self) -> None:
        """Leave the table to the kernel's memory of files, from where it comes back."""
        self._mapping.madvise(mmap.MADV_DONTNEED)

    # Without the mutex.

    def find(self, key: BlockKey) -> Place | None:
        """Where the block is said to be, in a cell that still has it."""
        found = self._slot(key)
        return None if found is None else self._place(key, *found)

    def is_current(self, place: Place) -> bool:
        """Whether the cell still has what it had when the place was given."""
        return self._words[self._generations + place.cell] == place.generation

    def touch(self, cell: int) -> None:
        """The cell was used just now: as late as any cell that was begun until now."""
        words, at = self._words, self._used + cell
        clock = words[_CLOCK]
        if words[at] != clock:
            words[at] = clock

    @property
    def limit_bytes(self) -> int:
        """The bound of all who share the file: the largest that one of them was given."""
        first, last = _LIMITS + CellState.FIRST_OWNER, _LIMITS + CellState.LAST_OWNER
        return max(self._words[first : last + 1].tolist())

    def limit_of(self, owner: int) -> int:
        """What a process said with `set_limit`; 0 where there is none."""
        return self._words[_LIMITS + owner]

    def set_limit(self, owner: int, num_bytes: int) -> None:
        """The bound that one of the processes was given; 0 when it ends."""
        self._words[_LIMITS + owner] = num_bytes

    def state(self, cell: int) -> int:
        """A value of `CellState`, or an owner."""
        return self._bytes[self._states + cell]

    def states(self) -> bytes:
        """The states of all cells up to the last that was ever used."""
        return bytes(self._bytes[self._states : self._states + self._top()])

    def uses(self) -> list[int]:
        """When each of these cells was last used; larger is later."""
        return self._words[self._used : self._used + self._top()].tolist()

    def used_at(self, cell: int) -> int:
        """When a cell was last used, as in `uses`."""
        return self._words[self._used + cell]

    def live_bytes(self, cell: int) -> int:
        """Bytes of the blocks in a cell."""
        return self._words[self._live + cell]

    def total_live_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(self._words[self._live : self._live + self._top()].tolist())

    # Under the mutex.

    def first_in(self, state: int) -> int | None:
        """The first cell in a state."""
        end = self._states + self.geometry.num_cells
        at = self._mapping.find(bytes([state]), self._states, end)
        return None if at < 0 else at - self._states

    def begin(self, cell: int, owner: int) -> int:
        """Throw out what is in a cell, and give it to a process to fill; returns its generation."""
        words = self._words
        # The generation goes first: from here on, nobody takes what it reads there for a block.
        generation = words[self._generations + cell] + 1 & _MASK
        words[self._generations + cell] = generation
        words[self._live + cell] = 0
        words[_CLOCK] = words[_CLOCK] + 1 & _MASK
        words[self._used + cell] = words[_CLOCK]
        self._bytes[self._states + cell] = owner
        words[_TOP] = max(self._top(), cell + 1)
        return generation

    def end(self, cell: int, state: int) -> None:
        """Nobody fills the cell any more. FREE and EMPTY throw out what is in it."""
        if state != CellState.FULL:
            words = self._words
            words[self._generations + cell] = words[self._generations + cell] + 1 & _MASK
            words[self._live + cell] = 0
        self._bytes[self._states + cell] = state

    def insert(self, key: BlockKey, place: Place) -> None:
        """The bytes of a block are at a place."""
        words = self._words
        low, base = self._bucket(key)
        keys = words[base : base + _WAYS].tolist()
        found = self._slot(key)
        way = self._way_to_give_up(base, keys) if found is None else found[1]
        self._forget(base, way)
        # The key goes last: who looks up meanwhile finds the entry whole or not at all.
        at = base + _WAYS + way * _RECORD_WORDS
        words[at] = key.high
        words[at + 1] = key.number << 32 | place.length
        words[at + 2] = place.cell << 32 | place.offset
        words[at + 3] = place.generation
        words[at + 4] = place.checksum
        words[base + way] = low
        words[self._live + place.cell] = words[self._live + place.cell] + place.length & _MASK

    def remove(self, key: BlockKey) -> Place | None:
        """Forget a block; returns where it was."""
        found = self._slot(key)
        if found is None:
            return None
        place = self._place(key, *found)
        self._forget(*found)
        return place

    def _top(self) -> int:
        return min(self._words[_TOP], self.geometry.num_cells)

    def _bucket(self, key: BlockKey) -> tuple[int, int]:
        low = (key.low + key.number * _SPREAD & _MASK) or 1
        # Blocks of one file stand close together: each page of the table is memory of the process.
        number = ((key.low >> 20) + key.number // _BLOCKS_A_BUCKET) % self.geometry.num_buckets
        return low, self._buckets + number * _BUCKET_WORDS

    def _slot(self, key: BlockKey) -> tuple[int, int] | None:
        low, base = self._bucket(key)
        words = self._words
        keys = words[base : base + _WAYS].tolist()
        if low not in keys:
            return None
        for way, one in enumerate(keys):
            at = base + _WAYS + way * _RECORD_WORDS
            if one == low and words[at] == key.high and words[at + 1] >> 32 == key.number:
                return base, way
        return None

    def _place(self, key: BlockKey, base: int, way: int) -> Place | None:
        words = self._words
        at = base + _WAYS + way * _RECORD_WORDS
        _high, meta, where, generation, checksum = words[at : at + _RECORD_WORDS].tolist()
        cell, offset, length = where >> 32, where & 0xFFFFFFFF, meta & 0xFFFFFFFF
        geometry = self.geometry
        if cell >= geometry.num_cells or offset + length > geometry.cell_bytes or offset % _PAGE:
            return None
        place = Place(cell, generation, offset, length, checksum)
        is_whole = meta >> 32 == key.number and words[base + way] != 0
        return place if is_whole and self.is_current(place) else None

    def _forget(self, base: int, way: int) -> None:
        words = self._words
        if not words[base + way]:
            return
        at = base + _WAYS + way * _RECORD_WORDS
        length, cell = words[at + 1] & 0xFFFFFFFF, words[at + 2] >> 32
        words[base + way] = 0
        if cell < self.geometry.num_cells and self._is_at(at, cell):
            live = self._live + cell
            words[live] = max(0, words[live] - length)

    def _way_to_give_up(self, base: int, keys: list[int]) -> int:
        ages: list[int] = []
        for way, low in enumerate(keys):
            at = base + _WAYS + way * _RECORD_WORDS
            cell = self._words[at + 2] >> 32
            if not low or cell >= self.geometry.num_cells or not self._is_at(at, cell):
                return way
            ages.append(self._words[self._used + cell])
        return ages.index(min(ages))

    def _is_at(self, at: int, cell: int) -> bool:
        return self._words[self._generations + cell] == self._words[at + 3]
