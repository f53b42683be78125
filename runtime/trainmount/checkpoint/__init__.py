"""Checkpoints of whole jobs: `Checkpointer`, and the DCP storage under it.

Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trainmount.checkpoint.checkpointer import EXIT_CODE_ON_SIGTERM, Checkpointer, Resumed
    from trainmount.checkpoint.reader import UCVolumeReader
    from trainmount.checkpoint.saves import SaveMetrics
    from trainmount.checkpoint.torch_format import load_file
    from trainmount.checkpoint.writer import UCVolumeWriter

__all__ = [
    "EXIT_CODE_ON_SIGTERM",
    "Checkpointer",
    "Resumed",
    "SaveMetrics",
    "UCVolumeReader",
    "UCVolumeWriter",
    "load_file",
]

if importlib.util.find_spec("torch") is None:
    raise ImportError(
        "trainmount.checkpoint needs torch: pip install 'trainmount[runtime]'", name="torch"
    )

_MODULES: Final = {
    "EXIT_CODE_ON_SIGTERM": "trainmount.checkpoint.checkpointer",
    "Checkpointer": "trainmount.checkpoint.checkpointer",
    "Resumed": "trainmount.checkpoint.checkpointer",
    "SaveMetrics": "trainmount.checkpoint.saves",
    "UCVolumeReader": "trainmount.checkpoint.reader",
    "UCVolumeWriter": "trainmount.checkpoint.writer",
    "load_file": "trainmount.checkpoint.torch_format",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
