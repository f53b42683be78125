"""Lets a resumed DistributedDataParallel add gradients in the order of the run that was saved.
Called by `job_state`.

DDP reduces gradients in buckets. After its first step (with a static graph, after the second) it
sorts them into new buckets, by the order in which they became ready. A process that resumes would
sort only after *its* first step; until then it adds in another order on more than two ranks, and
the weights differ in their last bits from those of a run that went on. So the order is saved with
the checkpoint, and a fresh DDP is led through it before the first step, with gradients of zero.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.hooks import RemovableHandle

from trainmount.distributed import grid_of_process

__all__ = ["GradientOrder"]

_ORDER: Final = "order"
_NUM_PASSES: Final = "passes"


class GradientOrder:
    """The order of the gradients of one model, watched in the first backward passes.

    A model that is no DDP and stands in none, or one that never makes new buckets
    (`find_unused_parameters=True`), has none.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: DistributedDataParallel | None = None
        self._parameters: list[nn.Parameter] = []
        self._ready: list[int] = []
        self._hooks: list[RemovableHandle] = []
        found = model if isinstance(model, DistributedDataParallel) else _wrapper_of(model)
        if found is None or (found.find_unused_parameters and not found.static_graph):
            return
        self._model = found
        self._parameters = [one for one in found.parameters() if one.requires_grad]
        for number, parameter in enumerate(self._parameters):
            hook = parameter.register_post_accumulate_grad_hook(self._note(number))  # type: ignore[no-untyped-call]
            self._hooks.append(hook)

    def state(self) -> dict[str, Any] | None:
        """JSON-able; None before the first whole backward pass, and for a model without one."""
        num_passes = len(self._ready) // len(self._parameters) if self._parameters else 0
        if num_passes == 0:
            return None
        return {_ORDER: self._ready[: len(self._parameters)], _NUM_PASSES: num_passes}

    def settle(self) -> None:
        """Watch no longer, once the order is known. Called after a step."""
        if self._hooks and len(self._ready) == self._num_needed():
            self.close()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Make the buckets that the saved run had; its gradients stay as they are.

        Nothing happens to a model that has made a backward pass already, has other parameters, or
        treats its gradients in a way of its own. Called on all ranks: DDP reduces the zeros.
        """
        order = state[_ORDER]
        fits = sorted(order) == list(range(len(self._parameters)))
        if self._model is None or self._ready or not fits or not _is_plain(self._model):
            return
        gradients = [one.grad for one in self._parameters]
        for _ in range(state[_NUM_PASSES]):
            self._pass(self._model, order)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def close(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _note(self, number: int) -> Callable[[torch.Tensor], None]:
        def note(_parameter: torch.Tensor) -> None:
            if len(self._ready) < self._num_needed():
                self._ready.append(number)

        return note

    def _num_needed(self) -> int:
        """Gradients until DDP makes no new buckets any more."""
        is_static = self._model is not None and self._model.static_graph
        return len(self._parameters) * (2 if is_static else 1)

    def _pass(self, model: DistributedDataParallel, order: list[int]) -> None:
        """A backward pass in which the gradients, all zero, become ready in this order."""
        model.reducer.prepare_for_forward()
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
        *others, last = [self._parameters[number] for number in order]
        for parameter in others:
            (parameter.sum() * 0).backward()  # type: ignore[no-untyped-call]
        # As DDP's forward does: with a static graph, the first pass is reduced at its end.
        (loss,) = _DDPSink.apply(weakref.ref(model), last.sum() * 0)
        loss.backward()


def _is_plain(model: DistributedDataParallel) -> bool:
    """Whether a gradient of zero is a gradient like any other: dense, and not seen by a hook that
    keeps something of it.
    """
    if model.mixed_precision is not None or model._comm_hooks or model._use_python_reducer:
        return False
    embeddings = (one for one in model.modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag))
    return not any(one.sparse for one in embeddings)


def _wrapper_of(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP that the model stands in: programs save the one or the other.

    A module does not know what it is part of, so all objects are looked through, once and only
    where there are enough ranks for the order to matter.
    """
    if grid_of_process()[1] <= 2:
        return None
    for one in gc.get_objects():
        # Not isinstance, which asks proxies, whose object may be gone.
        if issubclass(type(one), DistributedDataParallel) and one.module is model:
            found: DistributedDataParallel = one
            return found
    return None
