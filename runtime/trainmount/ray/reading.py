"""Parquet files of volumes and buckets as a dataset. Called by users."""

from __future__ import annotations

from typing import Any

from trainmount.ray.filesystem import build_checkpoint_filesystem
from trainmount.ray.internals import Dataset, ray
from trainmount.ray.storage import StorageOptions, scheme_of

__all__ = ["read_parquet"]


def read_parquet(
    paths: str | list[str],
    *,
    storage_options: StorageOptions | None = None,
    include_row_hash: bool = False,
    filesystem: Any = None,
    **options: Any,
) -> Dataset:
    """`ray.data.read_parquet`, of paths that `build_checkpoint_filesystem` takes.

    With `include_row_hash` each row has a uint64 `row_hash`, made of its file's path and its place
    in what is read of that file: an id for input without a key. It stays the same for other block
    sizes, worker counts and new processes, and is another once a file is renamed or rows of it are
    filtered out in the read; `checkpointing` refuses to resume then.

    `filesystem` and all other options are Ray's.

    Raises:
        ValueError: paths are of different schemes; see also `build_checkpoint_filesystem`.
    """
    names = [paths] if isinstance(paths, str) else list(paths)
    if filesystem is None and names:
        schemes = {scheme_of(name) for name in names}
        if len(schemes) > 1:
            raise ValueError(f"paths must be of one scheme, got {', '.join(sorted(schemes))}")
        if schemes != {"file"}:
            filesystem = build_checkpoint_filesystem(names[0], storage_options)
    return ray.data.read_parquet(
        paths, filesystem=filesystem, include_row_hash=include_row_hash, **options
    )
