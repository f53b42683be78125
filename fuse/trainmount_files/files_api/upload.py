"""From a file or a buffer to a file of the volume. Called by `volume.py`.

    put       one PUT
    upload    one PUT below the threshold, parts above it; one PUT as well where the store refuses
    parts

Whatever fails, the path keeps its old content or none.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import BinaryIO, Final

from trainmount_files.cancellation import LinkedEvent, TimeLimit
from trainmount_files.errors import (
    AlreadyExists,
    Cancelled,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unavailable,
    Unsupported,
    VolumeError,
)
from trainmount_files.files_api.api import BodySource, Call, FilesApi, encode_path
from trainmount_files.files_api.file_bodies import SourceTooShort, body_of, too_short, unreadable
from trainmount_files.files_api.multipart import ABORT_SECONDS, MultipartUpload, abort_upload
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.transport import Transport
from trainmount_files.retry import Cancellation
from trainmount_files.volume import MIB, Buffer, ByteRange, FileStat, Progress

__all__ = ["Uploads", "part_size_for"]

_REFUSALS: Final = (InvalidRequest, NotFound, PermissionDenied, Unsupported)
"""What a store that offers no parts says to the first question or the first part; one PUT then
tells the truth.
"""


_HURRY_SECONDS: Final = 1.5
"""For all aborts together when a volume is closed, where a person waits."""

_AT_ONCE_BYTES: Final = 64 << 10
"""Files up to this size are read before they are sent."""


def part_size_for(path: str, size_bytes: int, options: FilesApiOptions) -> int:
    """Bytes of each part but the last, so that the parts suffice.

    Raises:
        TooLarge: the file is larger than all parts together may be.
    """
    least = -(-size_bytes // options.max_parts)
    if least > options.max_part_bytes:
        limit = options.max_part_bytes * options.max_parts
        raise TooLarge("upload", path, f"a file may have {limit} bytes, this one has {size_bytes}")
    if least <= options.part_size_bytes:
        return options.part_size_bytes
    return min(-(-least // MIB) * MIB, options.max_part_bytes)


class Uploads:
    """Stores files in one volume. Any thread may call."""

    def __init__(
        self,
        api: FilesApi,
        transport: Transport,
        root: str,
        options: FilesApiOptions,
        stat: Callable[[str], FileStat],
    ) -> None:
        self._api = api
        self._transport = transport
        self._root = root
        self._options = options
        self._stat = stat
        # Guarded by the lock.
        self._begun: weakref.WeakSet[MultipartUpload] = weakref.WeakSet()
        self._lock = threading.Lock()

    def put(
        self, path: str, data: Buffer, *, overwrite: bool, want_version: bool = True
    ) -> FileStat:
        """Store a whole buffer, as `Volume.put` says."""
        size_bytes = memoryview(data).nbytes
        self._put("put", path, size_bytes, lambda: data, overwrite=overwrite, cancel=None)
        return self._after_put("put", path, size_bytes, want_version)

    def upload(
        self,
        path: str,
        source: BinaryIO,
        size_bytes: int,
        *,
        overwrite: bool,
        progress: Progress | None,
        cancel: Cancellation | None,
        want_version: bool,
    ) -> FileStat:
        """Store the first `size_bytes` bytes of a file, as `Volume.upload` says."""
        descriptor = source.fileno()
        present = os.fstat(descriptor).st_size
        if present < size_bytes:
            raise too_short(path, size_bytes)

        def slice_of(start: int, length: int, stop: Cancellation | None) -> BodySource:
            piece = ByteRange(start, start + length)
            return body_of(path, descriptor, piece, stop, size_bytes=size_bytes)

        options = self._options
        if size_bytes > options.max_put_bytes or (
            size_bytes >= max(options.multipart_threshold_bytes, 1)
        ):
            done = self._in_parts(path, slice_of, size_bytes, overwrite, progress, cancel)
            if done is not None:
                return done
        whole: BodySource = slice_of(0, size_bytes, cancel)
        if size_bytes <= _AT_ONCE_BYTES:
            # Read once and sent with the headers: one packet, one turn of the other side.
            whole = partial(bytes, _read_whole(descriptor, path, size_bytes))
        self._put("upload", path, size_bytes, whole, overwrite=overwrite, cancel=cancel)
        if progress is not None:
            progress(size_bytes)
        return self._after_put("upload", path, size_bytes, want_version)

    def start(
        self,
        path: str,
        *,
        overwrite: bool,
        cancel: Cancellation | None = None,
        num_parts: int | None = None,
    ) -> MultipartUpload:
        """Begin an upload in parts; `num_parts` where it is known how many there will be."""
        upload = MultipartUpload(
            self._api,
            self._transport,
            path=path,
            remote_path=f"{self._root}/{path}",
            overwrite=overwrite,
            max_parts=self._options.max_parts,
            max_part_bytes=self._options.max_part_bytes,
            num_parts=num_parts,
            url_lifetime_seconds=self._options.url_lifetime_seconds,
            stat=self._stat,
            stored=lambda: self._stored("upload", path),
            put_empty=lambda: self.put(path, b"", overwrite=overwrite),
            cancel=cancel,
        )
        with self._lock:
            self._begun.add(upload)
        return upload

    def abandon(self, path: str, token: str) -> bool:
        """Abort an upload that another process began; whether nothing is left of it."""
        limit = TimeLimit(ABORT_SECONDS)
        return abort_upload(self._api, path, f"{self._root}/{path}", token, limit)

    def abort_all(self) -> None:
        """Give up what is neither complete nor aborted; for an end in a hurry."""
        with self._lock:
            begun = list(self._begun)
        limit = TimeLimit(_HURRY_SECONDS)
        for upload in begun:
            upload.abort_within(limit)

    def _put(
        self,
        operation: str,
        path: str,
        size_bytes: int,
        body: BodySource,
        *,
        overwrite: bool,
        cancel: Cancellation | None,
    ) -> None:
        limit = self._options.max_put_bytes
        if size_bytes > limit:
            reason = f"one request may store {limit} bytes, the file has {size_bytes}"
            raise TooLarge(operation, path, reason)
        call = Call(
            operation=operation,
            path=path,
            method="PUT",
            target=f"/files{encode_path(operation, f'{self._root}/{path}')}",
            query={"overwrite": "true" if overwrite else "false"},
            headers={"Content-Type": "application/octet-stream"},
        )
        outcome = self._api.call(call, body=body, cancel=cancel)
        if isinstance(outcome.error, AlreadyExists) and outcome.was_uncertain:
            # Ours or another's: to claim either could make two winners or none.
            reason = "an answer was lost, and something is at the path: this file or another"
            raise Unavailable(operation, path, reason)
        outcome.unwrap()

    def _after_put(
        self, operation: str, path: str, size_bytes: int, want_version: bool
    ) -> FileStat:
        """The file after a PUT, whose answer tells nothing of it."""
        if want_version:
            return self._stored(operation, path)
        return FileStat(path, is_directory=False, size_bytes=size_bytes)

    def _stored(self, operation: str, path: str) -> FileStat:
        """A file that was just stored. Where that cannot be asked, the error says that it is."""
        try:
            return self._stat(path)
        except VolumeError as error:
            reason = f"the file is stored, but its version cannot be had: {error.reason}"
            failure = type(error)(operation, path, reason)
        raise failure

    def _in_parts(
        self,
        path: str,
        slice_of: Callable[[int, int, Cancellation | None], BodySource],
        size_bytes: int,
        overwrite: bool,
        progress: Progress | None,
        cancel: Cancellation | None,
    ) -> FileStat | None:
        """Store a file in parts; None where the store takes no parts and one request may do."""
        part_bytes = part_size_for(path, size_bytes, self._options)
        may_fall_back = size_bytes <= self._options.max_put_bytes
        stop = LinkedEvent(cancel)
        num_parts = -(-size_bytes // part_bytes)
        try:
            upload = self.start(path, overwrite=overwrite, cancel=stop, num_parts=num_parts)
        except _REFUSALS as refusal:
            if may_fall_back:
                return None
            raise self._no_parts(path, size_bytes, refusal) from None
        slices = [
            (number, start, min(part_bytes, size_bytes - start))
            for number, start in enumerate(range(0, size_bytes, part_bytes), start=1)
        ]

        def send(number: int, start: int, length: int) -> None:
            if stop.is_set():
                raise Cancelled("upload", path, "cancelled")
            upload.send_part(number, length, slice_of(start, length, stop))
            if progress is not None:
                progress(length)

        try:
            # The first one alone: whether the store's own address can be reached shows here, at the
            # cost of one part.
            try:
                send(*slices[0])
            except SourceTooShort:
                raise
            except _REFUSALS as refusal:
                if may_fall_back:
                    return None
                raise self._no_parts(path, size_bytes, refusal) from None
            self._send_all(send, slices[1:], stop)
            return upload.complete()
        except BaseException as error:
            # Who cancels or interrupts waits at the prompt.
            upload.abort(in_hurry=isinstance(error, Cancelled) or not isinstance(error, Exception))
            raise
        finally:
            upload.abort(in_hurry=False)

    def _no_parts(self, path: str, size_bytes: int, refusal: VolumeError) -> VolumeError:
        """Storage behind a firewall takes no parts; that it takes nothing from this identity may be
        the reason as well, so both are told.
        """
        if isinstance(refusal, NotFound):
            return refusal
        limit = self._options.max_put_bytes
        reason = (
            f"one request may store {limit} bytes, the file has {size_bytes}, and the store takes "
            f"no parts of it ({refusal.reason}); opened with chunk_above_bytes={limit}, the volume "
            "stores larger files as chunks"
        )
        return TooLarge("upload", path, reason)

    def _send_all(
        self,
        send: Callable[[int, int, int], None],
        slices: list[tuple[int, int, int]],
        stop: LinkedEvent,
    ) -> None:
        """Send parts at once; after a failure none is started and those under way give up."""
        if not slices:
            return
        workers = min(self._options.parallelism, len(slices))
        with ThreadPoolExecutor(workers, thread_name_prefix="trainmount-upload") as executor:
            futures: list[Future[None]] = [executor.submit(send, *each) for each in slices]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                failures = [error for each in futures if (error := _failure_of(each)) is not None]
            except BaseException:
                # KeyboardInterrupt, for one.
                failures = []
                stop.set()
                executor.shutdown(wait=False, cancel_futures=True)
                raise
            if failures:
                stop.set()
                executor.shutdown(wait=False, cancel_futures=True)
        # The cause, not the parts that gave up because of it.
        failures.sort(key=lambda error: isinstance(error, Cancelled))
        if failures:
            raise failures[0]


def _failure_of(future: Future[None]) -> BaseException | None:
    return future.exception() if future.done() and not future.cancelled() else None


def _read_whole(descriptor: int, path: str, size_bytes: int) -> bytes:
    try:
        data = os.pread(descriptor, size_bytes, 0)
    except OSError as error:
        raise unreadable(path, error) from error
    if len(data) < size_bytes:
        raise too_short(path, size_bytes)
    return data
