"""Resumable uploads, as Google Cloud Storage has them and SDKs up to 0.158 use them: one file that
grows chunk by chunk at one URL, until a chunk names the total.

The bytes so far are `content` in the upload's folder. Blocking; `resumable_routes` calls it in
worker threads.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final

from trainmount_files.server.errors import invalid
from trainmount_files.server.staging import Staging, Temporary
from trainmount_files.server.store import DirectoryStore
from trainmount_files.server.uploads import (
    RESUMABLE,
    Upload,
    UploadFolders,
    publish_once,
    published_before,
)

__all__ = ["ContentRange", "Progress", "ResumableStore", "parse_content_range"]

# The store keeps whole multiples of this of every chunk but the last.
_QUANTUM_BYTES: Final = 256 * 1024

_CONTENT: Final = "content"
_COPY_BYTES: Final = 64 << 20
_RANGE: Final = re.compile(r"bytes (?:(\d{1,18})-(\d{1,18})|\*)/(?:(\d{1,18})|\*)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ContentRange:
    """Where a chunk belongs; an empty one asks for the status, or ends the file."""

    start: int
    end: int
    is_empty: bool
    total: int | None
    """The size of the file, from its last chunk on."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an upload is."""

    stored_bytes: int
    etag: str | None
    """Of the published file, once it is."""


def parse_content_range(header: str | None, content_length: int | None) -> ContentRange:
    """Read the header; without one the body is the whole file. Raises ApiError."""
    if header is None:
        if content_length is None:
            raise invalid("A chunk must have a Content-Range or a Content-Length.")
        return ContentRange(0, content_length, content_length == 0, content_length)
    match = _RANGE.fullmatch(header.strip())
    if match is None:
        raise invalid(f"Content-Range must be bytes FIRST-LAST/TOTAL or bytes */*, got {header}")
    total = None if match[3] is None else int(match[3])
    if match[1] is None:
        return ContentRange(0, 0, True, total)
    start, end = int(match[1]), int(match[2]) + 1
    if end <= start or (total is not None and end > total):
        raise invalid(f"Content-Range must name a range inside of the file, got {header}")
    if content_length is not None and content_length != end - start:
        raise invalid(f"Content-Range {header} is not {content_length} bytes long.")
    return ContentRange(start, end, False, total)


class ResumableStore:
    """The resumable uploads of one served directory. Any thread, and several servers at once."""

    def __init__(self, folders: UploadFolders, store: DirectoryStore, staging: Staging) -> None:
        self._folders = folders
        self._store = store
        self._staging = staging

    def append(self, token: str, chunk: Temporary | None, place: ContentRange) -> Progress:
        """Add what is new of a chunk; None asks for the status. Publishes once the total is there.

        Raises:
            ApiError: 404 for an upload that is gone, 400 for a chunk behind a gap or past the end,
            409 for `overwrite=False` over something.
        """
        with self._folders.locked(token, None, RESUMABLE) as upload:
            done = upload.etag or published_before(upload, self._store, _CONTENT)
            if done is not None:
                if upload.etag is None:
                    upload.mark_complete(done)
                return Progress(place.end, done)
            stored = self._extend(upload, chunk, place)
            if place.total is None or stored < place.total:
                return Progress(stored, None)
            if stored > place.total:
                raise invalid(f"The file has {stored} bytes already, not {place.total}.")
            return Progress(stored, publish_once(upload, self._store, _CONTENT))

    def _extend(self, upload: Upload, chunk: Temporary | None, place: ContentRange) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(upload.folder / _CONTENT, flags, 0o666)
        try:
            stored = os.lseek(fd, 0, os.SEEK_END)
            if chunk is None:
                return stored
            if place.start > stored:
                raise invalid(f"The chunk begins at {place.start}, but {stored} bytes are stored.")
            end = place.start + os.fstat(chunk.fd).st_size
            if place.total is None or end < place.total:
                end -= end % _QUANTUM_BYTES
            offset = stored - place.start
            while stored < end:
                wanted = min(end - stored, _COPY_BYTES)
                copied = os.sendfile(fd, chunk.fd, offset, wanted)
                if not copied:
                    break
                offset, stored = offset + copied, stored + copied
            self._staging.sync(fd)
        finally:
            os.close(fd)
        # The folder's time is when the upload last went on, which its expiry counts from.
        os.utime(upload.folder)
        return stored
