"""Bytes of a file in order, fetched ahead of whoever takes them. Called by the command line, fsspec
and `torch.load`.

A reader has a chain of pieces that follow its position without a gap: some there, some on their
way. Reading on in order makes the pieces longer and the chain too; a jump out of the chain begins a
new one with a short piece.
"""

from __future__ import annotations

import io
import mmap
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, Final

from trainmount_files.cancellation import LinkedEvent
from trainmount_files.errors import Cancelled, InexactRange, IsADirectory, PreconditionFailed
from trainmount_files.per_process import PerProcess
from trainmount_files.transfer.parts import anonymous
from trainmount_files.transfer.workers import Workers
from trainmount_files.volume import MIB, ByteRange, FileStat, Volume

__all__ = ["VolumeReader", "iterate", "open_reader"]

_FIRST_BYTES: Final = MIB
"""After a jump, where nobody knows whether more will be read in order."""

_END_SECONDS: Final = 30.0
"""Threads of a reader that was closed end at once; this only bounds the wait for them."""


def iterate(
    volume: Volume,
    path: str,
    byte_range: ByteRange | None = None,
    *,
    version: str | None = None,
    known: FileStat | None = None,
    block_bytes: int = 8 * MIB,
    read_ahead: int = 4,
    cancel: threading.Event | None = None,
) -> Iterator[bytes]:
    """The bytes of a file, or of a range of it, in order and in blocks.

    At most `read_ahead` blocks are in memory besides the one that was handed out. All are of one
    version. An iterator that is closed or forgotten in the middle leaves no thread behind. `known`
    is what a listing has said of the file: it saves a request.

    Raises, when the first block is asked for or later:
        PreconditionFailed: the file is another version than `version`, or changed meanwhile.
        InexactRange: the range reaches past the end.
        Cancelled: `cancel` was set.
    """
    found = _found(volume, path, version, known)
    wanted = byte_range if byte_range is not None else ByteRange(0, found.size_bytes)
    if wanted.end > found.size_bytes:
        raise InexactRange("read", path, "the range reaches past the end of the file")
    chain = _Chain(volume, found, block_bytes, read_ahead, cancel)
    try:
        chain.start(wanted.start, wanted.end, first_bytes=block_bytes, depth=read_ahead)
        while chain.position < wanted.end:
            yield chain.take()
    finally:
        chain.close()


def open_reader(
    volume: Volume,
    path: str,
    *,
    version: str | None = None,
    known: FileStat | None = None,
    block_bytes: int = 8 * MIB,
    read_ahead: int = 4,
    cancel: threading.Event | None = None,
) -> VolumeReader:
    """A seekable binary file of one version of `path`; see `VolumeReader`. `known` as in `iterate`.

    Raises:
        NotFound, IsADirectory. PreconditionFailed: the file is another version than `version`.
    """
    found = _found(volume, path, version, known)
    return VolumeReader(volume, found, block_bytes, read_ahead, cancel)


def _found(volume: Volume, path: str, version: str | None, known: FileStat | None) -> FileStat:
    found = known if known is not None else volume.stat(path)
    if found.is_directory:
        raise IsADirectory("read", path, "is a directory")
    if version is not None and found.version != version:
        raise PreconditionFailed("read", path, "the file has changed")
    return found


class VolumeReader(io.RawIOBase):
    """A file of a volume as a binary file. Used by one thread at a time; may be forked.

    What is read is always of the version that was there when it was opened: a file that changes
    raises PreconditionFailed. A read that failed may be tried again.
    """

    def __init__(
        self,
        volume: Volume,
        found: FileStat,
        block_bytes: int,
        read_ahead: int,
        cancel: threading.Event | None,
    ) -> None:
        super().__init__()
        self._found = found
        self._position = 0
        self._chain = PerProcess(lambda: _Chain(volume, found, block_bytes, read_ahead, cancel))

    def __repr__(self) -> str:
        return f"VolumeReader({self._found.path!r})"

    @property
    def stat(self) -> FileStat:
        """The file as it was when it was opened."""
        return self._found

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._check_open()
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._found.size_bytes
        elif whence != io.SEEK_SET:
            raise ValueError(f"whence must be 0, 1 or 2, got {whence}")
        if offset < 0:
            raise ValueError(f"the position must not be negative, got {offset}")
        self._position = offset
        return offset

    def readinto(self, buffer: Any, /) -> int:
        """Fill `buffer` as far as the file goes, which is more than a raw file has to."""
        self._check_open()
        target = memoryview(buffer).cast("B")
        end = min(self._position + len(target), self._found.size_bytes)
        wanted = max(end - self._position, 0)
        if wanted:
            self._chain.get().read_into(self._position, target[:wanted])
            self._position += wanted
        return wanted

    def readall(self) -> bytes:
        buffer = bytearray(max(self._found.size_bytes - self.tell(), 0))
        self.readinto(buffer)
        return bytes(buffer)

    def close(self) -> None:
        if not self.closed:
            # In a forked child there may be none.
            chain = self._chain.peek()
            if chain is not None:
                chain.close()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("read of a closed file")


