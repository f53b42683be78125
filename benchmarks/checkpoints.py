"""Saving and loading a checkpoint with torch's DCP: this project's storage against torch's own on
the local disk, and on a mount or straight to the volume against moving the same bytes as one file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    measured,
    run_program,
    take_turns,
)
from places import ROOT, Mount, Store, link_tree, mounted, serving, write_blocks
from programs import load_client
from topics import Setting, as_rate

if TYPE_CHECKING:
    import torch

__all__ = ["load_by_torch", "load_by_trainmount", "run", "save_by_torch", "save_by_trainmount"]

NUM_TENSORS = 8


def run(setting: Setting) -> list[Comparison]:
    with serving(setting.folder / "store") as store:
        results = _on_disk(setting)
        with mounted(store, setting.folder / "mount") as mount:
            results += _saves(setting, store, mount)
            results += _loads(setting, store, mount)
    return results


def _on_disk(setting: Setting) -> list[Comparison]:
    disk = setting.folder / "disk"

    def side(program: str, name: str) -> Sample:
        return _sample(_run(setting, program, disk / name))

    def save(program: str, name: str) -> Sample:
        # Both write into an empty directory: to remove an old checkpoint is no part of a save.
        shutil.rmtree(disk / name, ignore_errors=True)
        return side(program, name)

    saved, saved_by_torch = take_turns(
        {
            "save, trainmount": lambda _round: save("save_by_trainmount", "ours"),
            "save, torch": lambda _round: save("save_by_torch", "torch"),
        },
        setting.repeats,
    ).values()
    loaded, loaded_by_torch = take_turns(
        {
            "load, trainmount": lambda _round: side("load_by_trainmount", "ours"),
            "load, torch": lambda _round: side("load_by_torch", "torch"),
        },
        setting.repeats,
    ).values()
    shutil.rmtree(disk)
    unit = as_rate(setting.checkpoint_mib * MIB)
    size = f"{setting.checkpoint_mib} MiB"
    return [
        compare(
            f"checkpoint: save {size} on the local disk, with checksums",
            "torch's FileSystemWriter",
            saved,
            saved_by_torch,
            unit,
        ),
        compare(
            f"checkpoint: load {size} from the local disk, checksums verified, page cache warm",
            "torch's FileSystemReader",
            loaded,
            loaded_by_torch,
            unit,
        ),
    ]


def _saves(setting: Setting, store: Store, mount: Mount) -> list[Comparison]:
    source = setting.folder / "same-bytes"
    write_blocks(source, setting.checkpoint_mib * MIB)

    def through_mount(number: int) -> Sample:
        path = mount.path / f"mounted-{number}"
        return mount.sample(lambda: _run(setting, "save_by_trainmount", path))

    def through_client(number: int) -> Sample:
        path = f"{ROOT}/streamed-{number}"
        return _sample(_run(setting, "save_by_trainmount", path, store.environment))

    def upload(number: int) -> Sample:
        arguments = {"source": str(source), "path": f"{ROOT}/file-{number}"}
        return _sample(_move("upload_client", arguments, store))

    ours, streamed, theirs = take_turns(
        {"save, mount": through_mount, "save, volume": through_client, "upload": upload},
        setting.repeats,
    ).values()
    source.unlink()
    unit = as_rate(setting.checkpoint_mib * MIB)
    size = f"{setting.checkpoint_mib} MiB"
    peer = "volume client's upload of a local file of the same size"
    return [
        compare(f"checkpoint: save {size} on the mount", peer, ours, theirs, unit),
        compare(
            f"checkpoint: save {size} to the volume without a mount", peer, streamed, theirs, unit
        ),
    ]


def _loads(setting: Setting, store: Store, mount: Mount) -> list[Comparison]:
    """Of checkpoints that this mount has never seen, as on a node that takes a job over."""
    for number in range(setting.repeats):
        link_tree(store.directory / "streamed-0", store.directory / f"unseen-{number}")

    def through_mount(number: int) -> Sample:
        path = mount.path / f"unseen-{number}"
        return mount.sample(lambda: _run(setting, "load_by_trainmount", path))

    def through_client(number: int) -> Sample:
        path = f"{ROOT}/unseen-{number}"
        return _sample(_run(setting, "load_by_trainmount", path, store.environment))

    def download(_round: int) -> Sample:
        arguments = {"path": f"{ROOT}/file-0", "size_bytes": setting.checkpoint_mib * MIB}
        return _sample(_move("read_client", arguments, store))

    ours, direct, theirs = take_turns(
        {"load, mount": through_mount, "load, volume": through_client, "download": download},
        setting.repeats,
    ).values()
    unit = as_rate(setting.checkpoint_mib * MIB)
    size = f"{setting.checkpoint_mib} MiB"
    peer = "volume client, a file of the same size into memory"
    return [
        compare(f"checkpoint: load {size} on the mount, nothing cached", peer, ours, theirs, unit),
        compare(
            f"checkpoint: load {size} from the volume without a mount", peer, direct, theirs, unit
        ),
    ]


# In a process of their own


def save_by_trainmount(path: str, size_bytes: int) -> Timing:
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


def _state(size_bytes: int, *, is_empty: bool = False) -> dict[str, torch.Tensor]:
    """Tensors of one size, each full of another number; of zeros where they will be loaded."""
    import torch

    length = size_bytes // NUM_TENSORS // 4
    return {
        f"layer-{number}": torch.full((length,), 0.0 if is_empty else number + 1.0)
        for number in range(NUM_TENSORS)
    }


def _check(state: Mapping[str, torch.Tensor]) -> None:
    for number in range(NUM_TENSORS):
        tensor = state[f"layer-{number}"]
        if not bool((tensor == number + 1.0).all()):
            raise RuntimeError(f"tensor {number} was not loaded as it was saved")


# Outside


def _run(
    setting: Setting, program: str, path: Path | str, environment: Mapping[str, str] | None = None
) -> Timing:
    arguments = {"path": str(path), "size_bytes": setting.checkpoint_mib * MIB}
    return run_program(
        Program(
            module="checkpoints", name=program, arguments=arguments, environment=environment or {}
        )
    )


def _move(program: str, arguments: Mapping[str, object], store: Store) -> Timing:
    return run_program(
        Program(module="programs", name=program, arguments=arguments, environment=store.environment)
    )


def _sample(timing: Timing) -> Sample:
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)
