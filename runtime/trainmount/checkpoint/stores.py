"""The few file operations that checkpoints need, over a directory (a mount too) and over a volume
that is not mounted.

Called by `generations`, `writer` and `reader`. Names are relative to the store, with `/` between
them.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from trainmount.errors import CheckpointError, DamagedCheckpoint
from trainmount.locations import is_local, local_path

if TYPE_CHECKING:
    from trainmount_files.errors import VolumeError
    from trainmount_files.volume import Upload, Volume

__all__ = ["CheckpointStore", "DirectoryStore", "FileSink", "VolumeStore", "open_store"]

# The part size of an upload: the memory that a rank's writer thread takes.
_PART_BYTES: Final = 16 << 20


class FileSink(Protocol):
    """A file in the making. One thread."""

    def write(self, data: memoryview) -> None:
        """Append; the memory may be reused after the call."""
        ...

    def close(self) -> None:
        """The whole file is stored durably when this returns."""
        ...

    def abort(self) -> None:
        """Give up. Never raises."""
        ...


class CheckpointStore(Protocol):
    """A directory of generations. Every method may be called from any thread; errors are
    CheckpointError or OSError.
    """

    @property
    def location(self) -> str: ...

    def names(self, directory: str) -> list[str]:
        """Names of the entries; empty if the directory does not exist."""
        ...

    def make_directory(self, directory: str) -> None: ...

    def create(self, name: str) -> FileSink:
        """A new file. An existing one is an error, so that no save writes into another's
        generation.
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

    def read(self, name: str, offset: int, length: int) -> bytearray:
        """Exactly these bytes. Raises DamagedCheckpoint, naming the file, if it is missing or too
        short.
        """
        ...

    def remove_directory(self, directory: str, first: str) -> None:
        """Remove a directory of files, `first` before the others; one that is not there is fine."""
        ...


class DirectoryStore:
    """A directory of this machine. On a mount, `fsync` and `close` return when the volume has the
    file.
    """

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

    def create(self, name: str) -> FileSink:
        return _DirectorySink(self._root / name)

    def publish(self, name: str, data: bytes) -> None:
        path = self._root / name
        sink = _DirectorySink(path.with_name(f"{path.name}.tmp"))
        try:
            sink.write(memoryview(data))
            sink.close()
        except BaseException:
            sink.abort()
            raise
        # The entries of the directory have to be durable before the name that vouches for them is.
        _fsync_directory(path.parent)
        _fsync_directory(self._root)
        sink.path.replace(path)
        _fsync_directory(path.parent)

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

    def read(self, name: str, offset: int, length: int) -> bytearray:
        path = self._root / name
        buffer = bytearray(length)
        try:
            with path.open("rb", buffering=0) as file:
                view = memoryview(buffer)
                done = 0
                while done < length:
                    count = os.preadv(file.fileno(), [view[done:]], offset + done)
                    if count == 0:
                        raise DamagedCheckpoint(
                            f"{path} ends at byte {offset + done}, {offset + length} are recorded"
                        )
                    done += count
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} is missing") from error
        return buffer

    def remove_directory(self, directory: str, first: str) -> None:
        path = self._root / directory
        (path / first).unlink(missing_ok=True)
        for name in self.names(directory):
            (path / name).unlink(missing_ok=True)
        if path.exists():
            path.rmdir()


class _DirectorySink:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("xb", buffering=0)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abort(self) -> None:
        try:
            self._file.close()
            self.path.unlink(missing_ok=True)
        except OSError:
            pass  # the generation will never be committed, and a later save removes it


