"""DCP storage that a checkpoint is read from. Called by torch's `dcp.load`, given by the user or by
`checkpointer`.

Calls, in order: `reset`, `read_metadata` (all ranks: choose the generation),
`set_up_storage_reader`, `prepare_local_plan`, `prepare_global_plan` (first rank: all must have
chosen the same), `read_data` (all ranks: the bytes that the rank's plan needs, see `fetching`).
What torch's own `FileSystemWriter` wrote is read too (`torch_format`).
"""

from __future__ import annotations

import dataclasses
import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainmount.checkpoint.checksums import find_algorithm
from trainmount.checkpoint.fetching import Wanted, fetch, wanted_bytes, wanted_slice
from trainmount.checkpoint.generations import (
    list_generations,
    newest_whole,
    read_metadata,
    read_record,
)
from trainmount.checkpoint.layout import METADATA_NAME, CommitRecord
from trainmount.checkpoint.stores import CheckpointStore, open_store, read_bytes
from trainmount.checkpoint.torch_format import TORCH_METADATA_NAME, check_files, read_torch_items
from trainmount.checkpoint.unpickling import unpickle_metadata
from trainmount.errors import CheckpointError, NoCheckpoint
from trainmount.locations import whole_path

__all__ = ["UCVolumeReader"]


class UCVolumeReader(StorageReader):
    """Reads the newest whole generation below a directory, or the one that is named; where there is
    no generation, the checkpoint of torch's own `FileSystemWriter` in that directory.

    A generation that is not committed is never read; a missing, cut or altered file is refused and
    named.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        generation: str | None = None,
        thread_count: int | None = None,
        _extension_registry: Any = None,
    ) -> None:
        """Nothing is read yet.

        Args:
            path: the directory of the generations.
            generation: a name as `UCVolumeWriter.generation` gives it; default the newest.
            thread_count: ranges that are read at a time, each with up to 8 MiB of memory; None is
                4 from a directory or mount and 8 from a volume.
            _extension_registry: of torch's `FileSystemReader`; must be None.

        Raises:
            ValueError: an argument has no meaning here; names it.
        """
        super().__init__()
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, got {thread_count}")
        if _extension_registry is not None:
            raise ValueError("_extension_registry: extensions are not read; leave it out")
        self._path = whole_path(path)
        self._wanted = generation
        self._thread_count = thread_count
        self._store: CheckpointStore | None = None
        # None for a checkpoint of torch's own.
        self._record: CommitRecord | None = None
        self._items: dict[Any, Any] = {}
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
            self._path = whole_path(checkpoint_id)
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
        if self._wanted is None and not list_generations(store):
            size_bytes = store.size(TORCH_METADATA_NAME)
            if size_bytes is not None:
                return self._read_torch_metadata(store, size_bytes)
        if self._wanted is None:
            record = newest_whole(store)
        else:
            found = read_record(store, self._wanted)
            if found is None:
                raise NoCheckpoint(f"{store.location}/{self._wanted} is not a committed checkpoint")
            record = found
        path = f"{store.location}/{record.generation}/{METADATA_NAME}"
        metadata = unpickle_metadata(read_metadata(store, record), path)
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
        chosen = self._record.generation if self._record else TORCH_METADATA_NAME
        return dataclasses.replace(plan, storage_data=chosen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        chosen = sorted({str(plan.storage_data) for plan in plans})
        if len(chosen) > 1:
            raise CheckpointError(
                f"{self._path}: ranks chose different generations ({', '.join(chosen)}) because "
                "one was committed meanwhile; name the generation"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        store = self._open()
        if self._record is None:
            self.num_bytes_read += read_torch_items(store, self._items, plan, planner)
        else:
            self._fetch(store, self._record, plan, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _fetch(
        self, store: CheckpointStore, record: CommitRecord, plan: LoadPlan, planner: LoadPlanner
    ) -> None:
        wanted: list[Wanted] = []
        objects: list[tuple[ReadItem, bytearray]] = []
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        for request in plan.items:
            item = self._items[request.storage_index]
            name = request.storage_index.fqn
            if request.type == LoadItemType.BYTE_IO:
                data = bytearray(item.length)
                objects.append((request, data))
                wanted.append(wanted_bytes(item, name, data))
                continue
            target = planner.resolve_tensor(request).detach()
            lengths = tuple(request.lengths)
            if tuple(target.size()) != lengths:
                raise CheckpointError(
                    f"{name}: the program's tensor is {tuple(target.size())}, the plan reads "
                    f"{lengths}"
                )
            tensors.append((request, target))
            wanted.append(wanted_slice(item, name, tuple(request.storage_offsets), lengths, target))
        algorithm = find_algorithm(record.algorithm)
        self.num_bytes_read += fetch(
            store, record.generation, wanted, algorithm, self._thread_count or store.num_readers
        )
        # By one thread: planners are not made for several.
        for request, data in objects:
            planner.load_bytes(request, io.BytesIO(data))
        for request, target in tensors:
            planner.commit_tensor(request, target)

    def _read_torch_metadata(self, store: CheckpointStore, size_bytes: int) -> Metadata:
        data = bytes(read_bytes(store, TORCH_METADATA_NAME, size_bytes))
        metadata = unpickle_metadata(data, f"{store.location}/{TORCH_METADATA_NAME}")
        check_files(store, metadata.storage_data or {})
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        self._record = None
        return metadata

    def _open(self) -> CheckpointStore:
        if self._store is None:
            self._store = open_store(self._path)
        return self._store
