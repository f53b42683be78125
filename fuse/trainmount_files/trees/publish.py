"""A directory put on a volume so that readers see all of it or nothing; `fetch.py` gets it.

    publish    claim the destination -> files -> manifest, last -> give up the claim

Without a manifest there is no publication, whatever else lies there: a publisher that failed or was
killed has published nothing.
"""

from __future__ import annotations

import json
import os
import threading
import uuid
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from trainmount_files.errors import (
    AlreadyExists,
    InvalidRequest,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    VolumeError,
)
from trainmount_files.paths import split
from trainmount_files.trees.crew import Crew
from trainmount_files.trees.entries import below
from trainmount_files.trees.fetch import checksum_of, opened, read_file
from trainmount_files.trees.local_source import LocalSource
from trainmount_files.trees.manifest import CLAIM_NAME, MANIFEST_NAME, Manifest, PublishedFile
from trainmount_files.trees.remove import remove_tree
from trainmount_files.trees.report import Report
from trainmount_files.volume import Volume, list_pages

__all__ = ["publish"]


def publish(
    directory: str | os.PathLike[str],
    destination: str,
    *,
    volume: Volume | None = None,
    replace: bool = False,
    parallelism: int = 8,
    report: Report | None = None,
    cancel: threading.Event | None = None,
) -> Manifest:
    """Put a local directory on a volume, so that `fetch` gets all of it or nothing.

    `destination` is a URL as `open_volume` takes it, or a path of `volume`. With `replace` what is
    there is removed first; readers then see nothing until the new one is whole. A directory that
    changes meanwhile is refused; so is one with a link or a special file in it. What a failed
    publication has stored stays, unseen, until another with `replace`.

    Raises:
        AlreadyExists: something is at the destination, or another publisher is at work there; told
            before any work.
        PreconditionFailed: a file changed, or another publisher took the destination over.
        Cancelled: `cancel` was set. VolumeError: the first file that could not be stored.
    """
    with opened(destination, volume) as (found, path):
        return _publish(Path(directory), found, path, replace, parallelism, report, cancel)


def _publish(
    directory: Path,
    volume: Volume,
    path: str,
    replace: bool,
    parallelism: int,
    report: Report | None,
    cancel: threading.Event | None,
) -> Manifest:
    split("publish", path)
    _require_directory(directory)
    claim = _Claim(volume, path)
    # Before any work, and before anything there is touched.
    _require_free(volume, path, replace=replace)
    if replace:
        _clear(volume, path, parallelism, cancel)
    claim.take()
    try:
        run = _Publication(directory, volume, path, report or Report())
        try:
            manifest = run.upload(parallelism, cancel)
        finally:
            run.close()
        claim.check()
        volume.put(below(path, MANIFEST_NAME), manifest.to_bytes(), overwrite=False)
    except BaseException:
        # What was stored stays, unseen: removing it could take as long as it took.
        claim.give_up()
        raise
    claim.give_up()
    return manifest


class _Claim:
    """The right to publish at one path, against others who try at the same time."""

    def __init__(self, volume: Volume, path: str) -> None:
        self._volume = volume
        self._file = below(path, CLAIM_NAME)
        self._path = path
        self._content = json.dumps({"publisher": uuid.uuid4().hex}).encode()

    def take(self) -> None:
        """Raises AlreadyExists where another publisher has it."""
        try:
            self._volume.put(self._file, self._content, overwrite=False)
        except AlreadyExists:
            raise AlreadyExists("publish", self._path, _BUSY) from None

    def check(self) -> None:
        """Raises PreconditionFailed where another has replaced us meanwhile."""
        try:
            found = bytes(read_file(self._volume, self._file))
        except NotFound:
            found = b""
        if found != self._content:
            reason = "another publisher has replaced this one meanwhile; nothing was published"
            raise PreconditionFailed("publish", self._path, reason)

    def give_up(self) -> None:
        """Never raises: what is left is cleared by `replace`."""
        with suppress(VolumeError):
            if bytes(read_file(self._volume, self._file)) == self._content:
                self._volume.delete(self._file)


