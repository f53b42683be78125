"""The random number generators of a process, saved and restored. Called by `checkpointer`."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
from typing import Any

import torch

__all__ = ["capture", "restore", "restore_derived"]


def capture() -> bytes:
    """The states of Python's, torch's (CPU and the current GPU) and, where it is in use, NumPy's
    global generator.
    """
    states: dict[str, Any] = {
        "python": random.getstate(),
        "torch": bytes(torch.get_rng_state().tolist()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    return pickle.dumps(states)


def restore(captured: bytes) -> None:
    """Put this process's generators into the captured states."""
    states = pickle.loads(captured)  # noqa: S301 - a checkpoint of the job itself
    random.setstate(states["python"])
    torch.set_rng_state(torch.tensor(list(states["torch"]), dtype=torch.uint8))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(list(states["cuda"]), dtype=torch.uint8))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def restore_derived(captured: bytes, rank: int) -> None:
    """For a rank that the saved job did not have: seeds that follow from another rank's state and
    the rank's number.
    """
    seed = int.from_bytes(hashlib.sha256(captured + rank.to_bytes(8, "big")).digest()[:8], "big")
    random.seed(seed)
    torch.manual_seed(seed & 0x7FFF_FFFF_FFFF_FFFF)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFF_FFFF)
