"""Which files a daemon that has ended could not upload. Called by the daemons before they delete
its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from trainmount_fuse.writes.journal import Journal, StagedState

__all__ = ["staged_files"]

_JOURNAL: Final = "journal.db"

_WAITING: Final = (StagedState.DIRTY, StagedState.FAILED)


def staged_files(state_path: Path) -> list[str]:
    """Paths in the volume whose last bytes are only here; `?` stands for what a damaged journal
    named.

    The daemon must have ended.
    """
    path = state_path / _JOURNAL
    if not path.exists():
        return []
    journal = Journal(path)
    try:
        waiting = [row.path for row in journal.rows() if row.state in _WAITING]
        return waiting if journal.is_whole else [*waiting, "?"]
    finally:
        journal.close()
