"""The folders of uploads, with parts or resumable. All state is on disk, so that an upload goes on
after `kill -9` of the server.

`uploads/<id>/` holds `upload.json` (where to, how), the bytes so far, and `complete.json` once the
file is published, so that a repeated request gets the same answer. `upload.json` carries the lock
of whoever changes the upload. Blocking; `multipart` and `resumable` call it in worker threads.
"""

from __future__ import annotations

import contextlib
import fcntl
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

from trainmount_files.server.conditions import UNCONDITIONAL, Conditions, file_info
from trainmount_files.server.errors import ApiError, invalid
from trainmount_files.server.paths import VolumePath, parse_volume_path
from trainmount_files.server.presigned import Signer
from trainmount_files.server.staging import Staging, Temporary
from trainmount_files.server.store import DirectoryStore

__all__ = [
    "MULTIPART",
    "RESUMABLE",
    "Upload",
    "UploadFolders",
    "forget_publishing",
    "publish_once",
    "published_before",
    "unknown_upload",
]

MULTIPART: Final = "multipart"
RESUMABLE: Final = "resumable"

_PUBLISHED: Final = "published"

_TOKEN: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{64})")

# Folders in the making or on their way out are under these for a moment; what a killed server left
# of them goes with the next sweep.
_NEW: Final = ".new"
_OLD: Final = ".old"
_GRACE_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload that is there."""

    folder: Path
    path: VolumePath
    overwrite: bool
    conditions: Conditions
    """Of the request that began it."""

    @property
    def etag(self) -> str | None:
        """Of the published file; None while it is not complete."""
        try:
            record = json.loads((self.folder / "complete.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return str(record["etag"])

    def mark_complete(self, etag: str) -> None:
        """Remember the answer for those who ask again, and drop the bytes."""
        # The bytes first: on a disk that is full they make room for the answer. Until it is there
        # the mark of `publish_once` stands for it.
        self._drop(keep=(_PUBLISHED,))
        marker = self.folder / "complete.json"
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps({"etag": etag}), encoding="utf-8")
        temporary.replace(marker)
        self.drop_bytes()

    def drop_bytes(self) -> None:
        self._drop()

    def _drop(self, *, keep: Sequence[str] = ()) -> None:
        for file in self.folder.iterdir():
            if file.suffix != ".json" and file.name not in keep:
                file.unlink(missing_ok=True)


class UploadFolders:
    """The uploads of one served directory. Any thread, and several servers at once."""

    def __init__(
        self,
        store: DirectoryStore,
        staging: Staging,
        signer: Signer,
        *,
        lifetime_seconds: float,
    ) -> None:
        self._store = store
        self._folder = staging.uploads
        self._signer = signer
        self._lifetime_seconds = lifetime_seconds

    def initiate(
        self,
        path: VolumePath,
        *,
        overwrite: bool,
        kind: str = MULTIPART,
        conditions: Conditions = UNCONDITIONAL,
    ) -> str:
        """Begin an upload and return its token."""
        if path.is_root:
            raise invalid(f"The path of a file must be below a volume: {path}")
        self._store.require_volume(path)
        upload_id = secrets.token_hex(16)
        # Under another name until it is whole: a folder without `upload.json` is never seen as an
        # upload.
        folder = self._folder / f"{upload_id}{_NEW}"
        folder.mkdir()
        record = {
            "path": str(path),
            "overwrite": overwrite,
            "kind": kind,
            "conditions": conditions.to_record(),
        }
        (folder / "upload.json").write_text(json.dumps(record), encoding="utf-8")
        folder.rename(self._folder / upload_id)
        return f"{upload_id}.{self._signer.sign_text(upload_id)}"

    def find(self, token: str, path: VolumePath | None, kind: str | None) -> Upload:
        """The upload of a token; `path` and `kind` must be its own unless None.

        Raises:
            ApiError: 404, it is unknown, aborted, expired or to another path; 400, of another kind.
        """
        match = _TOKEN.fullmatch(token)
        if match is None or not self._signer.verify_text(match[1], match[2]):
            raise unknown_upload()
        folder = self._folder / match[1]
        try:
            record = json.loads((folder / "upload.json").read_text(encoding="utf-8"))
            # The folder's own time moves with each part, so an upload that goes on does not expire.
            is_expired = folder.stat().st_mtime < time.time() - self._lifetime_seconds
        except FileNotFoundError:
            raise unknown_upload() from None
        if is_expired or (path is not None and record["path"] != str(path)):
            raise unknown_upload()
        if kind is not None and record["kind"] != kind:
            raise invalid(f"The upload is {record['kind']}, not {kind}.")
        conditions = Conditions.of_record(record["conditions"])
        return Upload(folder, parse_volume_path(record["path"]), record["overwrite"], conditions)

    def require_open(self, token: str, path: VolumePath | None, kind: str | None) -> None:
        """Raises ApiError 404 unless the token is of an upload, to `path` unless None, that still
        takes bytes.
        """
        if self.find(token, path, kind).etag is not None:
            raise unknown_upload()

    @contextlib.contextmanager
    def locked(self, token: str, path: VolumePath | None, kind: str | None) -> Iterator[Upload]:
        """The upload, for as long as the block lasts nobody else's to change. Raises as `find`."""
        upload = self.find(token, path, kind)
        try:
            fd = os.open(upload.folder / "upload.json", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise unknown_upload() from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            # Whoever held the lock before may have dropped the upload.
            yield self.find(token, path, kind)
        finally:
            os.close(fd)

    def abort(self, token: str, path: VolumePath | None) -> None:
        """Drop an upload. One that is gone already is fine; the file of a completed one stays."""
        match = _TOKEN.fullmatch(token)
        if match is None or not self._signer.verify_text(match[1], match[2]):
            raise unknown_upload()
        if not (self._folder / match[1]).exists():
            return
        with self.locked(token, path, None) as upload:
            _remove(upload.folder)

    def sweep(self) -> int:
        """Drop the uploads that are past their lifetime and what killed servers left; returns how
        many folders.
        """
        removed = 0
        now = time.time()
        for folder in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                age = now - folder.stat().st_mtime
                if folder.suffix == _OLD:
                    shutil.rmtree(folder, ignore_errors=True)
                    removed += 1
                elif age > (_GRACE_SECONDS if folder.suffix == _NEW else self._lifetime_seconds):
                    _remove(folder)
                    removed += 1
                elif (folder / "complete.json").exists():
                    Upload(folder, _NOWHERE, True, UNCONDITIONAL).drop_bytes()
        return removed

    def count_open(self) -> int:
        """How many uploads are neither complete nor aborted."""
        return sum(
            not folder.suffix and not (folder / "complete.json").exists()
            for folder in self._folder.iterdir()
        )


_NOWHERE: Final = VolumePath("", "", "", ())


def publish_once(
    upload: Upload, store: DirectoryStore, name: str, conditions: Conditions = UNCONDITIONAL
) -> str:
    """Publish the file `name` in the folder of an upload, and remember that; returns the etag.

    Raises:
        ApiError: as `DirectoryStore.publish`; the upload stays open.
    """
    folder = upload.folder
    forget_publishing(upload)
    # A second name, by which a server that was killed in between knows what it had done.
    (folder / _PUBLISHED).hardlink_to(folder / name)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fd = -1
    try:
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC, dir_fd=folder_fd)
        info = store.publish(
            Temporary(fd, name, folder_fd),
            upload.path,
            overwrite=upload.overwrite,
            conditions=(upload.conditions, conditions),
        )
    finally:
        if fd >= 0:
            os.close(fd)
        os.close(folder_fd)
    upload.mark_complete(info.etag)
    return info.etag


def forget_publishing(upload: Upload) -> None:
    """Before the file itself goes or is made anew: without it, the mark would say that it was
    published.
    """
    (upload.folder / _PUBLISHED).unlink(missing_ok=True)


def published_before(upload: Upload, store: DirectoryStore, name: str) -> str | None:
    """The etag if `name` was published by a server that died before it could remember so."""
    try:
        ours = (upload.folder / _PUBLISHED).stat()
    except FileNotFoundError:
        return None
    info = file_info(ours)
    if not (upload.folder / name).exists():
        return info.etag  # it was moved to its place
    try:
        return info.etag if store.stat_file(upload.path) == info else None
    except ApiError:
        return None


def unknown_upload() -> ApiError:
    return ApiError(
        404, "NOT_FOUND", "The upload session is not found; it was aborted or has expired."
    )


def _remove(folder: Path) -> None:
    """Out of sight in one step, then gone."""
    grave = folder.with_name(f"{folder.stem}.{secrets.token_hex(4)}{_OLD}")
    folder.rename(grave)
    shutil.rmtree(grave, ignore_errors=True)
