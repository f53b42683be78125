"""One cached version of one file on disk: its blocks and the index that says which are there.

`<digest>.data` is a sparse file in which block i stands at i * block_size. `<digest>.index` is a
header and one record a block. A record is written after the block's bytes, and holds their
checksum: a record without bytes (the machine died, somebody cut the file) is found out when the
block is first used. Only `blocks` makes these; `lock` is held by every caller that changes what is
present.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import threading
import zlib
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["BlockFile", "FileKey", "RecordError"]

_HEADER: Final = struct.Struct("<8sIIQ40x")
_MAGIC: Final = b"tmblock1"
_RECORD: Final = struct.Struct("<II")
_PRESENT: Final = 1

_FALLOC_FL_KEEP_SIZE: Final = 1
_FALLOC_FL_PUNCH_HOLE: Final = 2
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class RecordError(Exception):
    """The index on disk is not one of this version of the file."""


@dataclass(frozen=True, slots=True)
class FileKey:
    """What a cached file is the content of."""

    path: str
    version: str
    size_bytes: int

    def digest(self, block_size_bytes: int) -> str:
        """Name of the files on disk. Another block size is another file."""
        text = "\0".join((self.path, self.version, str(self.size_bytes), str(block_size_bytes)))
        return hashlib.sha256(text.encode()).hexdigest()[:40]


class BlockFile:
    """The blocks of one `FileKey`. Thread-safe where a method says so; otherwise under `lock`."""

    def __init__(self, directory: Path, key: FileKey, block_size_bytes: int) -> None:
        """Open or make the two files. Raises OSError."""
        self.key = key
        self.block_size_bytes = block_size_bytes
        self.digest = key.digest(block_size_bytes)
        self.num_blocks = -(-key.size_bytes // block_size_bytes)
        self.lock = threading.Lock()
        self.users = 0
        """Open inodes and running fetches that hold this object; guarded by the cache's lock."""

        self.in_flight: dict[int, threading.Event] = {}
        """Blocks that some thread is fetching; the event is set when it has ended, well or not."""

        self.num_evictions = 0
        """Rises before any byte leaves: a read that saw the same number before and after is sound.
        """

        self.is_verified = bytearray(self.num_blocks)
        """Blocks whose checksum was right, or that were written, in this process."""

        self._is_present = bytearray(self.num_blocks)
        self._checksums = array("I", bytes(4 * self.num_blocks))
        base = block_path(directory, self.digest)
        base.parent.mkdir(parents=True, exist_ok=True)
        self._data_path = base.with_suffix(".data")
        self._index_path = base.with_suffix(".index")
        self.data_fd = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._index_fd = os.open(self._index_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            os.close(self.data_fd)
            raise
        try:
            self._read_index()
        except (RecordError, struct.error, ValueError):
            self._start_anew()

    def has(self, first: int, last: int) -> bool:
        """Whether the blocks `first` to `last`, both included, are present. Thread-safe."""
        return self._is_present.find(0, first, last + 1) < 0

    def missing(self, first: int, last: int) -> list[int]:
        """Those of the blocks that are not present. Thread-safe."""
        return [index for index in range(first, last + 1) if not self._is_present[index]]

    def present(self, first: int = 0, last: int | None = None) -> list[int]:
        """The present blocks from `first` to `last`, both included. Thread-safe."""
        end = self.num_blocks if last is None else last + 1
        return [index for index in range(first, end) if self._is_present[index]]

    def length_of(self, index: int) -> int:
        """Bytes of a block; only the last is shorter."""
        return min(self.block_size_bytes, self.key.size_bytes - index * self.block_size_bytes)

    def write(self, first: int, data: memoryview) -> list[int]:
        """Store the bytes of whole blocks from `first` on and return their checksums.

        The blocks must be claimed in `in_flight` and absent; they stay absent until
        `mark_present`. Needs no lock: nothing else touches the bytes of an absent block. Raises
        OSError.
        """
        written = 0
        offset = first * self.block_size_bytes
        while written < len(data):
            written += os.pwrite(self.data_fd, data[written:], offset + written)
        size = self.block_size_bytes
        return [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]

    def mark_present(self, first: int, checksums: list[int]) -> None:
        """The bytes of these blocks are on disk. Raises OSError."""
        records = b"".join(_RECORD.pack(checksum, _PRESENT) for checksum in checksums)
        os.pwrite(self._index_fd, records, _HEADER.size + first * _RECORD.size)
        for index, checksum in enumerate(checksums, first):
            self._checksums[index] = checksum
            self.is_verified[index] = 1
            self._is_present[index] = 1

    def is_sound(self, index: int) -> bool:
        """Read a present block from disk and compare its checksum. Thread-safe."""
        checksum = self._checksums[index]
        length = self.length_of(index)
        data = os.pread(self.data_fd, length, index * self.block_size_bytes)
        return len(data) == length and zlib.crc32(data) == checksum

    def clear(self, first: int, last: int) -> list[int]:
        """Take blocks away, both ends included; returns those that were there. Raises OSError."""
        gone = self.present(first, last)
        for index in gone:
            self._is_present[index] = 0
            self.is_verified[index] = 0
        # After the marks, before the bytes: a reader that saw a mark sees the number change.
        self.num_evictions += 1
        # Absent blocks stay untouched, for a fetch may be writing them.
        for start, end in _spans(gone):
            # The record goes first: a hole that an index still calls present would read as zeros.
            at = _HEADER.size + start * _RECORD.size
            os.pwrite(self._index_fd, bytes((end - start) * _RECORD.size), at)
            offset = start * self.block_size_bytes
            length = (end - start) * self.block_size_bytes
            mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
            # Where the file system has no holes, the space comes back when the file is removed.
            _libc.fallocate(self.data_fd, mode, offset, length)
        return gone

    def move(self, directory: Path, key: FileKey) -> None:
        """The same content under another key. Raises OSError."""
        digest = key.digest(self.block_size_bytes)
        base = block_path(directory, digest)
        base.parent.mkdir(parents=True, exist_ok=True)
        self._index_path.rename(base.with_suffix(".index"))
        self._data_path.rename(base.with_suffix(".data"))
        self._data_path, self._index_path = base.with_suffix(".data"), base.with_suffix(".index")
        self.key, self.digest = key, digest

    def unlink(self) -> None:
        """Remove the names; the bytes go when the last descriptor closes."""
        self._index_path.unlink(missing_ok=True)
        self._data_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Free the descriptors. The time of the index is when the file was last used."""
        try:
            os.utime(self._index_fd)
        finally:
            os.close(self.data_fd)
            os.close(self._index_fd)

    def _read_index(self) -> None:
        header = os.pread(self._index_fd, _HEADER.size, 0)
        magic, block_size, num_blocks, size = _HEADER.unpack(header)
        expected = (_MAGIC, self.block_size_bytes, self.num_blocks, self.key.size_bytes)
        if (magic, block_size, num_blocks, size) != expected:
            raise RecordError("the index belongs to something else")
        records = os.pread(self._index_fd, self.num_blocks * _RECORD.size, _HEADER.size)
        # A short index is one whose last blocks were never written.
        for index, (checksum, state) in enumerate(
            _RECORD.iter_unpack(records[: len(records) // _RECORD.size * _RECORD.size])
        ):
            self._checksums[index] = checksum
            self._is_present[index] = state == _PRESENT

    def _start_anew(self) -> None:
        os.ftruncate(self._index_fd, 0)
        os.ftruncate(self.data_fd, 0)
        header = _HEADER.pack(_MAGIC, self.block_size_bytes, self.num_blocks, self.key.size_bytes)
        os.pwrite(self._index_fd, header, 0)


def block_path(directory: Path, digest: str) -> Path:
    """Where a digest's two files are, without their suffix."""
    return directory / digest[:2] / digest


def _spans(indices: list[int]) -> list[tuple[int, int]]:
    """Ascending numbers as half-open spans without gaps."""
    spans: list[tuple[int, int]] = []
    for index in indices:
        if spans and spans[-1][1] == index:
            spans[-1] = (spans[-1][0], index + 1)
        else:
            spans.append((index, index + 1))
    return spans