_BUSY: Final = (
    "is being published, or a publisher was killed there; when none is running, replace=True "
    "clears it"
)


def _require_free(volume: Volume, path: str, *, replace: bool) -> None:
    """Raises AlreadyExists where something is at the path that must stay."""
    try:
        found = volume.stat(path)
    except NotFound:
        return
    if not found.is_directory:
        raise AlreadyExists("publish", path, "a file is at the path")
    if replace:
        return
    names = {entry.name for page in list_pages(volume, path) for entry in page.entries}
    if MANIFEST_NAME in names:
        reason = "something is published there; replace=True would remove it first"
        raise AlreadyExists("publish", path, reason)
    if CLAIM_NAME in names:
        raise AlreadyExists("publish", path, _BUSY)
    if names:
        reason = (
            "holds files that are not published: of an earlier try or of somebody else; "
            "replace=True would remove them first"
        )
        raise AlreadyExists("publish", path, reason)


def _clear(volume: Volume, path: str, parallelism: int, cancel: threading.Event | None) -> None:
    # The manifest first: from then on no reader begins.
    with suppress(NotFound):
        volume.delete(below(path, MANIFEST_NAME))
    try:
        report = remove_tree(volume, path, keep_root=True, parallelism=parallelism, cancel=cancel)
    except NotFound:
        return
    for failure in report.failures:
        if not (failure.path == "" and isinstance(failure.error, NotFound)):
            raise failure.error


class _Publication:
    """The files of one publication on their way up."""

    def __init__(self, directory: Path, volume: Volume, path: str, report: Report) -> None:
        self._source = LocalSource(directory)
        self._volume = volume
        self._path = path
        self._report = report
        # Appended to by the threads of the crew: one step each.
        self._files: list[PublishedFile] = []
        self._empty: list[str] = []

    def upload(self, parallelism: int, cancel: threading.Event | None) -> Manifest:
        """Store every file. Raises the first failure, when no thread is at work any more."""
        crew = Crew("publish", parallelism, cancel)
        crew.run(partial(self._list, crew, ""))
        return Manifest.of(self._files, self._empty)

    def close(self) -> None:
        self._source.close()

    def _list(self, crew: Crew, path: str) -> None:
        is_empty = True
        for entry in self._source.entries(path):
            is_empty = False
            if entry.skip_reason:
                reason = f"{entry.skip_reason}; only files and directories can be published"
                raise InvalidRequest("publish", entry.path, reason)
            if entry.path in (MANIFEST_NAME, CLAIM_NAME):
                raise InvalidRequest("publish", entry.path, "the name is kept for the publication")
            if entry.is_directory:
                crew.add_large(partial(self._list, crew, entry.path))
            else:
                self._report.found(1)
                crew.add(partial(self._store, crew, entry.path))
        if is_empty and path:
            self._volume.make_directory(below(self._path, path))
            self._empty.append(path)

    def _store(self, crew: Crew, path: str) -> None:
        # Both readings of the file are by one descriptor; the second is mostly of the page cache.
        file, found = self._source.open(path)
        with file:
            checksum = checksum_of(file.fileno(), path, found.st_size, crew.stop)
            self._volume.upload(
                below(self._path, path),
                file,
                found.st_size,
                progress=self._report.moved,
                cancel=crew.stop,
                want_version=False,
            )
            after = os.fstat(file.fileno())
        if (after.st_size, after.st_mtime_ns) != (found.st_size, found.st_mtime_ns):
            raise PreconditionFailed("publish", path, "changed while it was published")
        self._files.append(PublishedFile(path, found.st_size, checksum))
        self._report.done()


def _require_directory(directory: Path) -> None:
    if not directory.exists():
        raise NotFound("publish", str(directory), "no such directory")
    if not directory.is_dir():
        raise NotADirectory("publish", str(directory), "is not a directory")
