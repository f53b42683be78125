"""What the block cache counts. Made by `blocks`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheStatistics"]


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Counters of this process since the start, and what is here now."""

    num_hits: int
    """Reads that needed nothing from the store."""

    num_misses: int
    cached_bytes: int
    """Blocks on disk, of all mounts that share the directory."""

    space_bytes: int
    """Space that they take, bounded by `limit_bytes`."""

    limit_bytes: int
    fetched_bytes: int
    evicted_bytes: int
    """Thrown out by this process, for room or since nobody will ask for it again."""

    num_bad_blocks: int
    """Blocks whose bytes on disk were not what had been written; each was fetched again."""

    num_files: int
    """Versions of files that this process knows."""

    held_bytes: int
    """Memory of blocks that wait to be written or read."""

    dropped_bytes: int
    """Fetched and not written, since the disk was too slow, too full or broken."""
