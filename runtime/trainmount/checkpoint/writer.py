"""DCP storage that a checkpoint is written to. Called by torch's `dcp.save`/`async_save`, given by
the user or by `checkpointer`.

Calls, in order: `reset`, `set_up_storage_writer`, `prepare_local_plan` (all ranks),
`prepare_global_plan` (first rank: names the generation), `write_data` (all ranks: the bytes, then
the caller's own files), `finish` (first rank: metadata, commit record, then removal of old
generations). torch gathers each step's errors and raises on all ranks, so that `finish` runs only
when every thread of every rank has succeeded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import io
import os
import pickle
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainmount.checkpoint.generations import list_generations, prune, read_record
from trainmount.checkpoint.layout import (
    BLOCK_BYTES,
    COMMIT_NAME,
    METADATA_NAME,
    CommitRecord,
    StoredFile,
    StoredItem,
    new_generation,
    shard_name,
)
from trainmount.checkpoint.stores import CheckpointStore, open_store
from trainmount.errors import CheckpointError

__all__ = ["UCVolumeWriter"]

_METADATA_PROTOCOL: Final = 4


@dataclass(frozen=True)
class _Target:
    """What the first rank tells each rank in its plan."""

    generation: str
    rank: int


@dataclass(frozen=True)
class _Written:
    """What a rank tells the first one of an item: where it is, and of the file when it is the
    file's first item.
    """

    item: StoredItem
    file: StoredFile | None


class UCVolumeWriter(StorageWriter):
    """Writes each save into a new generation below a directory and commits it last.

    A save that fails leaves the committed ones as they are. `path` is a directory on a mount or
    anywhere, or `/Volumes/...` that is not mounted (then files are streamed to the volume, with no
    local copy).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        thread_count: int = 1,
        single_file_per_rank: bool = True,
        overwrite: bool = True,
        keep_last: int = 2,
        keep: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is written yet.

        Args:
            path: holds the generations; made if need be.
            thread_count: files that each rank writes at a time.
            single_file_per_rank: False writes each tensor into a file of its own.
            overwrite: False refuses to save where a committed checkpoint is.
            keep_last: how many committed generations stay, the new one included; at least 1.
            keep: names of generations that stay besides.
            extra: goes into the commit record; JSON-able.
            before_commit: called on each rank after its bytes are written and before the commit;
                what it raises fails the save on all ranks.
        """
        super().__init__()
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, got {thread_count}")
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        self._path = os.fspath(path)
        self._store: CheckpointStore | None = None
        self._thread_count = thread_count
        self._single_file_per_rank = single_file_per_rank
        self._overwrite = overwrite
        self._keep_last = keep_last
        self._keep = frozenset(keep)
        self._extra = dict(extra or {})
        self._before_commit = before_commit
        self._generation = ""
        self._record: CommitRecord | None = None
        self._num_ranks = 1

    @property
    def checkpoint_id(self) -> str:
        """The directory of the generations."""
        return self._path

    @property
    def generation(self) -> str:
        """On the first rank, the generation of the last save; empty before the first."""
        return self._generation

    @property
    def record(self) -> CommitRecord | None:
        """On the first rank, what the last save committed; None before the first."""
        return self._record

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = os.fspath(checkpoint_id)
            self._store = None

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - torch's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False cannot be committed as a whole; save with collectives"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store = self._open()
        existing = list_generations(store)
        if not self._overwrite:
            committed = [name for name in existing if read_record(store, name) is not None]
            if committed:
                raise CheckpointError(
                    f"{store.location}/{committed[-1]} is committed and overwrite is False"
                )
        self._generation = new_generation(existing)
        self._num_ranks = len(plans)
        store.make_directory(self._generation)
        return [
            dataclasses.replace(plan, storage_data=_Target(self._generation, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target: _Target = plan.storage_data
        store = self._open()
        store.make_directory(target.generation)
        if self._single_file_per_rank:
            buckets = _balanced(plan.items, self._thread_count)
        else:
            buckets = [[item] for item in plan.items]
        with ThreadPoolExecutor(
            self._thread_count, thread_name_prefix="checkpoint-writer"
        ) as threads:
            running = [
                threads.submit(
                    _write_file,
                    store,
                    target.generation,
                    shard_name(target.rank, number),
                    bucket,
                    planner,
                )
                for number, bucket in enumerate(buckets)
            ]
            done, others = wait(running, return_when=FIRST_EXCEPTION)
            for one in others:
                one.cancel()
        # Raises what failed: a save is whole only if every thread is.
        results = [
            result for one in (*done, *others) if not one.cancelled() for result in one.result()
        ]
        if self._before_commit is not None:
            self._before_commit()
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = self._open()
        written = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data.item for result in written}
        files = [
            result.storage_data.file for result in written if result.storage_data.file is not None
        ]
        pickled = pickle.dumps(metadata, protocol=_METADATA_PROTOCOL)
        sink = store.create(f"{self._generation}/{METADATA_NAME}")
        try:
            sink.write(memoryview(pickled))
            sink.close()
        except BaseException:
            sink.abort()
            raise
        files.append(StoredFile(METADATA_NAME, len(pickled), f"crc32:{zlib.crc32(pickled):08x}"))
        record = CommitRecord(
            generation=self._generation,
            world_size=self._num_ranks,
            files=tuple(files),
            extra=self._extra,
        )
        store.publish(f"{self._generation}/{COMMIT_NAME}", record.to_json())
        self._record = record
        prune(store, self._generation, self._keep_last, self._keep)

    def _open(self) -> CheckpointStore:
        if self._store is None:
            self._store = open_store(self._path)
        return self._store


def _write_file(
    store: CheckpointStore,
    generation: str,
    file_name: str,
    items: Iterable[WriteItem],
    planner: SavePlanner,
) -> list[WriteResult]:
    sink = store.create(f"{generation}/{file_name}")
    stored: list[tuple[WriteItem, StoredItem]] = []
    offset, file_checksum = 0, 0
    try:
        for item in items:
            dtype, shape, pieces = _content(item, planner)
            length, checksums = 0, []
            for block in pieces:
                sink.write(block)
                length += len(block)
                checksums.append(zlib.crc32(block))
                file_checksum = zlib.crc32(block, file_checksum)
            stored.append(
                (item, StoredItem(file_name, offset, length, tuple(checksums), dtype, shape))
            )
            offset += length
        sink.close()
    except BaseException:
        sink.abort()
        raise
    file = StoredFile(file_name, offset, f"crc32:{file_checksum:08x}")
    return [
        WriteResult(item.index, place.length, _Written(place, file if number == 0 else None))
        for number, (item, place) in enumerate(stored)
    ]


def _content(
    item: WriteItem, planner: SavePlanner
) -> tuple[str, tuple[int, ...], Iterator[memoryview]]:
    """The dtype's name and the shape (empty for an object), and the bytes in blocks of
    `BLOCK_BYTES`.
    """
    data = planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return "", (), _blocks(data.getbuffer())
    assert isinstance(data, torch.Tensor)
    tensor = data.detach()
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(
            f"{item.index.fqn}: only dense tensors can be saved, this is {tensor.layout}"
        )
    tensor = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _tensor_blocks(tensor)


def _tensor_blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    if tensor.nbytes:
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        yield from _blocks(memoryview(memory).cast("B"))


def _blocks(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), BLOCK_BYTES):
        yield memory[start : start + BLOCK_BYTES]


def _balanced(items: list[WriteItem], num_buckets: int) -> list[list[WriteItem]]:
    """The items in as many buckets of about the same size; empty buckets are left out."""
    buckets: list[list[WriteItem]] = [[] for _ in range(num_buckets)]
    sizes = [0] * num_buckets
    for item in sorted(items, key=_size_hint, reverse=True):
        smallest = sizes.index(min(sizes))
        buckets[smallest].append(item)
        sizes[smallest] += _size_hint(item) + 1
    return [bucket for bucket in buckets if bucket]


def _size_hint(item: WriteItem) -> int:
    return item.tensor_storage_size() or 0 if item.tensor_data is not None else 0
