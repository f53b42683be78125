"""Bytes into a bucket: files of one request, of many parts in order, and of numbered parts.

obstore has a writer of one object, whose parts follow each other; it sends several at a time, and
makes the object visible when it is closed. It cannot create exclusively, so an exclusive file of
several parts is written under a key of its own and then copied to its place by the store, in one
step that loses to whatever is there.
"""

from __future__ import annotations

import asyncio
import os
import threading
import uuid
from collections import deque
from contextlib import suppress
from typing import Any, BinaryIO, Final

from trainmount_files.bucket.keys import Opened, bare_etag
from trainmount_files.bucket.library import Calls
from trainmount_files.bucket.location import Location
from trainmount_files.bucket.options import MAX_PARTS, BucketOptions
from trainmount_files.errors import (
    InvalidRequest,
    LocalError,
    TooLarge,
    Unavailable,
    VolumeError,
)
from trainmount_files.paths import STAGING_NAME
from trainmount_files.retry import Cancellation
from trainmount_files.volume import Buffer, Progress

__all__ = ["MAX_COPY_BYTES", "ObjectWriter", "Writing", "slice_of", "whole_bytes"]

MAX_COPY_BYTES: Final = 5 << 30
"""Of one copy by S3; obstore makes no copies of several parts."""

_UPLOAD_IS_GONE: Final = ("NoSuchUpload", "InvalidBlockList")
"""What stores say to the completion of an upload that is complete already, or was aborted."""

_MARK: Final = "trainmountput"
"""Metadata that tells whose request made an object. Letters only, as Azure has it."""

_ABORT_SECONDS: Final = 10.0

_CANCELLED_ABORT_SECONDS: Final = 1.5
"""Whoever cancels is waiting."""


def whole_bytes(data: Buffer) -> bytes:
    """`data` as what nobody changes any more; not copied where it is that already."""
    return data if isinstance(data, bytes) else bytes(data)


def slice_of(source: BinaryIO, path: str, start: int, end: int, size_bytes: int) -> bytes:
    """Bytes of the file by position.

    Raises:
        InvalidRequest: it has fewer than `size_bytes`. LocalError: it cannot be read.
    """
    try:
        data = os.pread(source.fileno(), end - start, start)
        while len(data) < end - start:
            more = os.pread(source.fileno(), end - start - len(data), start + len(data))
            if not more:
                raise InvalidRequest(
                    "upload",
                    path,
                    f"the source ended after {start + len(data)} of {size_bytes} bytes",
                )
            data += more
    except OSError as error:
        reason = (error.strerror or "failed").lower()
        raise LocalError("upload", path, f"the source cannot be read: {reason}") from error
    return data


class Writing:
    """What a volume writes with, in one process."""

    def __init__(
        self, opened: Opened, calls: Calls, location: Location, options: BucketOptions
    ) -> None:
        self.opened = opened
        self.calls = calls
        self.location = location
        self.options = options

    def check_exclusive(self, operation: str, path: str, size_bytes: int) -> None:
        """Raises TooLarge where a file of that size cannot be created with `overwrite=False`."""
        if self.location.scheme == "s3" and size_bytes > MAX_COPY_BYTES:
            raise TooLarge(
                operation,
                path,
                f"S3 creates no more than {MAX_COPY_BYTES} bytes exclusively (overwrite=False)",
            )

    def put(
        self,
        operation: str,
        path: str,
        data: bytes,
        *,
        overwrite: bool,
        cancel: Cancellation | None = None,
    ) -> str:
        """Store an object in one request; its ETag, empty where the store gives none.

        Raises:
            AlreadyExists: `overwrite=False` and the key is taken.
        """
        opened, key = self.opened, self.location.key(path)
        mark = {} if overwrite else {_MARK: uuid.uuid4().hex}

        async def call() -> str:
            try:
                result = await opened.library.put_async(
                    opened.store,
                    key,
                    data,
                    mode="overwrite" if overwrite else "create",
                    attributes=mark,
                    use_multipart=False,
                )
            except opened.library.exceptions.AlreadyExistsError:
                # Where a reply is lost obstore repeats the request, which then meets its own file.
                found = await opened.marked(key, mark)
                if found is None:
                    raise
                return bare_etag(found["e_tag"])
            return bare_etag(result["e_tag"])

        return self.calls.run(operation, path, call, cancel)

    def writer(
        self,
        operation: str,
        path: str,
        *,
        part_bytes: int,
        overwrite: bool,
        progress: Progress | None = None,
        cancel: Cancellation | None = None,
    ) -> ObjectWriter:
        """Begin an object of several parts."""
        return ObjectWriter(
            self,
            operation,
            path,
            part_bytes=part_bytes,
            overwrite=overwrite,
            progress=progress,
            cancel=cancel,
        )

    def copy(self, operation: str, source_key: str, path: str, *, overwrite: bool) -> None:
        opened, key = self.opened, self.location.key(path)

        async def call() -> None:
            await opened.library.copy_async(opened.store, source_key, key, overwrite=overwrite)

        self.calls.run(operation, path, call)

    def delete(self, operation: str, path: str, key: str) -> None:
        opened = self.opened

        async def call() -> None:
            await opened.library.delete_async(opened.store, key)

        self.calls.run(operation, path, call)


