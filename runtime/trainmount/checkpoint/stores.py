"""The few file operations that checkpoints need, over a directory (a mount too) and over a volume
that is not mounted (`volume_store`).

Called by `generations`, `shards`, `writer` and `reader`. Names are relative to the store, with `/`
between them. What was done already counts as done: a rename or a removal whose answer was lost is
no error.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from trainmount.errors import CheckpointError, DamagedCheckpoint
from trainmount.locations import is_local, local_path

__all__ = [
    "CheckpointStore",
    "DirectoryStore",
    "GivenUp",
    "OpenFile",
    "open_store",
    "read_bytes",
]

_WRITE_BYTES: Final = 1 << 20
"""What one write(2) gets: as much as a FUSE mount takes at once, and it stays in the processor's
cache between its checksum and the copy.
"""

_LOST_ANSWERS: Final = frozenset(
    {errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNABORTED, errno.ECONNRESET, errno.EAGAIN}
)
"""What an fsync says that was cut off, not refused: a mount's daemon was replaced meanwhile."""


class GivenUp(CheckpointError):
    """A save or a load was given up because of a failure elsewhere."""


class OpenFile(Protocol):
    """A file that is being read. Any thread may call."""

    def read_into(self, offset: int, target: memoryview, stop: threading.Event) -> None:
        """Fill all of `target` with the bytes from `offset` on.

        Raises:
            DamagedCheckpoint: the file is missing or too short; names it.
        """
        ...

    def close(self) -> None: ...


class CheckpointStore(Protocol):
    """A directory of generations. Every method may be called from any thread; errors are
    CheckpointError or OSError.
    """

    num_readers: int
    """Threads that read at a time without being told."""

    @property
    def location(self) -> str: ...

    def names(self, directory: str) -> list[str]:
        """Names of the entries; empty if the directory does not exist."""
        ...

    def make_directory(self, directory: str) -> None: ...

    def piece_bytes(self, file_bytes: int) -> int:
        """The length of pieces that `write` likes best for a file of so many bytes."""
        ...

    def write(
        self,
        name: str,
        pieces: Iterable[memoryview],
        stop: threading.Event,
        *,
        num_writers: int,
        is_synced: bool,
    ) -> None:
        """A new file of these pieces, one after another; stored durably when this returns.

        A piece has to stay as it is while somebody has a view of it. `num_writers` threads write
        files at the same time. Where this raises, or `stop` is set, nothing of use is left.
        `is_synced` False leaves it to the file system when a local file is durable.
        """
        ...

    def publish(self, name: str, data: bytes) -> None:
        """A small file that is there whole, or not at all. Durable when this returns."""
        ...

    def size(self, name: str) -> int | None:
        """In bytes; None if there is no such file."""
        ...

    def sizes(self, directory: str) -> dict[str, int]:
        """In bytes, of the files in a directory, by name: one listing instead of a question a file.
        Empty if the directory does not exist.
        """
        ...

    def open(self, name: str) -> OpenFile:
        """For reading. Raises DamagedCheckpoint, naming the file, if it is missing."""
        ...

    def stream(self, name: str) -> BinaryIO:
        """The same as a seekable file, read ahead."""
        ...

    def remove_directory(self, directory: str, first: str) -> None:
        """Remove a directory of files, `first` before the others; one that is not there is fine."""
        ...


