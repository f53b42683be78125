"""The state of a loader over a `UCVolumeDataset`: the whole job's place in its data, in one small
JSON-able dict that is the same on all ranks. Called by `loader`.

Version 2. What a state of version 1 (`streams`) counts becomes part of it: until the epoch ends,
`streams` says which files were delivered before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from trainmount.data.dataset import UCVolumeDataset
from trainmount.data.position import Plan, Position
from trainmount.data.streams import Streams
from trainmount.errors import StateMismatch

__all__ = ["JOB_STATE_VERSION", "Place", "Skipped", "job_state", "place_of"]

_log = logging.getLogger(__name__)

JOB_STATE_VERSION: Final = 2
# How many names of skipped files the state keeps.
_MAX_SKIPPED_NAMES: Final = 100


@dataclass(frozen=True, slots=True)
class Skipped:
    """Files that were missing or damaged and left out."""

    count: int = 0

    names: tuple[str, ...] = ()
    """The first hundred of them."""

    quarantined: Mapping[str, str] = field(default_factory=dict)
    """Those that are not looked at again, by name, and why: all of them."""

    def plus(self, other: Skipped) -> Skipped:
        """With these too."""
        return Skipped(
            self.count + other.count,
            (*self.names, *other.names)[:_MAX_SKIPPED_NAMES],
            {**self.quarantined, **other.quarantined},
        )

    def to_state(self) -> dict[str, Any]:
        """JSON-able."""
        known = {"quarantined": dict(self.quarantined)} if self.quarantined else {}
        return {"count": self.count, "names": list(self.names), **known}

    @classmethod
    def from_state(cls, state: Any) -> Skipped:
        """Raises StateMismatch."""
        match state:
            case {"count": int(count), "names": [*names]}:
                return cls(count, tuple(map(str, names)), state.get("quarantined", {}))
            case {}:
                return cls()
        raise StateMismatch(f"skipped must have a count and names, got {state!r}")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job is."""

    position: Position = field(default_factory=Position)

    streams: Streams | None = None
    """What was delivered of the position's epoch before a position counted; None if nothing."""

    skipped: Skipped = field(default_factory=Skipped)


def job_state(files: UCVolumeDataset, plan: Plan, place: Place) -> dict[str, Any]:
    """The state of version 2."""
    state = {
        "version": JOB_STATE_VERSION,
        "epoch": place.position.epoch,
        "delivered": place.position.delivered,
        "shuffle": files.shuffle,
        "seed": files.seed,
        "global_batch_size": plan.global_batch_size,
        "drop_last": plan.drop_last,
        "skipped": place.skipped.to_state(),
        "manifest": files.manifest.summary(),
    }
    if place.streams is not None:
        state["streams"] = place.streams.to_state()
    return state


def place_of(state: Mapping[str, Any], files: UCVolumeDataset, plan: Plan) -> Place:
    """What a state of version 2 says.

    Raises:
        ManifestChanged: it is of other files; the first that differs is named.
        StateMismatch: another seed or shuffle, or a place that cannot be.
    """
    files.manifest.check(state.get("manifest", {}), files.path)
    for name in ("shuffle", "seed"):
        if state.get(name) != getattr(files, name):
            raise StateMismatch(
                f"the state was taken with {name}={state.get(name)!r}, "
                f"the dataset has {name}={getattr(files, name)!r}; give it the state's"
            )
    epoch, delivered = state.get("epoch"), state.get("delivered")
    if not isinstance(epoch, int) or not isinstance(delivered, int) or epoch < 0:
        raise StateMismatch(
            f"epoch and delivered must be numbers from 0, got {epoch!r} and {delivered!r}"
        )
    if not 0 <= delivered <= len(files):
        raise StateMismatch(f"delivered must be from 0 to {len(files)}, got {delivered}")
    streams = Streams.from_state(state["streams"]) if "streams" in state else None
    if streams is not None:
        streams.check(len(files))
        if delivered < streams.total:
            raise StateMismatch(
                f"delivered must be at least the {streams.total} of streams, got {delivered}"
            )
    saved_batch = state.get("global_batch_size")
    if delivered and saved_batch != plan.global_batch_size:
        _log.warning(
            "resumed with another global batch size: the same samples, in other batches",
            extra={"global_batch_size": plan.global_batch_size, "saved": saved_batch},
        )
    skipped = Skipped.from_state(state.get("skipped", {}))
    if files.on_error != "quarantine":
        skipped = replace(skipped, quarantined={})
    return Place(Position(epoch, delivered), streams, skipped)