class VolumeStore:
    """A directory of a volume that is not mounted: files are streamed as parts, no local copy."""

    def __init__(self, url: str) -> None:
        from trainmount_files import open_volume

        self._url = url
        self._volume: Volume = open_volume(url)

    @property
    def location(self) -> str:
        return self._url

    def names(self, directory: str) -> list[str]:
        from trainmount_files.errors import NotFound, VolumeError
        from trainmount_files.volume import list_directory

        try:
            return sorted(stat.name for stat in list_directory(self._volume, directory))
        except NotFound:
            return []
        except VolumeError as error:
            raise self._failed(error) from error

    def make_directory(self, directory: str) -> None:
        """Nothing: the store makes parents with the files."""

    def create(self, name: str) -> FileSink:
        return _VolumeSink(self._volume, name, self._url)

    def publish(self, name: str, data: bytes) -> None:
        from trainmount_files.errors import VolumeError

        try:
            self._volume.put(name, data)
        except VolumeError as error:
            raise self._failed(error) from error

    def size(self, name: str) -> int | None:
        from trainmount_files.errors import NotFound, VolumeError

        try:
            return self._volume.stat(name).size_bytes
        except NotFound:
            return None
        except VolumeError as error:
            raise self._failed(error) from error

    def sizes(self, directory: str) -> dict[str, int]:
        from trainmount_files.errors import NotFound, VolumeError
        from trainmount_files.volume import list_directory

        try:
            entries = list_directory(self._volume, directory)
            return {one.name: one.size_bytes for one in entries if not one.is_directory}
        except NotFound:
            return {}
        except VolumeError as error:
            raise self._failed(error) from error

    def read(self, name: str, offset: int, length: int) -> bytearray:
        from trainmount_files.errors import InexactRange, NotFound, VolumeError
        from trainmount_files.volume import ByteRange

        buffer = bytearray(length)
        if length == 0:
            return buffer
        try:
            self._volume.read_into(name, ByteRange(offset, offset + length), buffer)
        except NotFound as error:
            raise DamagedCheckpoint(f"{self._url}/{name} is missing") from error
        except InexactRange as error:
            raise DamagedCheckpoint(
                f"{self._url}/{name} is shorter than recorded: {error}"
            ) from error
        except VolumeError as error:
            raise self._failed(error) from error
        return buffer

    def remove_directory(self, directory: str, first: str) -> None:
        from trainmount_files.errors import NotFound, VolumeError

        try:
            names = self.names(directory)
            for name in sorted(names, key=lambda name: name != first):
                self._volume.delete(f"{directory}/{name}")
            self._volume.remove_directory(directory)
        except NotFound:
            pass
        except VolumeError as error:
            raise self._failed(error) from error

    def _failed(self, error: VolumeError) -> CheckpointError:
        return CheckpointError(f"{self._url}: {error}")


class _VolumeSink:
    """Collects parts; a file of one part goes up in one request."""

    def __init__(self, volume: Volume, name: str, url: str) -> None:
        self._volume = volume
        self._name = name
        self._url = url
        self._part = bytearray()
        self._upload: Upload | None = None
        self._num_parts = 0

    def write(self, data: memoryview) -> None:
        while data:
            room = _PART_BYTES - len(self._part)
            self._part += data[:room]
            data = data[room:]
            if len(self._part) == _PART_BYTES and data:
                self._put_part()

    def close(self) -> None:
        from trainmount_files.errors import VolumeError

        try:
            if self._upload is None:
                self._volume.put(self._name, self._part, overwrite=False)
                return
            self._put_part()
            self._upload.complete()
        except VolumeError as error:
            raise CheckpointError(f"{self._url}: {error}") from error

    def abort(self) -> None:
        if self._upload is not None:
            self._upload.abort()

    def _put_part(self) -> None:
        from trainmount_files.errors import VolumeError

        try:
            if self._upload is None:
                self._upload = self._volume.start_upload(self._name, overwrite=False)
            self._num_parts += 1
            self._upload.put_part(self._num_parts, self._part)
        except VolumeError as error:
            raise CheckpointError(f"{self._url}: {error}") from error
        self._part = bytearray()


def open_store(path: str) -> CheckpointStore:
    """The store that `path` leads to. Nothing is made yet."""
    if is_local(path):
        return DirectoryStore(local_path(path))
    return VolumeStore(path.rstrip("/"))


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