class _Piece:
    """Consecutive bytes: there, on their way, or fetched by whoever needs them first."""

    def __init__(self, wanted: ByteRange, coming: Future[mmap.mmap] | Callable[[], mmap.mmap]):
        self.wanted = wanted
        self._coming = coming
        self._memory: mmap.mmap | None = None

    @property
    def is_there(self) -> bool:
        return self._memory is not None

    @property
    def is_on_its_way(self) -> bool:
        return isinstance(self._coming, Future) and not self._coming.done()

    def memory(self) -> mmap.mmap:
        """Its bytes; waits for them. Raises what the fetch failed with."""
        if self._memory is None:
            coming = self._coming
            self._memory = coming.result() if isinstance(coming, Future) else coming()
        return self._memory


class _Chain:
    """The pieces from a position on, see the head of this module. Used by one thread."""

    def __init__(
        self,
        volume: Volume,
        found: FileStat,
        block_bytes: int,
        read_ahead: int,
        cancel: threading.Event | None,
    ) -> None:
        if block_bytes < 1 or read_ahead < 1:
            raise ValueError(
                f"must be at least 1: block_bytes={block_bytes}, read_ahead={read_ahead}"
            )
        self._volume = volume
        self._found = found
        self._block_bytes = block_bytes
        self._read_ahead = read_ahead
        self._cancel = cancel
        # Of the present pieces: those that a jump leaves behind are broken off.
        self._stop = LinkedEvent(cancel)
        self._workers: Workers | None = None
        self._pieces: deque[_Piece] = deque()
        # Memory of blocks that were taken, for those that follow.
        self._spare: list[mmap.mmap] = []
        self._next_start = 0
        self._next_bytes = 0
        self._end = 0
        self._depth = 1
        self.position = 0

    def start(self, position: int, end: int, *, first_bytes: int, depth: int) -> None:
        """Begin anew at `position`; nothing from `end` on is fetched ahead."""
        self._drop()
        self.position = self._next_start = position
        self._next_bytes = min(first_bytes, self._block_bytes)
        self._end = end
        self._depth = depth

    def take(self) -> bytes:
        """The next piece as a whole."""
        self._extend()
        piece = self._pieces[0]
        data = bytes(self._content(piece))
        self._forget_first()
        self.position = piece.wanted.end
        return data

    def read_into(self, position: int, target: memoryview) -> None:
        """Fill `target`, which lies inside the file, from `position`."""
        self._go_to(position, len(target))
        while target:
            self._extend()
            piece = self._pieces[0]
            data = self._content(piece)
            offset = self.position - piece.wanted.start
            count = min(len(target), len(data) - offset)
            target[:count] = data[offset : offset + count]
            data.release()
            target = target[count:]
            self.position += count
            if self.position == piece.wanted.end:
                self._forget_first()
                # Read to its end: more will follow.
                self._depth = min(self._depth * 2, self._read_ahead)

    def close(self) -> None:
        self._drop()
        if self._workers is not None:
            self._workers.close(_END_SECONDS)
            self._workers = None

    def _go_to(self, position: int, length: int) -> None:
        """Let the chain begin at `position`: by leaving pieces out where it reaches that far."""
        begin = self._pieces[0].wanted.start if self._pieces else self._next_start
        if not begin <= position <= self._next_start or (not self._pieces and not self._next_bytes):
            first = max(_FIRST_BYTES, length)
            self.start(position, self._found.size_bytes, first_bytes=first, depth=1)
            return
        while self._pieces and self._pieces[0].wanted.end <= position:
            self._forget_first()
        self.position = position

    def _extend(self) -> None:
        """Ask for pieces until the chain is as long as it should be."""
        while self._next_start < self._end and len(self._pieces) < self._depth:
            end = min(self._next_start + self._next_bytes, self._end)
            wanted = ByteRange(self._next_start, end)
            fetch = self._fetcher(wanted)
            if self._depth == 1 or (not self._pieces and end == self._end):
                # Nothing else to do meanwhile: a small file needs no thread.
                self._pieces.append(_Piece(wanted, fetch))
            else:
                if self._workers is None:
                    self._workers = Workers(self._read_ahead, "trainmount-read")
                self._pieces.append(_Piece(wanted, self._workers.submit(fetch)))
            self._next_start = end
            self._next_bytes = min(self._next_bytes * 2, self._block_bytes)

    def _fetcher(self, wanted: ByteRange) -> Callable[[], mmap.mmap]:
        """Gets a piece; the memory is taken now, by the reader's own thread."""
        volume, found, stop = self._volume, self._found, self._stop
        whole = len(wanted) == self._block_bytes
        memory = self._spare.pop() if whole and self._spare else anonymous(len(wanted))

        def fetch() -> mmap.mmap:
            with memoryview(memory) as buffer:
                version = found.version or None
                volume.read_into(found.path, wanted, buffer, version=version, cancel=stop)
            return memory

        return fetch

    def _content(self, piece: _Piece) -> memoryview:
        """Wait for a piece. After a failure it and what follows will be asked for again."""
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("read", self._found.path, "cancelled")
        try:
            return memoryview(piece.memory())
        except BaseException:
            at = self.position
            self.start(at, self._end, first_bytes=len(piece.wanted), depth=self._depth)
            raise

    def _forget_first(self) -> None:
        piece = self._pieces.popleft()
        if piece.is_there and len(piece.wanted) == self._block_bytes:
            self._spare.append(piece.memory())

    def _drop(self) -> None:
        if any(piece.is_on_its_way for piece in self._pieces):
            self._stop.set()
            self._stop = LinkedEvent(self._cancel)
        self._pieces.clear()
