"""Which generations are at a path, which of them are whole, and what goes. Called by `writer`,
`reader`, `checkpointer`.

Whole: the commit record is there and every file it lists has the recorded size. Bytes are verified
when they are read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainmount.checkpoint.checksums import find_algorithm
from trainmount.checkpoint.layout import (
    COMMIT_NAME,
    METADATA_NAME,
    CommitRecord,
    generation_number,
)
from trainmount.checkpoint.stores import CheckpointStore, read_bytes
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

__all__ = [
    "SkippedGeneration",
    "inspect_generations",
    "list_generations",
    "newest_whole",
    "prune",
    "read_metadata",
    "read_record",
    "remove_unfinished",
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
    record = CommitRecord.from_json(bytes(read_bytes(store, name, size_bytes)), where)
    sizes = store.sizes(generation)
    for file in record.files:
        found = sizes.get(file.name)
        if found != file.size_bytes:
            # A listing may be a little older than what another node has just stored.
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
    name = f"{record.generation}/{METADATA_NAME}"
    data = bytes(read_bytes(store, name, file.size_bytes))
    algorithm = find_algorithm(record.algorithm)
    if file.checksum != algorithm.text(algorithm.of(data)):
        raise DamagedCheckpoint(f"{path} is damaged: its bytes do not match the recorded checksum")
    return data


def inspect_generations(store: CheckpointStore) -> Iterator[CommitRecord | SkippedGeneration]:
    """Every generation, newest first: the record of a whole one, the reason for any other.

    Each is looked at when it is asked for: the newest whole one costs no look at the others.
    """
    for generation in reversed(list_generations(store)):
        try:
            record = read_record(store, generation)
            if record is not None:
                read_metadata(store, record)
        except DamagedCheckpoint as error:
            yield SkippedGeneration(generation, str(error), is_committed=True)
        else:
            yield record or SkippedGeneration(generation, _NOT_COMMITTED, is_committed=False)


def newest_whole(store: CheckpointStore) -> CommitRecord:
    """The newest whole generation.

    Raises:
        NoCheckpoint: there is none; the message says what is there instead.
    """
    skipped: list[SkippedGeneration] = []
    for one in inspect_generations(store):
        if isinstance(one, CommitRecord):
            return one
        skipped.append(one)
    found = "; ".join(f"{one.generation}: {one.reason}" for one in skipped)
    raise NoCheckpoint(
        f"{store.location} has no whole checkpoint ({found or 'nothing was saved there'})"
    )


def prune(
    store: CheckpointStore, committed: str, keep_last: int, keep: Collection[str] = ()
) -> None:
    """Remove what is older than the newest `keep_last` whole generations, but for those in `keep`,
    and saves before `committed` that did not finish.

    Called after `committed` was committed. What cannot be removed is logged and left for the next
    time: the save has succeeded.
    """
    try:
        generations = list_generations(store)
    except (OSError, CheckpointError) as error:
        _log_left(store.location, error)
        return
    place = generation_number(committed) or 0
    num_whole = 1
    for generation in reversed(generations):
        # One with the same number is being written, by an attempt that does not know yet that it
        # was replaced; after its end, a later save removes it.
        if (generation_number(generation) or 0) >= place:
            continue
        try:
            if num_whole < keep_last:
                skipped = _skipped(store, generation)
                num_whole += skipped is None
                stays = skipped is None or skipped.is_committed
            else:
                stays = generation in keep
            if not stays:
                # The record goes first: from then on nobody takes the rest for a checkpoint.
                store.remove_directory(generation, first=COMMIT_NAME)
        except (OSError, CheckpointError) as error:
            _log_left(f"{store.location}/{generation}", error)


def remove_unfinished(store: CheckpointStore, generations: Sequence[str]) -> None:
    """Remove what saves left that ended before their commit, from the newest of `generations`, the
    oldest first, down to the newest that is committed.

    Called before a save, which may need the room. What cannot be removed is logged and left.
    """
    for generation in reversed(generations):
        try:
            if store.size(f"{generation}/{COMMIT_NAME}") is not None:
                return
            store.remove_directory(generation, first=COMMIT_NAME)
        except (OSError, CheckpointError) as error:
            _log_left(f"{store.location}/{generation}", error)


def _skipped(store: CheckpointStore, generation: str) -> SkippedGeneration | None:
    """Why the generation does not count, as far as its record and its files' sizes tell."""
    try:
        if read_record(store, generation) is None:
            return SkippedGeneration(generation, _NOT_COMMITTED, is_committed=False)
    except DamagedCheckpoint as error:
        return SkippedGeneration(generation, str(error), is_committed=True)
    return None


def _log_left(path: str, error: Exception) -> None:
    _log.warning("old checkpoint not removed", extra={"path": path, "reason": str(error)})
