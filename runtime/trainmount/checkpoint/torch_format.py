"""What torch itself has written: checkpoints of its `FileSystemWriter`, and files of `torch.save`;
on a mount, or straight from a volume.

`reader` calls the first for a directory that has torch's `.metadata` and no generation; users call
`load_file`.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Mapping
from typing import IO, Any, Final, cast

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from trainmount.checkpoint.stores import CheckpointStore
from trainmount.errors import CheckpointError, DamagedCheckpoint
from trainmount.locations import is_local, local_path

__all__ = ["TORCH_METADATA_NAME", "check_files", "load_file", "read_torch_items"]

TORCH_METADATA_NAME: Final = ".metadata"

_UNREADABLE: Final = (
    RuntimeError,
    pickle.UnpicklingError,
    ValueError,
    EOFError,
    KeyError,
    zipfile.BadZipFile,
)
"""What torch raises of bytes that it did not write."""


def load_file(
    path: str | os.PathLike[str],
    map_location: Any = None,
    *,
    weights_only: bool = True,
    **options: Any,
) -> Any:
    """What `torch.save` stored at `path`: a local file, one on a mount, or `/Volumes/...` that is
    not mounted, which is read straight into the tensors.

    Args:
        path: the file.
        map_location: as `torch.load` takes it.
        weights_only: False runs whatever code the file has in it; only for files of your own.
        options: further arguments of `torch.load`; `mmap` is for local files only.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    name = os.fspath(path)
    options |= {"map_location": map_location, "weights_only": weights_only}
    if is_local(name):
        local = local_path(name)
        if not local.is_file():
            raise CheckpointError(f"{name} is no file")
        return torch.load(local, **options)
    from trainmount_files import open_volume
    from trainmount_files.errors import VolumeError
    from trainmount_files.transfer import open_reader

    directory, _, file_name = name.rpartition("/")
    try:
        with open_reader(open_volume(directory), file_name) as file:
            return torch.load(cast("IO[bytes]", io.BufferedReader(file)), **options)
    except VolumeError as error:
        raise CheckpointError(f"{name} cannot be read: {error.reason}") from error


def check_files(store: CheckpointStore, items: Mapping[Any, Any]) -> None:
    """See that every file is there and long enough for what is said to be in it.

    Raises:
        DamagedCheckpoint: names the file and the tensor.
    """
    ends: dict[str, tuple[int, str]] = {}
    for index, place in items.items():
        end = place.offset + place.length
        ends[place.relative_path] = max(ends.get(place.relative_path, (0, "")), (end, index.fqn))
    sizes = store.sizes("")
    for file_name, (end, name) in sorted(ends.items()):
        path = f"{store.location}/{file_name}"
        found = sizes.get(file_name, store.size(file_name))
        if found is None:
            raise DamagedCheckpoint(f"{path} is missing; {name} is in it")
        if found < end:
            raise DamagedCheckpoint(f"{path} has {found} bytes, {name} in it reaches to byte {end}")


def read_torch_items(
    store: CheckpointStore, items: Mapping[Any, Any], plan: LoadPlan, planner: LoadPlanner
) -> int:
    """Carry out a plan over a checkpoint of torch's own writer; returns the bytes of the items that
    were read, each of them whole, as torch does.

    Raises:
        DamagedCheckpoint: a file is missing, cut or unreadable; names it and the tensor. Such
            checkpoints have no checksums: other bytes inside a tensor are not noticed.
    """
    by_file: dict[str, list[ReadItem]] = {}
    for request in plan.items:
        by_file.setdefault(items[request.storage_index].relative_path, []).append(request)
    num_bytes = 0
    for file_name, requests in sorted(by_file.items()):
        path = f"{store.location}/{file_name}"
        requests.sort(key=lambda request: items[request.storage_index].offset)
        with store.stream(file_name) as file:
            for request in requests:
                place = items[request.storage_index]
                if getattr(place, "transform_descriptors", None):
                    raise CheckpointError(
                        f"{path}: {request.storage_index.fqn} was written with an extension "
                        f"({', '.join(place.transform_descriptors)}); load it with torch's reader"
                    )
                _read_item(cast("IO[bytes]", _Section(file, place)), path, request, planner)
                num_bytes += place.length
    return num_bytes


def _read_item(file: IO[bytes], path: str, request: ReadItem, planner: LoadPlanner) -> None:
    name = request.storage_index.fqn
    try:
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(file.read()))
            return
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise DamagedCheckpoint(f"{path} is damaged: {name} cannot be read: {error}") from error
    for axis, (offset, length) in enumerate(
        zip(request.storage_offsets, request.lengths, strict=True)
    ):
        tensor = tensor.narrow(axis, offset, length)
    target = planner.resolve_tensor(request).detach()
    if target.size() != tensor.size():
        raise CheckpointError(
            f"{name}: the program's tensor is {tuple(target.size())}, the plan reads "
            f"{tuple(tensor.size())}"
        )
    target.copy_(tensor)
    planner.commit_tensor(request, target)


class _Section(io.RawIOBase):
    """An item's part of a file, as a file."""

    def __init__(self, file: IO[bytes], place: Any) -> None:
        super().__init__()
        self._file = file
        self._start: int = place.offset
        self._length: int = place.length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(target)  # type: ignore[attr-defined]
        self._position += count
        return count
