"""Which generations are at a path, which of them are whole, and what goes. Called by `writer`,
`reader`, `checkpointer`.

Whole: the commit record is there and every file it lists has the recorded size. Bytes are verified
when they are read.
"""

from __future__ import annotations

import logging
import zlib
from dataclasses import dataclass
from typing import Final

from trainmount.checkpoint.layout import (
    COMMIT_NAME,
    METADATA_NAME,
    CommitRecord,
    generation_number,
)
from trainmount.checkpoint.stores import CheckpointStore
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

__all__ = [
    "SkippedGeneration",
    "find_whole",
    "list_generations",
    "newest_whole",
    "prune",
    "read_metadata",
    "read_record",
]

_log = logging.getLogger(__name__)

_NOT_COMMITTED: Final = "its save did not finish"


@dataclass(frozen=True, slots=True)
class SkippedGeneration:
    """A generation newer than the one that was taken, and why it was not."""

    generation: str
    reason: str

    is_committed: bool
    """False for a save that did not finish; True for a checkpoint that was damaged afterwards."""


def list_generations(store: CheckpointStore) -> list[str]:
    """All generations, oldest first, committed or not."""
    return sorted(name for name in store.names("") if generation_number(name) is not None)


def read_record(store: CheckpointStore, generation: str) -> CommitRecord | None:
    """The commit record; None if the generation is not committed.

    Raises:
        DamagedCheckpoint: the record is unreadable, or a file it lists is missing or has another
            size.
    """
    name = f"{generation}/{COMMIT_NAME}"
    size_bytes = store.size(name)
    if size_bytes is None:
        return None
    where = f"{store.location}/{name}"
    record = CommitRecord.from_json(bytes(store.read(name, 0, size_bytes)), where)
    for file in record.files:
        found = store.size(f"{generation}/{file.name}")
        path = f"{store.location}/{generation}/{file.name}"
        if found is None:
            raise DamagedCheckpoint(f"{path} is missing")
        if found != file.size_bytes:
            raise DamagedCheckpoint(f"{path} has {found} bytes, {file.size_bytes} are recorded")
    return record


def read_metadata(store: CheckpointStore, record: CommitRecord) -> bytes:
    """The metadata's bytes, verified. Raises DamagedCheckpoint."""
    path = f"{store.location}/{record.generation}/{METADATA_NAME}"
    file = next((file for file in record.files if file.name == METADATA_NAME), None)
    if file is None:
        raise DamagedCheckpoint(f"{path} is not in the commit record")
    data = bytes(store.read(f"{record.generation}/{METADATA_NAME}", 0, file.size_bytes))
    if file.checksum != f"crc32:{zlib.crc32(data):08x}":
        raise DamagedCheckpoint(f"{path} is damaged: its bytes do not match the recorded checksum")
    return data


def find_whole(store: CheckpointStore) -> tuple[list[CommitRecord], list[SkippedGeneration]]:
    """All whole generations and all others, newest first."""
    whole: list[CommitRecord] = []
    skipped: list[SkippedGeneration] = []
    for generation in reversed(list_generations(store)):
        try:
            record = read_record(store, generation)
            if record is None:
                skipped.append(SkippedGeneration(generation, _NOT_COMMITTED, is_committed=False))
                continue
            read_metadata(store, record)
        except DamagedCheckpoint as error:
            skipped.append(SkippedGeneration(generation, str(error), is_committed=True))
        else:
            whole.append(record)
    return whole, skipped


def newest_whole(store: CheckpointStore) -> CommitRecord:
    """The newest whole generation.

    Raises:
        NoCheckpoint: there is none; the message says what is there instead.
    """
    whole, skipped = find_whole(store)
    if not whole:
        found = (
            "; ".join(f"{one.generation}: {one.reason}" for one in skipped)
            or "nothing was saved there"
        )
        raise NoCheckpoint(f"{store.location} has no whole checkpoint ({found})")
    return whole[0]


def prune(store: CheckpointStore, committed: str, keep_last: int) -> None:
    """Remove all but the newest `keep_last` committed generations, and saves before `committed`
    that did not finish.

    Called after `committed` was committed. What cannot be removed is logged and left for the next
    time: the save has succeeded.
    """
    try:
        older = [name for name in list_generations(store) if name < committed]
        kept = 1
        for generation in reversed(older):
            if store.size(f"{generation}/{COMMIT_NAME}") is not None and kept < keep_last:
                kept += 1
                continue
            # The record goes first: from then on nobody takes the rest for a checkpoint.
            store.remove_directory(generation, first=COMMIT_NAME)
    except (OSError, CheckpointError) as error:
        _log.warning(
            "old checkpoint not removed", extra={"path": store.location, "reason": str(error)}
        )
