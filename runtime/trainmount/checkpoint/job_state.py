"""What a job consists of, as one dictionary for DCP: models, optimizers, objects, loader, random
numbers. Called by `checkpointer`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

from trainmount.checkpoint import randomness
from trainmount.checkpoint.gradient_order import GradientOrder
from trainmount.checkpoint.layout import CommitRecord
from trainmount.data.loader import DataLoader
from trainmount.data.state import Skipped
from trainmount.distributed import Group, gather, grid_of_process
from trainmount.errors import RanksDisagree, StateMismatch

__all__ = ["JobState"]

_LOADER: Final = "loader"
_OBJECT: Final = "object."
_RANDOMNESS: Final = "randomness."
_GRADIENT_ORDER: Final = "gradient_order"


class JobState:
    """The live parts of a job, by name."""

    def __init__(self, state: Mapping[str, Any], loader: DataLoader | None) -> None:
        """Raises TypeError or ValueError, naming the part that cannot be saved."""
        if loader is not None and not isinstance(loader, DataLoader):
            raise TypeError(
                f"loader must be a trainmount.data.DataLoader, got {type(loader).__name__}"
            )
        self._models = {
            name: one
            for name, one in state.items()
            if isinstance(one, nn.Module) and _has_values(one)
        }
        self._optimizers = {
            name: one for name, one in state.items() if isinstance(one, torch.optim.Optimizer)
        }
        self._objects: dict[str, Stateful] = {}
        for name, one in state.items():
            if isinstance(one, nn.Module | torch.optim.Optimizer):
                continue
            if not isinstance(one, Stateful):
                raise TypeError(
                    f"state[{name!r}] must have state_dict and load_state_dict, "
                    f"got {type(one).__name__}"
                )
            self._objects[name] = one
        self._model_of = {name: self._owner(name, one) for name, one in self._optimizers.items()}
        self._loader = loader
        self._orders = {name: GradientOrder(one) for name, one in self._models.items()}

    def capture(self, path: str, global_step: int, group: Group) -> dict[str, Any]:
        """Tensors in the memory that they live in, and everything else as bytes of this moment.

        Called on all ranks. What fails on one is raised on all.

        Raises:
            RanksDisagree: naming `path`, they are not at the same place.
        """
        rank, _ = grid_of_process()
        content: dict[str, Any] = {}

        def capture_here() -> tuple[_Place, Skipped]:
            content.update(self._described())
            for name, one in self._objects.items():
                content[_OBJECT + name] = pickle.dumps(one.state_dict())
            content[f"{_RANDOMNESS}{rank}"] = randomness.capture()
            if self._loader is not None:
                content[self._loader_key(rank)] = self._loader.state_dict()
            return _Place.of(global_step, self._loader), _skipped_by(self._loader)

        places, skipped = zip(*gather(capture_here, group), strict=True)
        places[0].check_same(places, path)
        if self._loader is not None:
            key = self._loader_key(rank)
            others = (*skipped[:rank], *skipped[rank + 1 :])
            content[key] = json.dumps(_with_skipped(content[key], others)).encode()
        return content

    def extra(self) -> dict[str, Any]:
        """What belongs into the commit record; JSON-able."""
        states = {name: one.state() for name, one in self._orders.items()}
        known = {name: state for name, state in states.items() if state is not None}
        return {_GRADIENT_ORDER: known} if known else {}

    def template(self, record: CommitRecord) -> dict[str, Any]:
        """What to load of a checkpoint, and where to.

        Raises:
            StateMismatch: the loader's states are one for each rank, and there were other ranks.
        """
        rank, world_size = grid_of_process()
        content = self._described()
        for name in self._objects:
            content[_OBJECT + name] = b""
        if self._loader is not None:
            if not self._loader.has_state_of_job and record.world_size != world_size:
                raise StateMismatch(
                    f"the loader's dataset has a state for each of {record.world_size} ranks, and "
                    f"there are {world_size} now; resume on {record.world_size} ranks"
                )
            content[self._loader_key(rank)] = b""
        content[self._randomness_key(record)] = b""
        return content

    def restore(self, content: Mapping[str, Any], record: CommitRecord, group: Group) -> None:
        """Put everything into the state that was loaded into a template.

        Called on all ranks. What fails on one is raised on all.
        """

        def restore_here() -> None:
            if self._loader is not None:
                key = self._loader_key(grid_of_process()[0])
                self._loader.load_state_dict(json.loads(content[key]))
            for name, model in self._models.items():
                set_model_state_dict(model, content[name])
            for name, optimizer in self._optimizers.items():
                set_optimizer_state_dict(self._model_of[name], optimizer, content[name])
            for name, one in self._objects.items():
                one.load_state_dict(pickle.loads(content[_OBJECT + name]))  # noqa: S301 - a checkpoint of the job itself

        gather(restore_here, group)
        for name, state in record.extra.get(_GRADIENT_ORDER, {}).items():
            if name in self._orders:
                self._orders[name].restore(state)
        captured = content[self._randomness_key(record)]
        rank, _ = grid_of_process()
        if rank < record.world_size:
            randomness.restore(captured)
        else:
            randomness.restore_derived(captured, rank)

    def settle(self) -> None:
        """Called after a step: stop watching what is known by now."""
        for order in self._orders.values():
            order.settle()

    def close(self) -> None:
        """Leave the models as they were found."""
        for order in self._orders.values():
            order.close()

    # Private

    def _owner(self, name: str, optimizer: torch.optim.Optimizer) -> nn.Module:
        """The model whose parameters the optimizer steps."""
        stepped = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        for model in self._models.values():
            if stepped <= {id(parameter) for parameter in model.parameters()}:
                return model
        raise ValueError(f"state[{name!r}] has parameters of no model in state: add the model")

    def _described(self) -> dict[str, Any]:
        """Models and optimizers by parameters' names, in the memory they live in: what DCP saves,
        and loads into.
        """
        content: dict[str, Any] = {
            name: get_model_state_dict(model) for name, model in self._models.items()
        }
        for name, optimizer in self._optimizers.items():
            content[name] = get_optimizer_state_dict(self._model_of[name], optimizer)
        return content

    def _loader_key(self, rank: int) -> str:
        """One state for the job, or one a rank."""
        assert self._loader is not None
        return _LOADER if self._loader.has_state_of_job else f"{_LOADER}.{rank}"

    def _randomness_key(self, record: CommitRecord) -> str:
        rank, _ = grid_of_process()
        return f"{_RANDOMNESS}{rank if rank < record.world_size else 0}"


def _has_values(model: nn.Module) -> bool:
    """Whether there is anything to save. Of a loss, say, there is not, and torch would ask for a
    process group.
    """
    return next(model.parameters(), None) is not None or bool(model.state_dict())


def _skipped_by(loader: DataLoader | None) -> Skipped:
    """What this rank has left out since it was started, and all that it knows in quarantine."""
    if loader is None:
        return Skipped()
    return Skipped(loader.num_skipped, loader.skipped, loader.quarantined)


def _with_skipped(state: dict[str, Any], others: Iterable[Skipped]) -> dict[str, Any]:
    """A loader's state, with what the other ranks have left out where it is the whole job's."""
    if "skipped" not in state:
        return state
    total = Skipped.from_state(state["skipped"])
    for one in others:
        total = total.plus(one)
    return {**state, "skipped": total.to_state()}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a rank is when it saves."""

    step: int
    epoch: int = 0
    sample: int = 0

    @classmethod
    def of(cls, step: int, loader: DataLoader | None) -> _Place:
        if loader is None or not loader.has_position:
            return cls(step)
        return cls(step, loader.position.epoch, loader.position.delivered)

    def check_same(self, others: Iterable[_Place], path: str) -> None:
        for rank, other in enumerate(others):
            if other != self:
                raise RanksDisagree(
                    f"{path}: rank 0 saves at step {self.step}, epoch {self.epoch}, "
                    f"sample {self.sample}; rank {rank} at step {other.step}, epoch {other.epoch}, "
                    f"sample {other.sample}. Save on all ranks after the same step (a last batch "
                    "with fewer samples than ranks needs drop_last=True)"
                )
