"""One write of a chunked file in the making, how it is published, and how what is left of others is
removed. Used by `volume.py` and `upload.py`.

A plain object `<name>` is the file wherever there is one; a manifest counts only where there is
none. So each of these is one step for a reader:

    chunks where nothing or chunks were    the manifest is put
    chunks where a plain object was        the plain object is deleted; the manifest stands by then
    a plain object where chunks were       the plain object is put; the manifest goes afterwards

Two writers at once: whoever comes later finds what it did not see before its own step, and leaves
it alone. One of the two is the file in the end; never parts of both, never neither.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import BinaryIO, Final

from trainmount_files.chunks.manifest import (
    MAX_PARTS,
    Manifest,
    Manifests,
    age_seconds,
    chunks_path,
    is_generation,
    manifest_path,
    new_generation,
    part_path,
)
from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    DirectoryNotEmpty,
    InvalidRequest,
    IsADirectory,
    NotFound,
    TooLarge,
    Unavailable,
    VolumeError,
    local_errors,
)
from trainmount_files.per_process import PerProcess
from trainmount_files.retry import Cancellation
from trainmount_files.transfer.workers import Workers
from trainmount_files.volume import MIB, Buffer, FileStat, Volume, list_directory

__all__ = ["Chunks", "Generation", "errors_of"]

_LOG: Final = logging.getLogger(__name__)

_COPY_BYTES: Final = 8 * MIB
"""Bytes copied between two looks at the cancel event."""

_ABANDONED_AFTER_SECONDS: Final = 7 * 86_400
"""A generation that is older and does not count belongs to a writer that is gone. No write takes a
week.
"""

_DELETES_AT_ONCE: Final = 8

_WAIT_SECONDS: Final = 600.0

_UNKNOWN: Final = (Unavailable, Cancelled)
"""After these the store may have done what it was asked, or may do it yet."""


class Generation:
    """The parts of one write. Any thread may store them."""

    def __init__(self, volume: Volume, path: str) -> None:
        self.path = path
        self.name = new_generation()
        self.may_count = False
        """The manifest that names it was sent: it must not be removed any more."""
        self._volume = volume
        # number -> (order of the call, bytes): the last call for a number counts. Guarded by the
        # lock; a number's own lock is held while it is stored.
        self._parts: dict[int, tuple[int, int]] = {}
        self._number_locks: dict[int, threading.Lock] = {}
        self._lock = threading.Lock()

    def put(self, number: int, data: Buffer, order: int = 0) -> None:
        """Store a part from memory. A call with a lower `order` than an earlier one changes
        nothing.
        """
        size = memoryview(data).nbytes
        self._store(
            number,
            size,
            order,
            lambda location: self._volume.put(location, data, want_version=False),
        )

    def put_file(
        self,
        number: int,
        file: BinaryIO,
        size_bytes: int,
        *,
        cancel: threading.Event | None,
    ) -> None:
        """Store a part that is the first `size_bytes` bytes of a file."""
        self._store(
            number,
            size_bytes,
            0,
            lambda location: self._volume.upload(
                location, file, size_bytes, cancel=cancel, want_version=False
            ),
        )

    def put_slice(
        self,
        number: int,
        source: int,
        start: int,
        size_bytes: int,
        *,
        cancel: threading.Event | None,
    ) -> None:
        """Store a part that is a slice of an open file, by way of a nameless temporary one: whole
        files are what a store takes without holding them in memory.

        Raises:
            InvalidRequest: the source has become shorter.
            LocalError: the temporary directory has no room.
        """
        with local_errors("upload", self.path), tempfile.TemporaryFile() as copy:
            done = 0
            while done < size_bytes:
                _check_cancelled(self.path, cancel)
                wanted = min(_COPY_BYTES, size_bytes - done)
                copied = os.sendfile(copy.fileno(), source, start + done, wanted)
                if not copied:
                    reason = f"the source has fewer than {start + size_bytes} bytes"
                    raise InvalidRequest("upload", self.path, reason)
                done += copied
            self.put_file(number, copy, size_bytes, cancel=cancel)

    def parts(self) -> tuple[tuple[int, int], ...]:
        with self._lock:
            return tuple((number, size) for number, (_, size) in sorted(self._parts.items()))

    def _store(
        self, number: int, size_bytes: int, order: int, store: Callable[[str], FileStat]
    ) -> None:
        if not 1 <= number <= MAX_PARTS:
            reason = f"part {number} is not among the 1 to {MAX_PARTS} parts of a file"
            raise TooLarge("upload", self.path, reason)
        with self._lock:
            lock = self._number_locks.setdefault(number, threading.Lock())
        with lock:
            with self._lock:
                if self._parts.get(number, (-1, 0))[0] > order:
                    return
            if size_bytes:
                with errors_of(self.path, f"part {number}"):
                    store(part_path(self.path, self.name, number))
            with self._lock:
                self._parts[number] = (order, size_bytes)


class Chunks:
    """The chunked files of a volume. Any thread may call."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._manifests = PerProcess(lambda: Manifests(volume))

    @property
    def manifests(self) -> Manifests:
        return self._manifests.get()

    def exist(self, path: str) -> bool:
        """Whether there is a manifest of a file, good or damaged."""
        try:
            return not self._volume.stat(manifest_path(path)).is_directory
        except (NotFound, InvalidRequest):
            return False

    def begin(self, path: str, *, overwrite: bool) -> Generation:
        """A new write. Refuses what `publish` would refuse, before any work.

        Raises:
            IsADirectory: a directory is at the path.
            AlreadyExists: `overwrite=False` and something is at the path.
        """
        self._plain(path, overwrite=overwrite)
        if not overwrite and self.exist(path):
            raise AlreadyExists("upload", path, "something is at the path")
        return Generation(self._volume, path)

    def publish(self, generation: Generation, *, overwrite: bool) -> FileStat:
        """Make a write the file, in one step, and remove the one before.

        Raises:
            AlreadyExists: `overwrite=False` and somebody was faster.
            Unavailable: an answer was lost; the old file or the new one is there.
        """
        path = generation.path
        parts = tuple(part for part in generation.parts() if part[1])
        before = self.replaceable(path)
        plain = self._plain(path, overwrite=overwrite)
        manifest = Manifest(generation.name, parts)
        mtime_ns = self._put_manifest(generation, manifest, overwrite=overwrite)
        self._uncover(generation, plain, overwrite=overwrite)
        if before is not None and before.generation != generation.name:
            self._remove_generation(path, before.generation)
        self._collect(path, generation.name)
        return Manifest(generation.name, parts, mtime_ns).to_stat(path)

    def discard(self, generation: Generation) -> None:
        """Remove a write that is given up; never raises. One that may be the file by now stays."""
        if not generation.may_count:
            self._remove_generation(generation.path, generation.name)
            self._remove_directory(chunks_path(generation.path))

    def delete(self, path: str) -> None:
        """Remove a chunked file that exists, and a plain one that may hide it."""
        manifest = self.replaceable(path)
        # First what nobody sees while there is a plain object: it must not come to light.
        self._volume.delete(manifest_path(path))
        self.manifests.forget(path)
        try:
            self._volume.delete(path)
        except NotFound:
            pass
        finally:
            self._remove_rest(path, manifest)

    def drop(self, path: str, expected: Manifest) -> None:
        """Remove the chunks that a plain object hides, unless others have come since; never raises:
        the plain one is the file anyway.
        """
        try:
            now = self.manifests.read("delete", path)
            if now is None or now.generation != expected.generation:
                return
            self._volume.delete(manifest_path(path))
        except VolumeError as error:
            _warn("Chunks of a file that was replaced could not be removed", path, error)
            return
        self.manifests.forget(path)
        self._remove_rest(path, expected)

    def remove_leftovers(self, directory: FileStat) -> None:
        """Remove a directory of generations of which none was published; never raises."""
        for entry in self._entries(directory.path):
            if is_generation(entry.name):
                self._remove_all(entry.path)
        self._remove_directory(directory.path)

    def is_unpublished(self, directory: FileStat) -> bool:
        """Whether a directory without manifest holds generations and nothing else."""
        page = self._volume.list_page(directory.path)
        return bool(page.entries) and all(
            entry.is_directory and is_generation(entry.name) for entry in page.entries
        )

    def _plain(self, path: str, *, overwrite: bool) -> FileStat | None:
        """The plain object at the path, where it may be replaced."""
        try:
            found = self._volume.stat(path)
        except NotFound:
            return None
        if not overwrite:
            raise AlreadyExists("upload", path, "something is at the path")
        if found.is_directory:
            raise IsADirectory("upload", path, "is a directory")
        return found

    def replaceable(self, path: str) -> Manifest | None:
        """The manifest, where it can be understood: a damaged one may be replaced."""
        try:
            return self.manifests.read("upload", path)
        except Unavailable as error:
            _warn("A manifest could not be read", path, error)
            return None

    def _put_manifest(self, generation: Generation, manifest: Manifest, *, overwrite: bool) -> int:
        """Send the manifest; its modification time."""
        path = generation.path
        lost: VolumeError
        generation.may_count = True
        try:
            with errors_of(path, "manifest"):
                data = manifest.to_json()
                return self._volume.put(manifest_path(path), data, overwrite=overwrite).mtime_ns
        except _UNKNOWN as error:
            lost = error
        except VolumeError:
            generation.may_count = False
            raise
        self.manifests.forget(path)
        found = self.replaceable(path)
        if found is not None and found.generation == generation.name:
            return found.mtime_ns
        raise lost

    def _uncover(self, generation: Generation, plain: FileStat | None, *, overwrite: bool) -> None:
        """Remove the plain object that was there before the manifest; another one that has come
        since is a later write, and stays.
        """
        path = generation.path
        try:
            now = self._volume.stat(path)
        except NotFound:
            return
        refusal: VolumeError | None = None
        if now.is_directory:
            refusal = IsADirectory("upload", path, "a directory was made at the path")
        elif not overwrite:
            refusal = AlreadyExists("upload", path, "something is at the path")
        elif plain is not None and plain.version == now.version:
            try:
                self._volume.delete(path)
                return
            except NotFound:
                return
            except _UNKNOWN:
                raise
            except VolumeError as error:
                refusal = error
        self._withdraw(generation)
        if refusal is not None:
            raise refusal

    def _withdraw(self, generation: Generation) -> None:
        """Take back a manifest that a plain object hides."""
        manifest = Manifest(generation.name, generation.parts())
        self.drop(generation.path, manifest)

    def _remove_rest(self, path: str, manifest: Manifest | None) -> None:
        if manifest is not None:
            self._remove_generation(path, manifest.generation)
        self._remove_directory(chunks_path(path))

    def _remove_generation(self, path: str, generation: str) -> None:
        self._remove_all(f"{chunks_path(path)}/{generation}")

    def _collect(self, path: str, keep: str) -> None:
        """Remove what writers that died a week ago have left."""
        for entry in self._entries(chunks_path(path)):
            if entry.name != keep and age_seconds(entry.name) > _ABANDONED_AFTER_SECONDS:
                self._remove_all(entry.path)

    def _entries(self, directory: str) -> list[FileStat]:
        try:
            return list(list_directory(self._volume, directory))
        except NotFound:
            return []
        except VolumeError as error:
            _warn("Chunks could not be listed", directory, error)
            return []

    def _remove_all(self, directory: str) -> None:
        """Remove the files of a directory and the directory; never raises."""
        workers = Workers(_DELETES_AT_ONCE, "trainmount-chunks")
        try:
            done = [
                workers.submit(partial(self._volume.delete, entry.path))
                for entry in self._entries(directory)
            ]
            for future in done:
                error = future.exception(_WAIT_SECONDS)
                if error is not None and not isinstance(error, NotFound):
                    _warn("A part could not be removed", directory, error)
        finally:
            workers.close(0)
        self._remove_directory(directory)

    def _remove_directory(self, directory: str) -> None:
        # Twice: what stays behind is seen, as an empty directory.
        for _ in range(2):
            try:
                self._volume.remove_directory(directory)
            except DirectoryNotEmpty:
                # Another's parts are in it.
                return
            except NotFound:
                # Or the store has no directories of its own.
                continue
            except VolumeError as error:
                _warn("A directory of chunks could not be removed", directory, error)
                continue
            return


@contextmanager
def errors_of(path: str, what: str) -> Iterator[None]:
    """Errors inside are about the file, as the caller knows it, and say what of it failed."""
    try:
        yield
    except VolumeError as error:
        error.path = path
        error.reason = f"{what}: {error.reason}"
        error.args = (error.operation, path, error.reason, *error.args[3:])
        raise


def _check_cancelled(path: str, cancel: Cancellation | None) -> None:
    if cancel is not None and cancel.is_set():
        raise Cancelled("upload", path, "cancelled")


def _warn(sentence: str, path: str, error: BaseException) -> None:
    reason = error.reason if isinstance(error, VolumeError) else type(error).__name__
    _LOG.warning(sentence, extra={"path": path, "reason": reason})