class DirectoryStore:
    """A directory of this machine. On a mount, `fsync` and `close` return when the volume has the
    file.
    """

    # More of them only take processor time of a mount, which reads ahead by itself.
    num_readers = 4

    def __init__(self, root: Path) -> None:
        self._root = root

    @property
    def location(self) -> str:
        return str(self._root)

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self._root / directory))  # noqa: PTH208 - names are wanted, not paths
        except FileNotFoundError:
            return []

    def make_directory(self, directory: str) -> None:
        (self._root / directory).mkdir(parents=True, exist_ok=True)

    def piece_bytes(self, file_bytes: int) -> int:  # noqa: ARG002 - the same for all
        return _WRITE_BYTES

    def write(
        self,
        name: str,
        pieces: Iterable[memoryview],
        stop: threading.Event,
        *,
        num_writers: int,  # noqa: ARG002 - each file is one stream
        is_synced: bool,
    ) -> None:
        path = self._root / name
        # Not O_EXCL: nobody else writes into this generation, and to hold it against a race makes
        # some stores copy the file. The name of an earlier try is taken over.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            try:
                for piece in pieces:
                    _write_all(descriptor, piece, stop)
                if is_synced:
                    _sync(descriptor)
            finally:
                # A mount says here what became of the file.
                os.close(descriptor)
        except BaseException as error:
            # The generation will never be committed, and a later save removes it.
            with contextlib.suppress(OSError):
                path.unlink()
            _name(error, path)
            raise

    def publish(self, name: str, data: bytes) -> None:
        path = self._root / name
        temporary = f"{name}.tmp"
        never = threading.Event()
        self.write(temporary, [memoryview(data)], never, num_writers=1, is_synced=True)
        # The entries of the directory have to be durable before the name that vouches for them is.
        _sync_directory(path.parent)
        _sync_directory(self._root)
        try:
            os.rename(self._root / temporary, path)  # noqa: PTH104 - one call, as the others here
        except OSError:
            if not self._has(name, data):
                raise
        _sync_directory(path.parent)

    def size(self, name: str) -> int | None:
        try:
            return (self._root / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def sizes(self, directory: str) -> dict[str, int]:
        found = {}
        try:
            with os.scandir(self._root / directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        if entry.is_file():
                            found[entry.name] = entry.stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return {}
        return found

    def open(self, name: str) -> OpenFile:
        return _LocalFile(self._root / name)

    def stream(self, name: str) -> BinaryIO:
        path = self._root / name
        try:
            return path.open("rb")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedCheckpoint(f"{path} is missing") from error

    def remove_directory(self, directory: str, first: str) -> None:
        path = self._root / directory
        for name in (first, *(one for one in self.names(directory) if one != first)):
            _remove(path / name)
        try:
            path.rmdir()
        except OSError:
            if path.exists():
                raise

    def _has(self, name: str, data: bytes) -> bool:
        """Whether the file has exactly this content: then a rename was carried out."""
        try:
            return (self._root / name).read_bytes() == data
        except OSError:
            return False


class _LocalFile:
    """An open file of a directory; implements `OpenFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedCheckpoint(f"{path} is missing") from error

    def read_into(self, offset: int, target: memoryview, stop: threading.Event) -> None:
        end = offset + len(target)
        while target:
            if stop.is_set():
                raise GivenUp(f"{self._path}: the load was given up")
            try:
                count = os.preadv(self._descriptor, [target], offset)
            except OSError as error:
                _name(error, self._path)
                raise
            if count == 0:
                raise DamagedCheckpoint(f"{self._path} ends at byte {offset}, {end} are recorded")
            target = target[count:]
            offset += count

    def close(self) -> None:
        os.close(self._descriptor)


def open_store(path: str) -> CheckpointStore:
    """The store that `path` leads to. Nothing is made yet."""
    if is_local(path):
        return DirectoryStore(local_path(path))
    # Imported where it is needed: it brings the volume client.
    from trainmount.checkpoint.volume_store import VolumeStore

    return VolumeStore(path.rstrip("/"))


def read_bytes(store: CheckpointStore, name: str, length: int) -> bytearray:
    """The first `length` bytes of a small file. Raises DamagedCheckpoint if it is missing or too
    short.
    """
    data = bytearray(length)
    file = store.open(name)
    try:
        file.read_into(0, memoryview(data), threading.Event())
    finally:
        file.close()
    return data


def _name(error: BaseException, path: Path) -> None:
    """Let an error of the system say which file: of a descriptor's it does not know."""
    if isinstance(error, OSError) and error.filename is None:
        error.filename = str(path)


def _write_all(descriptor: int, piece: memoryview, stop: threading.Event) -> None:
    while piece:
        if stop.is_set():
            raise GivenUp("the save was given up")
        count = os.write(descriptor, piece[:_WRITE_BYTES])
        piece = piece[count:]


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _LOST_ANSWERS:
            raise
        os.fsync(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file; also where only the answer of the removal was lost."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if os.path.lexists(path):
            raise
