"""Data loading and checkpoint storage with the names and arguments of `databricks.air.data`.

A loader whose one small state continues on any number of ranks and workers, and DCP storage whose
checkpoints are whole or absent. Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainmount.checkpoint.reader import UCVolumeReader
    from trainmount.checkpoint.writer import UCVolumeWriter
    from trainmount.data.checkpointable import Checkpointable
    from trainmount.data.dataset import UCVolumeDataset
    from trainmount.data.loader import DataLoader

__all__ = ["Checkpointable", "DataLoader", "UCVolumeDataset", "UCVolumeReader", "UCVolumeWriter"]

if importlib.util.find_spec("torch") is None:
    raise ImportError(
        "trainmount.data needs torch: pip install 'trainmount[runtime]'", name="torch"
    )

_MODULES: Final = {
    "Checkpointable": "trainmount.data.checkpointable",
    "DataLoader": "trainmount.data.loader",
    "UCVolumeDataset": "trainmount.data.dataset",
    "UCVolumeReader": "trainmount.checkpoint.reader",
    "UCVolumeWriter": "trainmount.checkpoint.writer",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
