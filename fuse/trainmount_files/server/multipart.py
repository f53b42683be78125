"""Uploads in numbered parts. All state is on disk, so that an upload goes on after `kill -9` of the
server.

`uploads/<id>/` holds `upload.json` (where to, how), a file `<number>-<etag>` for each part,
`assembled` while the parts are being joined, and `complete.json` once the file is published, so
that a repeated complete gets the same answer. Blocking; `upload_routes` calls it in worker threads.
`upload.json` carries the lock of complete, abort and expiry.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_files.server.errors import ApiError, invalid
from trainmount_files.server.paths import VolumePath, parse_volume_path
from trainmount_files.server.presigned import Signer
from trainmount_files.server.staging import Staging, Temporary
from trainmount_files.server.store import DirectoryStore

__all__ = ["MAX_PARTS", "Part", "UploadStore"]

MAX_PARTS: Final = 10_000

_PART_NAME: Final = re.compile(r"(\d{5})-([0-9a-f]{32})")
_TOKEN: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})")
_COPY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the client names it in complete."""

    number: int
    etag: str
    """Without its quotes."""


@dataclass(frozen=True, slots=True)
class _Upload:
    folder: Path
    path: VolumePath
    overwrite: bool

    @property
    def is_complete(self) -> bool:
        return (self.folder / "complete.json").exists()


