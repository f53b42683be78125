"""The protocol by which a loader saves and restores what it reads. Called by `loader` and by users'
wrappers.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Checkpointable"]


@runtime_checkable
class Checkpointable(Protocol):
    """Something whose progress can be saved and restored: both methods are all it takes."""

    def state_dict(self) -> dict[str, Any]:
        """A JSON-able description of the progress."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a progress that `state_dict` described."""
        ...
