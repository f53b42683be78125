"""Handles for reading, in a small file that is mapped into memory. Only `handles` uses it.

To write one down takes a microsecond, where a row of a database takes fifty, and programs open far
more files for reading than anything else. What is in the map outlives the process; a word of eight
bytes is never half written.

A slot has the inode's number and a count that goes up with each use, and so has the handle: a
release that is repeated after a takeover does not close what uses the slot by then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from trainmount_fuse.names.mapped_file import mapped_file

__all__ = ["HandleSlots"]

log = logging.getLogger(__name__)

_NUM_SLOTS: Final = 16_384
"""Handles at once; more of them get rows of the database."""

_SLOT_BYTES: Final = 8
_INO_BITS: Final = 52
_MAX_COUNT: Final = (1 << 11) - 1
_COUNT_SHIFT: Final = 32
_MARK: Final = 1 << 62
"""Tells these handles from rows."""


class HandleSlots:
    """The map of one mount. The event loop's thread only."""

    def __init__(self, path: Path, *, is_successor: bool) -> None:
        """Where the map cannot be had, there are no slots."""
        self._words: memoryview | None = None
        try:
            mapped = mapped_file(path, _NUM_SLOTS * _SLOT_BYTES, keep=is_successor)
            self._words = memoryview(mapped).cast("Q")
        except OSError as error:
            fields = {"path": str(path), "error": str(error)}
            log.warning("Open files are kept in the database alone", extra=fields)
        words = self._words or ()
        # The one that was free for longest is used next.
        self._free = deque(slot for slot, word in enumerate(words) if not _ino_of(word))

    def taken(self) -> Iterator[tuple[int, int]]:
        """Each handle in use, with its inode."""
        for slot, word in enumerate(self._words or ()):
            if _ino_of(word):
                yield _fh(slot, word), _ino_of(word)

    def take(self, ino: int) -> int | None:
        """A handle on the inode; None where there is no slot for it."""
        if self._words is None or not self._free or ino >> _INO_BITS:
            return None
        slot = self._free.popleft()
        count = (self._words[slot] >> _INO_BITS) + 1
        word = (count & _MAX_COUNT) << _INO_BITS | ino
        self._words[slot] = word
        return _fh(slot, word)

    def give_back(self, fh: int) -> bool:
        """The handle is closed; false where it is not one of a slot in use."""
        slot = fh & ((1 << _COUNT_SHIFT) - 1)
        if self._words is None or not fh & _MARK or slot >= len(self._words):
            return False
        word = self._words[slot]
        if not _ino_of(word) or _fh(slot, word) != fh:
            return False
        self._words[slot] = word ^ _ino_of(word)
        self._free.append(slot)
        return True


def _ino_of(word: int) -> int:
    return word & ((1 << _INO_BITS) - 1)


def _fh(slot: int, word: int) -> int:
    return _MARK | word >> _INO_BITS << _COUNT_SHIFT | slot
