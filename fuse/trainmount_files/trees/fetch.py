"""A published directory, fetched whole or not at all: see `publish.py` for the other half.

fetch    manifest -> files into a directory beside, each checked -> rename
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NotFound,
    PreconditionFailed,
    VolumeError,
)
from trainmount_files.open import open_volume
from trainmount_files.paths import parent_of, split
from trainmount_files.transfer import download_file
from trainmount_files.trees.crew import Crew
from trainmount_files.trees.directories import disk_errors
from trainmount_files.trees.entries import below
from trainmount_files.trees.local_target import LocalTarget, told_plainly
from trainmount_files.trees.manifest import MANIFEST_NAME, Manifest, PublishedFile
from trainmount_files.trees.report import Report
from trainmount_files.trees.routes import SMALL_BYTES
from trainmount_files.volume import MIB, ByteRange, Volume

__all__ = ["checksum_of", "fetch", "opened", "read_file"]

_HASH_BYTES: Final = MIB

_MAX_MANIFEST_BYTES: Final = 1 << 30

_RANGES_OF_A_FILE: Final = 2
"""Fetched at once of each large file: several files are under way already."""


def fetch(
    source: str,
    directory: str | os.PathLike[str],
    *,
    volume: Volume | None = None,
    parallelism: int = 8,
    report: Report | None = None,
    cancel: threading.Event | None = None,
) -> Manifest:
    """Get a publication into the local `directory`, which must be missing or empty.

    Every size and checksum is compared with the manifest; the directory appears in one step when
    all is there, and is left as it was otherwise. A kill leaves a hidden directory beside it.

    Raises:
        NotFound: nothing is published at `source`, or not wholly.
        AlreadyExists: something is at `directory`.
        PreconditionFailed: a file is not the one that was published.
        Unsupported: the manifest is of a newer version. Cancelled: `cancel` was set.
    """
    with opened(source, volume) as (found, path):
        return _fetch(found, path, Path(directory), parallelism, report, cancel)


@contextmanager
def opened(place: str, volume: Volume | None) -> Iterator[tuple[Volume, str]]:
    """The volume and the path in it; what was opened here is closed here."""
    if volume is not None:
        yield volume, place
        return
    url, path = place.rstrip("/"), ""
    if place.startswith("file:"):
        # A directory can be opened only where it exists.
        url, _, name = url.rpartition("/")
        path = unquote(name, errors="surrogateescape")
    opened = open_volume(url)
    try:
        yield opened, path
    except VolumeError as error:
        if not error.path:
            # Of the volume that was opened here nobody else knows where it begins.
            error.path = place
        raise
    finally:
        opened.close()


def _fetch(
    volume: Volume,
    path: str,
    directory: Path,
    parallelism: int,
    report: Report | None,
    cancel: threading.Event | None,
) -> Manifest:
    split("fetch", path)
    _refuse_occupied(directory)
    manifest = _read_manifest(volume, path)
    with disk_errors("fetch", path):
        directory.parent.mkdir(parents=True, exist_ok=True)
        # Beside, so that the rename stays on one disk.
        beside = directory.parent / f".trainmount-{uuid.uuid4().hex}.fetching"
        beside.mkdir()
    try:
        _Fetch(volume, path, beside, report or Report()).run(manifest, parallelism, cancel)
        with disk_errors("fetch", path):
            _rename_whole(beside, directory)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return manifest


class _Fetch:
    """The files of one publication on their way down."""

    def __init__(self, volume: Volume, path: str, directory: Path, report: Report) -> None:
        self._volume = volume
        self._path = path
        self._target = LocalTarget(directory)
        self._report = report

    def run(self, manifest: Manifest, parallelism: int, cancel: threading.Event | None) -> None:
        """Raises the first failure, when no thread is at work any more."""
        crew = Crew("fetch", parallelism, cancel)

        def bring_up() -> None:
            for directory in _directories_of(manifest):
                self._target.make_directory(directory)
            for file in manifest.files:
                if crew.stop.is_set():
                    return
                self._report.found(1, file.size_bytes)
                crew.add(partial(self._file, crew, file))

        try:
            crew.run(bring_up)
        finally:
            if not crew.is_running:
                self._target.close()

    def _file(self, crew: Crew, file: PublishedFile) -> None:
        remote = below(self._path, file.path)
        try:
            if file.size_bytes <= SMALL_BYTES:
                self._small(remote, file, crew.stop)
            else:
                self._large(remote, file, crew.stop)
        except InexactRange:
            raise _wrong(remote, "another size") from None
        self._report.done()

    def _small(self, remote: str, file: PublishedFile, cancel: threading.Event) -> None:
        data = bytearray(file.size_bytes)
        if data:
            self._volume.read_into(remote, ByteRange(0, len(data)), data, cancel=cancel)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            raise _wrong(remote, "other bytes")
        self._target.write(file.path, data, overwrite=False)
        self._report.moved(len(data))

    def _large(self, remote: str, file: PublishedFile, cancel: threading.Event) -> None:
        destination, _ = self._target.prepare(file.path, overwrite=False)
        with told_plainly("fetch", remote):
            found = download_file(
                self._volume,
                remote,
                destination,
                overwrite=False,
                parallelism=_RANGES_OF_A_FILE,
                progress=self._report.moved,
                cancel=cancel,
            )
        if found.size_bytes != file.size_bytes:
            raise _wrong(remote, "another size")
        with disk_errors("fetch", remote), destination.open("rb", buffering=0) as stored:
            if checksum_of(stored.fileno(), remote, file.size_bytes, cancel) != file.sha256:
                raise _wrong(remote, "other bytes")


def _read_manifest(volume: Volume, path: str) -> Manifest:
    name = below(path, MANIFEST_NAME)
    try:
        return Manifest.parse(name, bytes(read_file(volume, name)))
    except NotFound:
        reason = "nothing is published there, or not yet: there is no manifest"
        raise NotFound("fetch", path, reason) from None


def read_file(volume: Volume, path: str) -> bytearray:
    """The whole of a file that is small by its nature. Raises VolumeError."""
    found = volume.stat(path)
    if found.is_directory:
        raise IsADirectory("read", path, "is a directory")
    if found.size_bytes > _MAX_MANIFEST_BYTES:
        raise InvalidRequest("read", path, f"is larger than {_MAX_MANIFEST_BYTES} bytes")
    data = bytearray(found.size_bytes)
    volume.read_into(path, ByteRange(0, len(data)), data, version=found.version or None)
    return data


def _directories_of(manifest: Manifest) -> list[str]:
    """All directories, parents before what is in them."""
    directories = {""}
    for path in (*(file.path for file in manifest.files), *manifest.empty_directories):
        while path := parent_of(path):
            if path in directories:
                break
            directories.add(path)
    return sorted(directories.union(manifest.empty_directories))


def checksum_of(descriptor: int, path: str, size_bytes: int, cancel: threading.Event) -> str:
    """SHA-256 of the first `size_bytes` bytes; of fewer where the file has become shorter."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_HASH_BYTES, size_bytes)))
    done = 0
    while done < size_bytes:
        if cancel.is_set():
            raise Cancelled("checksum", path, "cancelled")
        count = os.preadv(descriptor, [buffer[: size_bytes - done]], done)
        if not count:
            break
        digest.update(buffer[:count])
        done += count
    return digest.hexdigest()


def _wrong(path: str, what: str) -> PreconditionFailed:
    return PreconditionFailed("fetch", path, f"the file has {what} than were published")


def _refuse_occupied(directory: Path) -> None:
    """Raises AlreadyExists where a fetched directory could not be put."""
    with disk_errors("fetch", str(directory)):
        if not (directory.exists() or directory.is_symlink()):
            return
        if directory.is_symlink() or not directory.is_dir() or any(directory.iterdir()):
            raise AlreadyExists("fetch", str(directory), "something is there")


def _rename_whole(source: Path, directory: Path) -> None:
    try:
        # Over an empty directory as well, and in one step.
        source.rename(directory)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise
        raise AlreadyExists("fetch", str(directory), "something has been put there") from error