class ObjectWriter:
    """One object, its bytes in order. One thread at a time; `abort` from any.

    Holds the parts under way, `options.parallelism_of(part_bytes)`, and one more. What was handed
    over must not be changed. Where `finish` is cancelled or interrupted, obstore offers no way to
    free the parts at the store, and a part that is on its way while an upload is aborted may be
    stored all the same: the store's rule for unfinished uploads frees them.
    """

    def __init__(
        self,
        writing: Writing,
        operation: str,
        path: str,
        *,
        part_bytes: int,
        overwrite: bool,
        progress: Progress | None,
        cancel: Cancellation | None,
    ) -> None:
        self._writing = writing
        self._operation = operation
        self._path = path
        self._cancel = cancel
        self._progress = progress
        self._max_bytes = MAX_PARTS * part_bytes
        self._written_bytes = 0
        self._is_exclusive = not overwrite
        location = writing.location
        self._key = location.key(path)
        if self._is_exclusive:
            self._key = location.key(f"{STAGING_NAME}/{uuid.uuid4().hex}")
        self._parallelism = writing.options.parallelism_of(part_bytes)
        # Sizes that may still be under way, so not yet reported as stored.
        self._unreported: deque[int] = deque()
        self._mark = {_MARK: uuid.uuid4().hex}
        library = writing.opened.library
        self._file: Any = library.open_writer_async(
            writing.opened.store,
            self._key,
            buffer_size=part_bytes,
            max_concurrency=self._parallelism,
            attributes=self._mark,
        )
        self._lock = threading.Lock()
        self._is_open = True

    @property
    def written_bytes(self) -> int:
        return self._written_bytes

    def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes; waits where all parts allowed are under way.

        Raises:
            TooLarge: more than 10,000 parts would be needed.
        """
        if self._written_bytes + len(data) > self._max_bytes:
            raise TooLarge(
                self._operation,
                self._path,
                f"a file of unknown size may have {self._max_bytes} bytes here, {MAX_PARTS} parts "
                "of the first one's size; a larger first part (part_bytes) or the size allows more",
            )
        if self._is_exclusive:
            self._writing.check_exclusive(
                self._operation, self._path, self._written_bytes + len(data)
            )

        async def call() -> None:
            await self._file.write(data)

        self._writing.calls.run(self._operation, self._path, call, self._cancel)
        self._written_bytes += len(data)
        self._unreported.append(len(data))
        self._report(keep=self._parallelism)

    def finish(self) -> None:
        """Make the object visible.

        Raises:
            AlreadyExists: it was to be created exclusively, and something is at its key.
        """

        async def call() -> None:
            await self._file.close()

        with self._lock:
            self._is_open = False
        try:
            self._writing.calls.run(self._operation, self._path, call, self._cancel)
        except Unavailable as error:
            # The reply was lost, and the request repeated?
            if not _is_gone(error) or not self._is_at(self._key, self._mark):
                raise
        if self._is_exclusive:
            self._publish()
        self._report(keep=0)

    def abort(self) -> None:
        """Give up and free what was stored; never raises."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False

        is_cancelled = self._cancel is not None and self._cancel.is_set()
        seconds = _CANCELLED_ABORT_SECONDS if is_cancelled else _ABORT_SECONDS

        async def call() -> None:
            async with asyncio.timeout(seconds):
                await self._file.__aexit__(RuntimeError, None, None)

        with suppress(VolumeError, ValueError):
            self._writing.calls.run(self._operation, self._path, call)

    def _publish(self) -> None:
        writing = self._writing
        try:
            writing.copy(self._operation, self._key, self._path, overwrite=False)
        except Unavailable as error:
            # A copy is an upload of one part, without metadata; had it lost to another file, it
            # would still be known.
            if not _is_gone(error) or not self._is_at(writing.location.key(self._path), {}):
                raise
        finally:
            with suppress(VolumeError):
                writing.delete(self._operation, self._path, self._key)

    def _is_at(self, key: str, mark: dict[str, str]) -> bool:
        """Whether what was written is at the key."""
        opened = self._writing.opened

        async def call() -> bool:
            found = await opened.marked(key, mark)
            return found is not None and found["size"] == self._written_bytes

        return self._writing.calls.run(self._operation, self._path, call, self._cancel)

    def _report(self, *, keep: int) -> None:
        while len(self._unreported) > keep:
            size = self._unreported.popleft()
            if self._progress is not None:
                self._progress(size)


def _is_gone(error: VolumeError) -> bool:
    return any(code in error.reason for code in _UPLOAD_IS_GONE)
