"""The bytes of one rank: its items in files, several at once, from the memory they are in.

    write_shards -> _write_shard (a thread a file) -> _pieces_of (an item's bytes) -> store.write

Called by `writer`.
"""

from __future__ import annotations

import ctypes
import io
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trainmount.checkpoint.checksums import Algorithm, Running
from trainmount.checkpoint.layout import (
    BLOCK_BYTES,
    StoredFile,
    StoredItem,
    block_bytes_of,
    blocks_of,
    shard_name,
)
from trainmount.checkpoint.stores import CheckpointStore, GivenUp
from trainmount.errors import CheckpointError

__all__ = ["ShardOptions", "Written", "write_shards"]

_POLL_SECONDS: Final = 0.2
"""How soon a rank notices that another one has failed."""

_END_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """How a rank writes its files."""

    thread_count: int
    """Files that are written at a time."""

    is_file_per_item: bool
    is_synced: bool

    staged_bytes: int
    """Of a tensor that is on a GPU, or is not contiguous, this much is copied at a time; a multiple
    of `BLOCK_BYTES`.
    """

    algorithm: Algorithm


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells the first one of an item: where it is, and of the file when it is the
    file's first item.
    """

    item: StoredItem
    file: StoredFile | None


def write_shards(
    store: CheckpointStore,
    generation: str,
    rank: int,
    items: list[WriteItem],
    planner: SavePlanner,
    options: ShardOptions,
    failed_elsewhere: Callable[[], str | None],
) -> list[WriteResult]:
    """Write all items of this rank; returns when all of it is stored.

    After the first failure, of a thread here or, as `failed_elsewhere` says, of another rank, the
    other threads give up at once.

    Raises:
        GivenUp: another rank failed. Otherwise what the first failed thread raised.
    """
    if options.is_file_per_item:
        buckets = [[item] for item in items]
    else:
        buckets = _balanced(items, options.thread_count)
    stop = threading.Event()
    num_writers = max(1, min(options.thread_count, len(buckets)))
    running: list[Future[list[WriteResult]]] = []
    threads = ThreadPoolExecutor(num_writers, thread_name_prefix="checkpoint-writer")
    try:
        running = [
            threads.submit(
                _Shard(store, generation, shard_name(rank, number), options).write,
                bucket,
                planner,
                stop,
                num_writers,
            )
            for number, bucket in enumerate(buckets)
        ]
        _wait(running, stop, failed_elsewhere)
        return [result for one in running for result in one.result()]
    finally:
        # After a failure or an interrupt nobody waits long for a store that is slow: what it still
        # stores belongs to a generation that will never be committed.
        stop.set()
        threads.shutdown(wait=False, cancel_futures=True)
        wait(running, _END_SECONDS)


def _wait(
    running: list[Future[list[WriteResult]]],
    stop: threading.Event,
    failed_elsewhere: Callable[[], str | None],
) -> None:
    """Until all are done; raises the cause of the first failure, here or elsewhere."""
    while True:
        done, others = wait(running, _POLL_SECONDS, FIRST_EXCEPTION)
        failures = [error for one in done if (error := one.exception()) is not None]
        if failures:
            raise min(failures, key=lambda error: isinstance(error, GivenUp))
        if not others:
            return
        reason = failed_elsewhere()
        if reason is not None:
            stop.set()
            raise GivenUp(f"given up because {reason}")


@dataclass(slots=True)
class _Item:
    """An item that is being written."""

    request: WriteItem
    offset: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    checksums: list[int] = field(default_factory=list)


class _Shard:
    """One file of a rank. Used by one thread."""

    def __init__(
        self, store: CheckpointStore, generation: str, name: str, options: ShardOptions
    ) -> None:
        self._store = store
        self._path = f"{generation}/{name}"
        self._name = name
        self._options = options
        self._checksum: Running = options.algorithm.start()
        self._items: list[_Item] = []
        self._size = 0

    def write(
        self,
        requests: list[WriteItem],
        planner: SavePlanner,
        stop: threading.Event,
        num_writers: int,
    ) -> list[WriteResult]:
        expected = sum(map(_size_hint, requests))
        self._store.write(
            self._path,
            self._pieces(requests, planner, self._store.piece_bytes(expected)),
            stop,
            num_writers=num_writers,
            is_synced=self._options.is_synced,
        )
        checksum = self._options.algorithm.text(self._checksum.intdigest())
        file = StoredFile(self._name, self._size, checksum)
        return [
            WriteResult(
                item.request.index,
                item.length,
                Written(self._stored(item), None if number else file),
            )
            for number, item in enumerate(self._items)
        ]

    def _pieces(
        self, requests: list[WriteItem], planner: SavePlanner, piece_bytes: int
    ) -> Iterator[memoryview]:
        """The file's bytes. Each piece is checked right before the store takes it, so that its
        bytes are in the processor's cache.
        """
        of = self._options.algorithm.of
        for request in requests:
            item, pieces = self._begin(request, planner, piece_bytes)
            block_bytes = block_bytes_of(item.length)
            for piece in pieces:
                for block in blocks_of(piece, block_bytes):
                    item.checksums.append(of(block))
                    self._checksum.update(block)
                yield piece
            self._size += item.length

    def _begin(
        self, request: WriteItem, planner: SavePlanner, piece_bytes: int
    ) -> tuple[_Item, Iterator[memoryview]]:
        data = planner.resolve_data(request)
        if request.type == WriteItemType.BYTE_IO:
            assert isinstance(data, io.BytesIO)
            memory = data.getbuffer()
            item = _Item(request, self._size, len(memory), "", ())
            pieces = _cut(memory, piece_bytes)
        else:
            assert isinstance(data, torch.Tensor)
            tensor = data.detach()
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(
                    f"{request.index.fqn}: only dense tensors can be saved, this is {tensor.layout}"
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            item = _Item(request, self._size, tensor.nbytes, dtype, tuple(tensor.shape))
            pieces = _tensor_pieces(tensor, piece_bytes, self._options.staged_bytes)
        self._items.append(item)
        return item, pieces

    def _stored(self, item: _Item) -> StoredItem:
        return StoredItem(
            self._name, item.offset, item.length, tuple(item.checksums), item.dtype, item.shape
        )


def _tensor_pieces(
    tensor: torch.Tensor, piece_bytes: int, staged_bytes: int
) -> Iterator[memoryview]:
    """The elements in row-major order; each piece but the last is a multiple of `BLOCK_BYTES` long.
    Views of the tensor's own memory where its elements lie there as they are stored.
    """
    is_in_place = (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if is_in_place:
        yield from _cut(_memory_of(tensor), piece_bytes)
        return
    staged, filled = memoryview(b""), 0
    for part in _small_parts(tensor, staged_bytes):
        memory = _memory_of(part.cpu().resolve_conj().resolve_neg().contiguous())
        while memory:
            if not staged:
                staged = memoryview(bytearray(staged_bytes))
            count = min(len(memory), staged_bytes - filled)
            staged[filled : filled + count] = memory[:count]
            memory = memory[count:]
            filled += count
            if filled == staged_bytes:
                yield staged
                staged, filled = memoryview(b""), 0
    if filled:
        yield staged[:filled]


def _small_parts(tensor: torch.Tensor, limit_bytes: int) -> Iterator[torch.Tensor]:
    """The tensor in slices of at most `limit_bytes`, in row-major order."""
    if tensor.nbytes <= limit_bytes:
        if tensor.nbytes:
            yield tensor
        return
    row_bytes = tensor.nbytes // tensor.shape[0]
    if row_bytes > limit_bytes:
        for row in tensor:
            yield from _small_parts(row, limit_bytes)
        return
    count = limit_bytes // row_bytes
    for start in range(0, tensor.shape[0], count):
        yield tensor.narrow(0, start, min(count, tensor.shape[0] - start))


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU; the view keeps the tensor alive."""
    if not tensor.nbytes:
        return memoryview(b"")
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    # A part may be sent after everybody else has forgotten the tensor.
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _cut(memory: memoryview, piece_bytes: int) -> Iterator[memoryview]:
    length = max(BLOCK_BYTES, piece_bytes // BLOCK_BYTES * BLOCK_BYTES)
    for start in range(0, len(memory), length):
        yield memory[start : start + length]


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
    """In bytes; 0 for an object, whose size shows later."""
    data = item.tensor_data
    if data is None:
        return 0
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
