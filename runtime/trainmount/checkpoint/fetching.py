"""Reads what a load needs of stored items: only those ranges, neighbours by one request, several at
once, each block verified.

    Wanted -> pieces (a tensor's own memory, or a scratch buffer) -> jobs -> threads

Called by `reader`.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import torch

from trainmount.checkpoint.checksums import Algorithm
from trainmount.checkpoint.layout import BLOCK_BYTES, StoredItem, blocks_of
from trainmount.checkpoint.slices import Part, cut_slice, strides_of
from trainmount.checkpoint.stores import CheckpointStore, GivenUp, OpenFile
from trainmount.errors import DamagedCheckpoint

__all__ = ["Wanted", "fetch", "wanted_bytes", "wanted_slice"]

_REQUEST_BYTES: Final = 32 * BLOCK_BYTES
"""8 MiB: what one request asks for at most, and the scratch memory of a thread."""

_SMALL_BYTES: Final = 4 * BLOCK_BYTES
"""Pieces below are read together with their neighbours, and copied."""

_END_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive bytes of an item, and where they go."""

    item: StoredItem
    name: str
    start: int
    """In bytes, from the item's first."""
    end: int
    target: memoryview | Callable[[memoryview], None]
    """Memory of that length, or what takes the bytes."""

    @property
    def first_block(self) -> int:
        return self.start // self.item.block_bytes

    @property
    def begin(self) -> int:
        """In the file, of the first block."""
        return self.item.offset + self.first_block * self.item.block_bytes

    @property
    def finish(self) -> int:
        """In the file, after the last block."""
        size = self.item.block_bytes
        rounded = -(-self.end // size) * size
        return self.item.offset + min(rounded, self.item.length)

    @property
    def is_small(self) -> bool:
        return self.end - self.start < _SMALL_BYTES

    @property
    def is_in_place(self) -> bool:
        """Whether it can be read, and verified, where it goes."""
        return (
            isinstance(self.target, memoryview)
            and self.finish - self.begin == self.end - self.start
        )


@dataclass(slots=True)
class _Job:
    """Pieces that one request brings; one of them, or neighbours in a file."""

    pieces: list[_Piece]
    begin: int
    finish: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of one item."""

    item: StoredItem
    name: str
    """Of the tensor or object, for messages."""
    pieces: list[_Piece] = field(default_factory=list)


def wanted_bytes(item: StoredItem, name: str, target: bytearray) -> Wanted:
    """All bytes of an item, into `target`."""
    return Wanted(item, name, list(_in_place(item, name, 0, item.length, memoryview(target))))


def wanted_slice(
    item: StoredItem,
    name: str,
    offsets: tuple[int, ...],
    lengths: tuple[int, ...],
    target: torch.Tensor,
) -> Wanted:
    """The sub-tensor of `lengths` at `offsets` of a stored chunk, into `target` of the same shape;
    of any dtype and on any device.
    """
    if math.prod(lengths) == 0:
        return Wanted(item, name)
    dtype: torch.dtype = getattr(torch, item.dtype)
    size = dtype.itemsize
    strides = strides_of(item.shape)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    span = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
    if span == math.prod(lengths) and _lies_as_stored(target, dtype):
        memory = _memory_of(target)
        pieces = _in_place(item, name, first * size, (first + span) * size, memory)
        return Wanted(item, name, list(pieces))
    parts = cut_slice(
        item.shape,
        offsets,
        lengths,
        size,
        limit_bytes=_REQUEST_BYTES - 2 * BLOCK_BYTES,
        hole_bytes=BLOCK_BYTES,
    )
    return Wanted(
        item,
        name,
        [
            _Piece(item, name, part.start, part.end, _copier(part, dtype, strides, target))
            for part in parts
        ],
    )


def fetch(
    store: CheckpointStore,
    generation: str,
    wanted: list[Wanted],
    algorithm: Algorithm,
    thread_count: int,
) -> int:
    """Read everything; returns the number of bytes that were read.

    Raises:
        DamagedCheckpoint: a file is missing, cut or altered; names it and the tensor. What was
            loaded into is undefined then.
    """
    by_file: dict[str, list[_Piece]] = {}
    for one in wanted:
        by_file.setdefault(one.item.file_name, []).extend(one.pieces)
    readers: list[_Reader] = []
    stop = threading.Event()
    threads = ThreadPoolExecutor(thread_count, thread_name_prefix="checkpoint-reader")
    running: list[Future[int]] = []
    try:
        for file_name, pieces in sorted(by_file.items()):
            if not pieces:
                continue
            jobs = list(_jobs(pieces))
            reader = _Reader(store, f"{generation}/{file_name}", algorithm, stop, len(jobs))
            readers.append(reader)
            running += [threads.submit(reader.run, job) for job in jobs]
        wait(running, return_when=FIRST_EXCEPTION)
        failures = [error for one in running if one.done() and (error := one.exception())]
        if failures:
            raise min(failures, key=lambda error: isinstance(error, GivenUp))
        return sum(one.result() for one in running)
    finally:
        stop.set()
        threads.shutdown(wait=False, cancel_futures=True)
        if not wait(running, _END_SECONDS).not_done:
            # Otherwise a thread that hangs would read from another file of the same number.
            for reader in readers:
                reader.close()


class _Reader:
    """Carries out the jobs of one file, which is open from the first to the end of the last: of a
    checkpoint of thousands of files a process cannot have all open. Any thread may call.
    """

    def __init__(
        self,
        store: CheckpointStore,
        name: str,
        algorithm: Algorithm,
        stop: threading.Event,
        num_jobs: int,
    ) -> None:
        self._store = store
        self._name = name
        self._path = f"{store.location}/{name}"
        self._algorithm = algorithm
        self._stop = stop
        self._lock = threading.Lock()
        self._file: OpenFile | None = None
        self._num_left = num_jobs

    def run(self, job: _Job) -> int:
        try:
            return self._run(job, self._opened())
        finally:
            with self._lock:
                self._num_left -= 1
                is_last = not self._num_left
            if is_last:
                self.close()

    def close(self) -> None:
        """May be called again. No job may be running."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def _opened(self) -> OpenFile:
        with self._lock:
            if self._file is None:
                self._file = self._store.open(self._name)
            return self._file

    def _run(self, job: _Job, file: OpenFile) -> int:
        length = job.finish - job.begin
        only = job.pieces[0]
        if len(job.pieces) == 1 and only.is_in_place:
            assert isinstance(only.target, memoryview)
            self._read(job, file, only.target)
            self._verify(only, only.target)
            return length
        scratch = memoryview(bytearray(length))
        self._read(job, file, scratch)
        for piece in job.pieces:
            blocks = scratch[piece.begin - job.begin : piece.finish - job.begin]
            self._verify(piece, blocks)
            start = piece.start - piece.first_block * piece.item.block_bytes
            data = blocks[start : start + piece.end - piece.start]
            if isinstance(piece.target, memoryview):
                piece.target[:] = data
            else:
                piece.target(data)
        return length

    def _read(self, job: _Job, file: OpenFile, target: memoryview) -> None:
        try:
            file.read_into(job.begin, target, self._stop)
        except DamagedCheckpoint as error:
            raise DamagedCheckpoint(f"{error}; {job.pieces[0].name} is in it") from error

    def _verify(self, piece: _Piece, blocks: memoryview) -> None:
        size = piece.item.block_bytes
        for number, block in enumerate(blocks_of(blocks, size), start=piece.first_block):
            if self._algorithm.of(block) != piece.item.checksums[number]:
                at = piece.item.offset + number * size
                raise DamagedCheckpoint(
                    f"{self._path} is damaged: {piece.name} does not match its checksum in the "
                    f"{len(block)} bytes from byte {at}"
                )


def _in_place(
    item: StoredItem, name: str, start: int, end: int, target: memoryview
) -> Iterator[_Piece]:
    """The bytes from `start` to `end` in pieces that begin and end at blocks where they can."""
    at = start
    while at < end:
        until = min(end, (at // _REQUEST_BYTES + 1) * _REQUEST_BYTES)
        yield _Piece(item, name, at, until, target[at - start : until - start])
        at = until


def _jobs(pieces: list[_Piece]) -> Iterator[_Job]:
    """Small pieces with their neighbours, large ones alone; in the file's order."""
    open_job: _Job | None = None
    for piece in sorted(pieces, key=lambda piece: (piece.begin, piece.finish)):
        if not piece.is_small:
            yield _Job([piece], piece.begin, piece.finish)
            continue
        if open_job is not None and _belongs_to(piece, open_job):
            open_job.pieces.append(piece)
            open_job.finish = max(open_job.finish, piece.finish)
            continue
        if open_job is not None:
            yield open_job
        open_job = _Job([piece], piece.begin, piece.finish)
    if open_job is not None:
        yield open_job


def _belongs_to(piece: _Piece, job: _Job) -> bool:
    """Whether one request for both is better: with at most a twentieth of what nobody needs."""
    hole = piece.begin - job.finish
    if piece.finish - job.begin > _REQUEST_BYTES:
        return False
    return hole * 20 <= job.finish - job.begin


def _copier(
    part: Part, dtype: torch.dtype, strides: tuple[int, ...], target: torch.Tensor
) -> Callable[[memoryview], None]:
    """What puts the bytes from a part's first to its last element into the sub-tensor."""

    def copy(data: memoryview) -> None:
        flat = torch.frombuffer(data, dtype=torch.uint8)
        if flat.data_ptr() % dtype.itemsize:
            # In the scratch buffer, elements may lie anywhere.
            flat = flat.clone()
        flat = flat.view(dtype)
        place = target
        for axis, (offset, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
            place = place.narrow(axis, offset, length)
        place.copy_(flat.as_strided(part.lengths, strides))

    return copy


def _lies_as_stored(target: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        target.device.type == "cpu"
        and target.dtype == dtype
        and target.layout == torch.strided
        and target.is_contiguous()
        and not target.is_conj()
        and not target.is_neg()
    )


def _memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor, to be written to."""
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    memory.tensor = tensor  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")
