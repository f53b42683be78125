"""`evict`: free what the block cache keeps of some files. Called by `commands`, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

from trainmount_files.trees import Report
from trainmount_files.trees.crew import Crew
from trainmount_files.volume import FileStat
from trainmount_fuse.control.selection import Selection
from trainmount_fuse.core import Core, file_key

__all__ = ["Eviction"]

_PARALLELISM: Final = 8


class Eviction:
    """One run. Local bytes that are not uploaded yet are no part of the cache: they stay."""

    def __init__(self, core: Core, cancel: threading.Event) -> None:
        self._core = core
        self.report = Report()
        self._crew = Crew("evict", _PARALLELISM, cancel)

    def run(self, patterns: Sequence[str]) -> None:
        """Free the blocks of what the patterns mean, as the store has it now. Open files go on:
        their readers fetch again.

        Raises:
            Cancelled: the event was set.
        """
        selection = Selection(self._core.volume, self._crew, self.report, self._file)
        self._crew.run(partial(selection.start, patterns))

    def _file(self, stat: FileStat) -> None:
        self.report.found(1, stat.size_bytes)
        self._core.blocks.drop(file_key(stat))
        self.report.done(stat.size_bytes)
