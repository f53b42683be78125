"""The protocol by which a loader saves and restores what it reads. Called by `loader` and by users'
wrappers.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

__all__ = ["Checkpointable", "is_told_its_progress", "tells_its_progress"]


@runtime_checkable
class Checkpointable(Protocol):
    """Something whose progress can be saved and restored: both methods are all it takes."""

    def state_dict(self) -> dict[str, Any]:
        """A JSON-able description of the progress."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a progress that `state_dict` described."""
        ...


def tells_its_progress(dataset: Any) -> bool:
    """True for a Checkpointable, whose state needs no arguments."""
    return isinstance(dataset, Checkpointable) and _takes(dataset.state_dict)


def is_told_its_progress(dataset: Any) -> bool:
    """True for what has a state once it is told how much was delivered, as mosaicml's
    `StreamingDataset` is.
    """
    return isinstance(dataset, Checkpointable) and _takes(
        dataset.state_dict, num_samples=0, from_beginning=True
    )


def _takes(call: Any, **arguments: Any) -> bool:
    try:
        inspect.signature(call).bind(**arguments)
    except TypeError:
        return False
    return True
