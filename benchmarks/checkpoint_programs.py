"""The programs that save and load a checkpoint, each by another library. Each runs in a process of
its own (`measure.run_program`), one of them in another environment, so that nothing of this project
is imported at the top. Called for `checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from measure import Timing, measured

if TYPE_CHECKING:
    import torch

__all__ = [
    "load_by_peer",
    "load_by_torch",
    "load_by_trainmount",
    "save_by_peer",
    "save_by_torch",
    "save_by_trainmount",
]

_NUM_TENSORS: Final = 8


def save_by_trainmount(path: str, size_bytes: int) -> Timing:
    from programs import load_client
    from torch.distributed.checkpoint.state_dict_saver import save

    from trainmount.data import UCVolumeWriter

    load_client()
    state = _state(size_bytes)
    with measured() as timing:
        save(state, storage_writer=UCVolumeWriter(path))
    return timing


def save_by_torch(path: str, size_bytes: int) -> Timing:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _state(size_bytes)
    with measured() as timing:
        save(state, storage_writer=FileSystemWriter(path))
    return timing


def load_by_trainmount(path: str, size_bytes: int) -> Timing:
    from programs import load_client
    from torch.distributed.checkpoint.state_dict_loader import load

    from trainmount.data import UCVolumeReader

    load_client()
    state = _state(size_bytes, is_empty=True)
    with measured() as timing:
        load(state, storage_reader=UCVolumeReader(path))
    _check(state)
    return timing


def load_by_torch(path: str, size_bytes: int) -> Timing:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(size_bytes, is_empty=True)
    with measured() as timing:
        load(state, storage_reader=FileSystemReader(path))
    _check(state)
    return timing


def save_by_peer(path: str, size_bytes: int) -> Timing:
    from databricks.air.data import UCVolumeWriter  # type: ignore[import-not-found]
    from torch.distributed.checkpoint.state_dict_saver import save

    state = _state(size_bytes)
    with measured() as timing:
        save(state, storage_writer=UCVolumeWriter(path))
    return timing


def load_by_peer(path: str, size_bytes: int) -> Timing:
    from databricks.air.data import UCVolumeReader
    from torch.distributed.checkpoint.state_dict_loader import load

    state = _state(size_bytes, is_empty=True)
    with measured() as timing:
        load(state, storage_reader=UCVolumeReader(path))
    _check(state)
    return timing


def _state(size_bytes: int, *, is_empty: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of one size, each full of another number; of zeros where they will be loaded."""
    import torch

    length = size_bytes // _NUM_TENSORS // 4
    return {
        f"layer-{number}": torch.full((length,), 0.0 if is_empty else number + 1.0)
        for number in range(_NUM_TENSORS)
    }


def _check(state: Mapping[str, torch.Tensor]) -> None:
    for number in range(_NUM_TENSORS):
        tensor = state[f"layer-{number}"]
        if not bool((tensor == number + 1.0).all()):
            raise RuntimeError(f"tensor {number} was not loaded as it was saved")
