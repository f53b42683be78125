"""Uploads in numbered parts, each a file `<number>-<etag>` in the upload's folder; `assembled`
while they are being joined.

Blocking; `upload_routes` calls it in worker threads.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_files.server.conditions import UNCONDITIONAL, Conditions
from trainmount_files.server.errors import invalid
from trainmount_files.server.paths import VolumePath
from trainmount_files.server.staging import Staging, Temporary
from trainmount_files.server.store import DirectoryStore
from trainmount_files.server.uploads import (
    MULTIPART,
    Upload,
    UploadFolders,
    forget_publishing,
    publish_once,
    published_before,
    unknown_upload,
)

__all__ = ["MAX_PARTS", "Part", "UploadStore"]

MAX_PARTS: Final = 10_000

_PART_NAME: Final = re.compile(r"[0-9]{5}-[0-9a-f]{32}")
_ASSEMBLED: Final = "assembled"
_COPY_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """A part as the client names it in complete."""

    number: int
    etag: str
    """Without its quotes."""


class UploadStore:
    """The parts of the uploads of one served directory. Any thread, and several servers at once."""

    def __init__(
        self,
        folders: UploadFolders,
        store: DirectoryStore,
        staging: Staging,
        *,
        min_part_bytes: int,
    ) -> None:
        self._folders = folders
        self._store = store
        self._staging = staging
        self._min_part_bytes = min_part_bytes

    def require_open(self, token: str, path: VolumePath) -> None:
        """Raises ApiError 404 unless the token is of an upload to `path` that still takes parts."""
        self._folders.require_open(token, path, MULTIPART)

    def put_part(self, token: str, number: int, temporary: Temporary) -> str:
        """Keep a finished body as part `number`, instead of an earlier one; returns its etag."""
        upload = self._folders.find(token, None, MULTIPART)
        if upload.etag is not None:
            raise unknown_upload()
        etag = secrets.token_hex(16)
        self._staging.sync(temporary.fd)
        name = f"{number:05d}-{etag}"
        try:
            os.replace(temporary.name, upload.folder / name, src_dir_fd=temporary.directory_fd)
        except FileNotFoundError:
            raise unknown_upload() from None  # aborted meanwhile
        for other in upload.folder.glob(f"{number:05d}-*"):
            if other.name != name:
                other.unlink(missing_ok=True)
        return etag

    def complete(
        self,
        token: str,
        path: VolumePath,
        parts: Sequence[Part],
        conditions: Conditions = UNCONDITIONAL,
    ) -> str:
        """Join the parts and publish the file; returns its etag. A second complete of the same
        upload changes nothing and returns the same.

        Raises:
            ApiError: 400 for a list that does not match what is stored, after which the upload can
            still be completed;
                409 if it was begun with `overwrite=False` and something is at the path; 412 if the
                file there is not the one that the conditions are for.
        """
        with self._folders.locked(token, path, MULTIPART) as upload:
            done = upload.etag
            if done is not None:
                return done
            done = published_before(upload, self._store, _ASSEMBLED)
            if done is not None:
                upload.mark_complete(done)
                return done
            try:
                self._assemble(upload, self._select(upload, parts))
            except FileNotFoundError:
                raise invalid("A part was uploaded again meanwhile.") from None
            return publish_once(upload, self._store, _ASSEMBLED, conditions)

    def _select(self, upload: Upload, parts: Sequence[Part]) -> list[Path]:
        if not parts:
            raise invalid("parts must not be empty")
        numbers = [part.number for part in parts]
        if any(later <= earlier for earlier, later in itertools.pairwise(numbers)):
            raise invalid("parts must be in ascending order of part_number")
        files = [upload.folder / f"{part.number:05d}-{part.etag}" for part in parts]
        for part, file in zip(parts, files, strict=True):
            if not _PART_NAME.fullmatch(f"{part.number:05d}-{part.etag}") or not file.exists():
                raise invalid(f"Part {part.number} was not uploaded, or has another ETag.")
        for part, file in zip(parts[:-1], files[:-1], strict=True):
            if file.stat().st_size < self._min_part_bytes:
                least = self._min_part_bytes
                raise invalid(f"Part {part.number} is not the last and is below {least} bytes.")
        return files

    def _assemble(self, upload: Upload, files: list[Path]) -> None:
        assembled = upload.folder / _ASSEMBLED
        # Never into what is there: a file that was published may be the same one.
        forget_publishing(upload)
        assembled.unlink(missing_ok=True)
        fd = os.open(assembled, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            for file in files:
                _append(file, fd)
        except OSError:
            # A disk that is full is not to be kept so by half a file.
            assembled.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _append(file: Path, destination_fd: int) -> None:
    """Copy inside of the kernel."""
    with file.open("rb", buffering=0) as source:
        # Not copy_file_range: network and overlay filesystems refuse it, each in its own way.
        while os.sendfile(destination_fd, source.fileno(), None, _COPY_BYTES):
            pass