class UploadStore:
    """The uploads of one served directory. Any thread, and several servers at once."""

    def __init__(
        self,
        store: DirectoryStore,
        staging: Staging,
        signer: Signer,
        *,
        min_part_bytes: int,
        lifetime_seconds: float,
    ) -> None:
        self._store = store
        self._staging = staging
        self._signer = signer
        self._min_part_bytes = min_part_bytes
        self._lifetime_seconds = lifetime_seconds

    def initiate(self, path: VolumePath, *, overwrite: bool) -> str:
        """Begin an upload and return its token."""
        if path.is_root:
            raise invalid(f"The path of a file must be below a volume: {path}")
        self._store.require_volume(path)
        upload_id = secrets.token_hex(16)
        # Under another name until it is whole: a folder without `upload.json` is never seen as an
        # upload.
        folder = self._staging.uploads / f"{upload_id}.new"
        folder.mkdir()
        record = {"path": str(path), "overwrite": overwrite}
        (folder / "upload.json").write_text(json.dumps(record), encoding="utf-8")
        folder.rename(self._staging.uploads / upload_id)
        return f"{upload_id}.{self._signer.sign_text(upload_id)}"

    def require_open(self, token: str, path: VolumePath) -> None:
        """Raises ApiError 404 unless the token is of an upload to `path` that still takes parts."""
        if self._find(token, path).is_complete:
            raise _unknown_upload()

    def put_part(self, token: str, number: int, temporary: Temporary) -> str:
        """Keep a finished body as part `number`, instead of an earlier one; returns its etag."""
        upload = self._find(token, None)
        if upload.is_complete:
            raise _unknown_upload()
        etag = secrets.token_hex(16)
        self._staging.sync(temporary.fd)
        name = f"{number:05d}-{etag}"
        try:
            os.replace(temporary.name, upload.folder / name, src_dir_fd=temporary.directory_fd)
        except FileNotFoundError:
            raise _unknown_upload() from None  # aborted meanwhile
        for other in upload.folder.glob(f"{number:05d}-*"):
            if other.name != name:
                other.unlink(missing_ok=True)
        return etag

    def complete(self, token: str, path: VolumePath, parts: Sequence[Part]) -> None:
        """Join the parts and publish the file. A second complete of the same upload changes nothing
        and succeeds.

        Raises:
            ApiError: 400 for a list that does not match what is stored, after which the upload can
            still be completed;
                409 if it was begun with `overwrite=False` and something is at the path.
        """
        with self._locked(token, path) as upload:
            if upload.is_complete:
                return
            files = self._select(upload, parts)
            self._publish(upload, files)
            _write_marker(upload.folder / "complete.json")
            for file in upload.folder.iterdir():
                if _PART_NAME.fullmatch(file.name) or file.name == "assembled":
                    file.unlink(missing_ok=True)

    def abort(self, token: str, path: VolumePath | None) -> None:
        """Drop an upload. One that is gone already is fine; the file of a completed one stays."""
        with (
            contextlib.suppress(FileNotFoundError),
            self._locked(token, path, missing_ok=True) as upload,
        ):
            _remove(upload.folder)

    def sweep(self) -> int:
        """Drop the uploads that are past their lifetime; returns how many."""
        removed = 0
        oldest = time.time() - self._lifetime_seconds
        for folder in self._staging.uploads.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_mtime < oldest:
                    _remove(folder)
                    removed += 1
        return removed

    def count_open(self) -> int:
        """How many uploads are neither complete nor aborted."""
        return sum(
            not (folder / "complete.json").exists() for folder in self._staging.uploads.iterdir()
        )

    def _find(self, token: str, path: VolumePath | None, *, missing_ok: bool = False) -> _Upload:
        match = _TOKEN.fullmatch(token)
        if match is None or not self._signer.verify_text(match[1], match[2]):
            raise _unknown_upload()
        folder = self._staging.uploads / match[1]
        try:
            record = json.loads((folder / "upload.json").read_text(encoding="utf-8"))
            # The folder's own time moves with each part, so an upload that goes on does not expire.
            is_expired = folder.stat().st_mtime < time.time() - self._lifetime_seconds
        except FileNotFoundError:
            if missing_ok:
                raise
            raise _unknown_upload() from None
        if is_expired or (path is not None and record["path"] != str(path)):
            raise _unknown_upload()
        return _Upload(folder, parse_volume_path(record["path"]), record["overwrite"])

    @contextlib.contextmanager
    def _locked(
        self, token: str, path: VolumePath | None, *, missing_ok: bool = False
    ) -> Iterator[_Upload]:
        upload = self._find(token, path, missing_ok=missing_ok)
        try:
            fd = os.open(upload.folder / "upload.json", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise _unknown_upload() from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Whoever held the lock before may have dropped the upload.
            yield self._find(token, path, missing_ok=missing_ok)
        finally:
            os.close(fd)

    def _select(self, upload: _Upload, parts: Sequence[Part]) -> list[Path]:
        if not parts:
            raise invalid("parts must not be empty")
        numbers = [part.number for part in parts]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise invalid("parts must be in ascending order of part_number")
        files = [upload.folder / f"{part.number:05d}-{part.etag}" for part in parts]
        for part, file in zip(parts, files, strict=True):
            if not _PART_NAME.fullmatch(file.name) or not file.exists():
                raise invalid(f"Part {part.number} was not uploaded, or has another ETag.")
        for part, file in zip(parts[:-1], files[:-1], strict=True):
            if file.stat().st_size < self._min_part_bytes:
                least = self._min_part_bytes
                raise invalid(f"Part {part.number} is not the last and is below {least} bytes.")
        return files

    def _publish(self, upload: _Upload, files: list[Path]) -> None:
        assembled = upload.folder / "assembled"
        if not upload.overwrite and _is_same_file(assembled, self._store, upload.path):
            return  # published by a server that died before it could say so
        fd = os.open(assembled, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        folder_fd = os.open(upload.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for file in files:
                _append(file, fd)
            self._store.publish(
                Temporary(fd, assembled.name, folder_fd), upload.path, overwrite=upload.overwrite
            )
        finally:
            os.close(folder_fd)
            os.close(fd)


def _append(file: Path, destination_fd: int) -> None:
    """Copy inside of the kernel."""
    with file.open("rb", buffering=0) as source:
        # Not copy_file_range: network and overlay filesystems refuse it, each in its own way.
        while os.sendfile(destination_fd, source.fileno(), None, _COPY_BYTES):
            pass


def _is_same_file(assembled: Path, store: DirectoryStore, path: VolumePath) -> bool:
    try:
        ours = assembled.stat()
        fd, _ = store.open_file(path)
    except (FileNotFoundError, ApiError):
        return False
    try:
        return os.path.samestat(ours, os.fstat(fd))
    finally:
        os.close(fd)


def _write_marker(path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("{}", encoding="utf-8")
    temporary.replace(path)


def _remove(folder: Path) -> None:
    """Out of sight in one step, then gone."""
    grave = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}.old")
    folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)


def _unknown_upload() -> ApiError:
    return ApiError(
        404, "NOT_FOUND", "The upload session is not found; it was aborted or has expired."
    )
