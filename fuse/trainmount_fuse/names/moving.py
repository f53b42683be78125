"""Moving a directory in a store that moves only files. Called by `namespace`, in a worker thread.

Nothing is moved before the whole directory is known to be small enough. A move that was cut off
may be done again: what is at the new place already is not at the old one any more, and until then
every file is at one of the two.
"""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from trainmount_files.errors import NotFound, Unsupported, VolumeError
from trainmount_files.volume import Volume, list_directory

__all__ = ["move_tree"]

_NUM_THREADS: Final = 8
"""Files under way at once. Each is a copy through this machine where the store cannot copy."""


@dataclass(slots=True)
class _Tree:
    """What is below a directory, by paths relative to it."""

    directories: list[str] = field(default_factory=lambda: [""])
    """Parents first."""

    files: list[str] = field(default_factory=list)


def move_tree(volume: Volume, old_path: str, new_path: str, max_entries: int) -> None:
    """Move everything below `old_path` to `new_path`, file by file, and remove what is empty then.

    Raises:
        OSError: EXDEV, before anything is moved, where it has more than `max_entries` entries.
        Unsupported: the store moves none of it; `new_path` is as it was.
        VolumeError: what was moved until then is at the new place, the rest at the old one.
    """
    tree = _look(volume, old_path, max_entries)
    for directory in tree.directories:
        volume.make_directory(new_path + directory)
    try:
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            moves = [
                threads.submit(volume.rename, old_path + file, new_path + file)
                for file in tree.files
            ]
            try:
                for move in moves:
                    move.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
    except Unsupported:
        # Whoever copies it now must not find a directory that nobody made.
        for directory in reversed(tree.directories):
            with suppress(VolumeError):
                volume.remove_directory(new_path + directory)
        raise
    for directory in reversed(tree.directories):
        # In a bucket, one that nobody made ends with its last file.
        with suppress(NotFound):
            volume.remove_directory(old_path + directory)


def _look(volume: Volume, path: str, max_entries: int) -> _Tree:
    tree = _Tree()
    # Directories found meanwhile are looked into in their turn.
    for directory in tree.directories:
        for stat in list_directory(volume, path + directory):
            found = tree.directories if stat.is_directory else tree.files
            found.append(f"{directory}/{stat.name}")
            if len(tree.files) + len(tree.directories) > max_entries + 1:
                raise OSError(
                    errno.EXDEV,
                    f"a directory of more than {max_entries:,} entries is copied, not renamed",
                )
    return tree
