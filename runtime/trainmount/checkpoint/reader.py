"""DCP storage that a checkpoint is read from. Called by torch's `dcp.load`, given by the user or by
`checkpointer`.

Calls, in order: `reset`, `read_metadata` (all ranks: choose the generation),
`set_up_storage_reader`, `prepare_local_plan`, `prepare_global_plan` (first rank: all must have
chosen the same), `read_data` (all ranks: the bytes that the rank's plan needs, each block
verified).
"""

from __future__ import annotations

import dataclasses
import enum
import io
import math
import os
import pickle
import zlib
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainmount.checkpoint.generations import newest_whole, read_metadata, read_record
from trainmount.checkpoint.layout import BLOCK_BYTES, CommitRecord, StoredItem
from trainmount.checkpoint.stores import CheckpointStore, open_store
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

__all__ = ["UCVolumeReader"]

_MAY_BE_UNPICKLED: Final = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("trainmount.checkpoint.layout", "StoredItem"),
}


class UCVolumeReader(StorageReader):
    """Reads the newest whole generation below a directory, or the one that is named.

    A generation that is not committed is never read; a missing, cut or altered file is refused and
    named.
    """

    def __init__(self, path: str | os.PathLike[str], *, generation: str | None = None) -> None:
        """Nothing is read yet. `generation` is a name as `UCVolumeWriter.generation` gives it;
        default the newest.
        """
        super().__init__()
        self._path = os.fspath(path)
        self._wanted = generation
        self._store: CheckpointStore | None = None
        self._record: CommitRecord | None = None
        self._items: dict[Any, StoredItem] = {}
        self.num_bytes_read = 0
        """Bytes of tensors and objects that this rank has read so far."""

    @property
    def checkpoint_id(self) -> str:
        """The directory of the generations."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
            self._store = None
        self._record = None
        self._items = {}

    def read_metadata(self) -> Metadata:
        """Choose the generation. Without torch's keyword arguments: there is no metadata of a
        single rank.

        Raises:
            NoCheckpoint: nothing whole is there, or not the generation that was asked for.
            DamagedCheckpoint: a file of it is missing, cut or altered.
        """
        store = self._open()
        if self._wanted is None:
            record = newest_whole(store)
        else:
            found = read_record(store, self._wanted)
            if found is None:
                raise NoCheckpoint(f"{store.location}/{self._wanted} is not a committed checkpoint")
            record = found
        metadata = _unpickle(read_metadata(store, record), f"{store.location}/{record.generation}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        self._record = record
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002 - torch's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        self._items = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self._record is not None
        return dataclasses.replace(plan, storage_data=self._record.generation)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise CheckpointError(
                f"{self._path}: ranks chose different generations ({', '.join(chosen)}) because "
                "one was committed meanwhile; name the generation"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for request in sorted(plan.items, key=self._place):
            self._read(request, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(self, request: ReadItem) -> tuple[str, int]:
        item = self._items[request.storage_index]
        return item.file_name, item.offset

    def _read(self, request: ReadItem, planner: LoadPlanner) -> None:
        item = self._items[request.storage_index]
        name = request.storage_index.fqn
        if request.type == LoadItemType.BYTE_IO:
            planner.load_bytes(request, io.BytesIO(self._read_span(item, 0, item.length, name)))
            return
        target = planner.resolve_tensor(request).detach()
        lengths = tuple(request.lengths)
        if tuple(target.size()) != lengths:
            raise CheckpointError(
                f"{name}: the program's tensor is {tuple(target.size())}, the plan reads {lengths}"
            )
        if math.prod(lengths) > 0:
            target.copy_(self._read_slice(item, tuple(request.storage_offsets), lengths, name))
        planner.commit_tensor(request, target)

    def _read_slice(
        self, item: StoredItem, offsets: tuple[int, ...], lengths: tuple[int, ...], name: str
    ) -> torch.Tensor:
        """The sub-tensor of the stored chunk at `offsets`; reads from its first to its last
        element.
        """
        dtype = getattr(torch, item.dtype)
        strides = [math.prod(item.shape[axis + 1 :]) for axis in range(len(item.shape))]
        first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
        last = first + sum(
            (length - 1) * stride for length, stride in zip(lengths, strides, strict=True)
        )
        size = dtype.itemsize
        span = self._read_span(item, first * size, (last + 1) * size, name)
        flat = torch.frombuffer(span, dtype=torch.uint8).view(dtype)
        return flat.as_strided(lengths, strides)

    def _read_span(self, item: StoredItem, start: int, end: int, name: str) -> bytearray:
        """The item's bytes from `start` to `end`, out of whole blocks that were verified."""
        assert self._record is not None
        first_block = start // BLOCK_BYTES
        from_byte = first_block * BLOCK_BYTES
        to_byte = min(item.length, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        store = self._open()
        file_name = f"{self._record.generation}/{item.file_name}"
        data = store.read(file_name, item.offset + from_byte, to_byte - from_byte)
        self.num_bytes_read += len(data)
        view = memoryview(data)
        for number, begin in enumerate(range(0, len(data), BLOCK_BYTES), start=first_block):
            if zlib.crc32(view[begin : begin + BLOCK_BYTES]) != item.checksums[number]:
                at = item.offset + number * BLOCK_BYTES
                raise DamagedCheckpoint(
                    f"{store.location}/{file_name} is damaged: {name} does not match its checksum "
                    f"in the {BLOCK_BYTES} bytes from byte {at}"
                )
        if start == from_byte and end == to_byte:
            return data
        return data[start - from_byte : end - from_byte]

    def _open(self) -> CheckpointStore:
        if self._store is None:
            self._store = open_store(self._path)
        return self._store


class _MetadataUnpickler(pickle.Unpickler):
    """Makes only what checkpoint metadata consists of: the file may be anybody's who can write to
    the volume.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" or (module, name) in _MAY_BE_UNPICKLED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            # How Python before 3.11.4 writes a member of an enumeration.
            return _enum_member
        if module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout)
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into checkpoint metadata")


def _enum_member(kind: object, name: str) -> enum.Enum:
    """`kind.name`, for a member of an enumeration and for nothing else."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"{name} of {kind!r} does not belong into checkpoint metadata")
    try:
        member: enum.Enum = kind[name]
    except KeyError:
        raise pickle.UnpicklingError(f"{kind.__name__} has no member {name!r}") from None
    return member


def _unpickle(data: bytes, where: str) -> Metadata:
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        AttributeError,
        ImportError,
        IndexError,
        TypeError,
    ) as error:
        raise DamagedCheckpoint(
            f"{where}/metadata cannot be read by this version of torch: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(f"{where}/metadata does not hold checkpoint metadata")
    return metadata
