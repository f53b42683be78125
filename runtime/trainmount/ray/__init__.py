"""Job-level checkpoints of Ray Data: a batch pipeline that was killed goes on with the rows that it
has not written, and each row is written exactly once.

    job.py         `checkpointing`: one block of code around read, transform, write
    checks.py      what would make it wrong, refused before the work
    recovery.py    a run takes up what an earlier one committed
                   -> leftovers.py: what that one did not commit, removed by exact names
    filesystem.py  what Ray writes its checkpoints through -> storage.py: path -> filesystem
    reading.py     `read_parquet` from volumes and buckets
    names.py       which data file belongs to which checkpoint file
    internals.py   what is taken from Ray

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainmount.ray.checks import PipelineRefused, check_pipeline
    from trainmount.ray.filesystem import build_checkpoint_filesystem
    from trainmount.ray.job import checkpointing
    from trainmount.ray.reading import read_parquet

__all__ = [
    "PipelineRefused",
    "build_checkpoint_filesystem",
    "check_pipeline",
    "checkpointing",
    "read_parquet",
]

if any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow")):
    raise ImportError("trainmount.ray needs Ray Data: pip install 'trainmount[ray]'", name="ray")

_MODULES: Final = {
    "PipelineRefused": "trainmount.ray.checks",
    "build_checkpoint_filesystem": "trainmount.ray.filesystem",
    "check_pipeline": "trainmount.ray.checks",
    "checkpointing": "trainmount.ray.job",
    "read_parquet": "trainmount.ray.reading",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
