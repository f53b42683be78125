"""The cell of the cache file that is being filled: blocks are put behind one another, and whoever
looks for one finds it once its bytes are there. Used by `write_behind`.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import xxhash

from trainmount_fuse.cache.block_file import HeldRange
from trainmount_fuse.cache.buffers import padded_size
from trainmount_fuse.cache.cache_table import BlockKey, Place
from trainmount_fuse.cache.shared_cells import SharedCells

__all__ = ["OpenCell", "Piece"]


class Piece(NamedTuple):
    """Blocks of a range that stand in one cell, one behind the other."""

    held: HeldRange
    first: int
    last: int

    @property
    def view(self) -> memoryview:
        """Their bytes, in whole pages."""
        return self.held.padded_view(self.first, self.last)


class OpenCell:
    """The cell that is being filled."""

    def __init__(self, cells: SharedCells) -> None:
        self._cells = cells
        self._cell: tuple[int, int] | None = None
        self._filled_bytes = 0

    def write(self, pieces: deque[Piece]) -> None:
        """Put on disk what fits into one cell, and take it off `pieces`. Raises OSError."""
        smallest = padded_size(pieces[0].held.file.length_of(pieces[0].first))
        if self._filled_bytes + smallest > self._cells.cell_bytes:
            self.seal()
        if self._cell is None:
            self._cell, self._filled_bytes = self._cells.begin_cell(), 0
        number, generation = self._cell
        start = self._filled_bytes
        fitting = _fitting(pieces, self._cells.cell_bytes - start)
        try:
            self._cells.write(number, start, [piece.view for piece in fitting])
        except OSError:
            self.seal()
            raise
        entries: list[tuple[BlockKey, Place]] = []
        for piece in fitting:
            file = piece.held.written_file
            for index in range(piece.first, piece.last + 1):
                checksum = xxhash.xxh3_64_intdigest(piece.held.view(index))
                offset = self._filled_bytes + file.offset_of(index - piece.first)
                place = Place(number, generation, offset, file.length_of(index), checksum)
                entries.append((file.block_key(index), place))
            self._filled_bytes += len(piece.view)
        # After the bytes: whoever finds an entry finds the block.
        self._cells.publish(number, entries)

    def seal(self) -> None:
        """Let the cell go; what is in it stays."""
        if self._cell is not None:
            number, _generation = self._cell
            self._cell, self._filled_bytes = None, 0
            self._cells.seal_cell(number)


def _fitting(pieces: deque[Piece], room: int) -> list[Piece]:
    """Take off what fits into so many bytes; the last piece taken may be a part of one."""
    fitting: list[Piece] = []
    while pieces:
        piece = pieces[0]
        size = len(piece.view)
        if size <= room:
            fitting.append(pieces.popleft())
            room -= size
            continue
        num_blocks = room // piece.held.file.block_size_bytes
        if num_blocks and piece.last > piece.first:
            middle = piece.first + num_blocks
            fitting.append(Piece(piece.held, piece.first, middle - 1))
            pieces[0] = Piece(piece.held, middle, piece.last)
        return fitting
    return fitting
