"""`s3://`, `gs://`, `az://`: a prefix of a bucket as a volume, through obstore.

A file is an object; a version is its ETag, and a read asks the store for that version only. What a
bucket does not have is made up for, and said where it costs a request: directories (`keys.py`),
names that exclude each other (`places.py`), pages of one directory (`listing.py`), exclusive files
of several parts (`writing.py`), parts out of order (`parts.py`). A rename is a copy by the store
and a delete.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import get_spawning_popen
from typing import Any, BinaryIO, Final, TypeVar

from trainmount_files.bucket.keys import (
    DIRECTORY_KEY,
    Opened,
    check_file_name,
    check_name,
    to_stat,
)
from trainmount_files.bucket.library import Calls, obstore
from trainmount_files.bucket.listing import Listing
from trainmount_files.bucket.location import Location
from trainmount_files.bucket.metadata import check_credentials
from trainmount_files.bucket.options import MAX_PARTS, BucketOptions
from trainmount_files.bucket.parts import BucketUpload
from trainmount_files.bucket.places import Places
from trainmount_files.bucket.reading import PIECE_BYTES, WHOLE_BYTES, read_exactly
from trainmount_files.bucket.signed import SignedRequests
from trainmount_files.bucket.stores import make_signed_requests, make_store
from trainmount_files.bucket.writing import MAX_COPY_BYTES, Writing, slice_of, whole_bytes
from trainmount_files.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InexactRange,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    TooLarge,
    Unavailable,
    Unsupported,
)
from trainmount_files.paths import join
from trainmount_files.per_process import PerProcess
from trainmount_files.retry import Cancellation
from trainmount_files.volume import (
    MIB,
    Buffer,
    ByteRange,
    Capabilities,
    FileStat,
    Page,
    Progress,
    Upload,
)

__all__ = ["BucketVolume"]

T = TypeVar("T")

_MAX_PUT_BYTES: Final = {"s3": 5 << 30, "gs": 5 << 40, "az": 5000 * MIB}

_MAX_PART_BYTES: Final = {"s3": 5 << 30, "gs": 5 << 30, "az": 4000 * MIB}

_KEYS_TO_LOOK_AT: Final = 3
"""Of a directory that is to be removed: its own two may be among them."""


@dataclass(frozen=True, slots=True)
class _Process:
    """What one process has of a volume."""

    opened: Opened
    calls: Calls
    writing: Writing
    listing: Listing
    places: Places
    signed: SignedRequests | None


class BucketVolume:
    """A prefix of a bucket; implements `trainmount_files.volume.Volume` and `ReadsToFile`.

    May be pickled and forked: the store and its connections are made anew in the other process.
    Explicit storage options travel with it only while a child is being spawned; a copy that was
    pickled otherwise finds endpoint and credentials in its own environment.
    """

    def __init__(self, location: Location, options: BucketOptions | None = None) -> None:
        """No request is sent.

        Raises:
            Unsupported: the extra `bucket` is not installed. InvalidRequest: a storage option is
            wrong.
        """
        self._location = location
        self._options = options or BucketOptions()
        self._closed = False
        self._process = PerProcess(self._connect)
        # A mistake in the options is told now.
        make_store(obstore(), location, self._options)

    def __repr__(self) -> str:
        return f"BucketVolume({self.url!r})"

    def __reduce__(self) -> tuple[type[BucketVolume], tuple[Location, BucketOptions]]:
        options = self._options
        if get_spawning_popen() is None:
            options = replace(options, storage={})
        return BucketVolume, (self._location, options)

    @property
    def url(self) -> str:
        return self._location.url

    @property
    def capabilities(self) -> Capabilities:
        scheme = self._location.scheme
        return Capabilities(
            atomic_rename=False,
            exclusive_create=True,
            keeps_directories=False,
            max_put_bytes=_MAX_PUT_BYTES.get(scheme),
            min_part_bytes=1,
            max_parts=MAX_PARTS,
            max_part_bytes=_MAX_PART_BYTES.get(scheme, 4 << 30),
            part_bytes=self._options.part_size_bytes,
            parts_in_order=True,
        )

    def stat(self, path: str) -> FileStat:
        """As the protocol has it; where keys `p` and `p/f` are both there, `p` is the file."""
        return self._stat("stat", path)

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        """As the protocol has it; where keys `p` and `p/f` are both there, the file is listed and
        then the directory, and the page of `p` has `p/f`.
        """
        here = self._here("list")
        check_name(self._location.scheme, "list", path)
        return here.listing.page(path, self._location.key(path), page_token)

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        check_file_name(self._location.scheme, "read", path)
        target = memoryview(buffer).cast("B")
        if len(target) < len(byte_range):
            raise ValueError(f"buffer of {len(target)} bytes is shorter than {byte_range}")

        def take(distance: int, piece: memoryview) -> None:
            target[distance : distance + len(piece)] = piece

        self._read(path, byte_range, take, WHOLE_BYTES, version, cancel)

    def read_to_file(
        self,
        path: str,
        byte_range: ByteRange,
        descriptor: int,
        *,
        version: str | None = None,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        """See `ReadsToFile`; one request, and memory of two pieces of 1 MiB."""
        check_file_name(self._location.scheme, "read", path)

        def take(distance: int, piece: memoryview) -> None:
            view, offset = piece, byte_range.start + distance
            while view:
                written = os.pwrite(descriptor, view, offset)
                view, offset = view[written:], offset + written
            if progress is not None:
                progress(len(piece))

        self._read(path, byte_range, take, PIECE_BYTES, version, cancel)

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        check_file_name(self._location.scheme, "put", path)
        whole = whole_bytes(data)
        limit = self.capabilities.max_put_bytes
        if limit is not None and len(whole) > limit:
            raise TooLarge("put", path, f"one request holds at most {limit} bytes here")
        self._check_place("put", path, overwrite=overwrite)
        etag = self._here("put").writing.put("put", path, whole, overwrite=overwrite)
        return self._stored("put", path, len(whole), etag, want_version=want_version)

    def upload(
        self,
        path: str,
        source: BinaryIO,
        size_bytes: int,
        *,
        overwrite: bool = True,
        progress: Progress | None = None,
        cancel: threading.Event | None = None,
        want_version: bool = True,
    ) -> FileStat:
        """As the protocol has it. `progress` runs behind by the parts under way.

        Raises also: TooLarge: `overwrite=False` and more than 5 GiB, on S3.
        """
        check_file_name(self._location.scheme, "upload", path)
        writing, options = self._here("upload").writing, self._options
        part_bytes = options.part_bytes_of(size_bytes)
        if not overwrite and size_bytes > part_bytes:
            writing.check_exclusive("upload", path, size_bytes)
        self._check_place("upload", path, overwrite=overwrite, cancel=cancel)
        if size_bytes <= part_bytes:
            data = slice_of(source, path, 0, size_bytes, size_bytes)
            etag = writing.put("upload", path, data, overwrite=overwrite, cancel=cancel)
            if progress is not None and data:
                progress(len(data))
            return self._stored("upload", path, size_bytes, etag, want_version=want_version)
        if not overwrite:
            self._check_free("upload", path)
        writer = writing.writer(
            "upload",
            path,
            part_bytes=part_bytes,
            overwrite=overwrite,
            progress=progress,
            cancel=cancel,
        )
        try:
            for start in range(0, size_bytes, part_bytes):
                end = min(start + part_bytes, size_bytes)
                writer.write(slice_of(source, path, start, end, size_bytes))
            writer.finish()
        except BaseException:
            writer.abort()
            raise
        return self._stored("upload", path, size_bytes, "", want_version=want_version)

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        """As the protocol has it, but a part that is more than `held_back_bytes` behind cannot be
        replaced by other bytes any more (Unsupported).
        """
        check_file_name(self._location.scheme, "upload", path)
        self._check_place("upload", path, overwrite=overwrite, cancel=cancel)
        if not overwrite:
            self._check_free("upload", path)

        def stored(size_bytes: int, etag: str) -> FileStat:
            return self._stored("upload", path, size_bytes, etag, want_version=True)

        return BucketUpload(
            self._here("upload").writing, path, overwrite=overwrite, cancel=cancel, to_stat=stored
        )

    def delete(self, path: str) -> None:
        check_file_name(self._location.scheme, "delete", path)
        # A store says that it has deleted what was not there.
        if self._stat("delete", path).is_directory:
            raise IsADirectory("delete", path, "is a directory")
        self._here("delete").writing.delete("delete", path, self._location.key(path))

    def rename(self, source: str, destination: str) -> FileStat:
        """As the protocol has it. What is written to `source` while it is copied may be lost."""
        check_file_name(self._location.scheme, "rename", source)
        check_file_name(self._location.scheme, "rename", destination)
        found = self._stat("rename", source)
        if found.is_directory:
            raise IsADirectory("rename", source, "is a directory")
        if source == destination:
            return found
        self._check_place("rename", destination, overwrite=True)
        writing = self._here("rename").writing
        if self._location.scheme == "s3" and found.size_bytes > MAX_COPY_BYTES:
            self._copy_through_here(found, destination)
        else:
            key = self._location.key(source)
            writing.copy("rename", key, destination, overwrite=True)
        copied = self._stat("rename", destination)
        if copied.size_bytes != found.size_bytes:
            raise Unavailable("rename", source, "the copy has another size; the source is kept")
        writing.delete("rename", source, self._location.key(source))
        return copied

    def make_directory(self, path: str) -> None:
        names = check_name(self._location.scheme, "make directory", path)
        opened = self._here("make directory").opened
        parents = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
        if not parents:
            return
        keys = [self._location.key(parent) for parent in parents]

        async def call() -> None:
            files = await asyncio.gather(*(opened.head(key) for key in keys))
            for parent, meta in zip(parents, files, strict=True):
                if meta is not None and parent != path:
                    raise NotADirectory("make directory", path, f"{parent} is a file")
                if meta is not None:
                    raise AlreadyExists("make directory", path, "a file is at the path")
            below = await asyncio.gather(*(opened.has_below(key) for key in keys[:-1]), _never())
            for key, is_there in zip(keys, below, strict=True):
                if not is_there:
                    await opened.put_directory(key)

        self._run("make directory", path, call)

    def remove_directory(self, path: str) -> None:
        """As the protocol has it.

        Raises also: Unsupported: another tool keeps the directory by a key that ends in a slash,
        and the store is not S3, or its keys are known to obstore alone.
        """
        here = self._here("remove directory")
        opened = here.opened
        if not check_name(self._location.scheme, "remove directory", path):
            raise InvalidRequest("remove directory", path, "the volume's root cannot be removed")
        key = self._location.key(path)

        async def call() -> bool:
            found = await opened.some_below(key, _KEYS_TO_LOOK_AT)
            if not found:
                if await opened.head(key) is not None:
                    raise NotADirectory("remove directory", path, "is a file")
                raise NotFound("remove directory", path, "nothing is there")
            if found - {key, join(key, DIRECTORY_KEY)}:
                raise DirectoryNotEmpty("remove directory", path, "the directory has entries")
            if key in found and here.signed is None:
                raise Unsupported(
                    "remove directory",
                    path,
                    "it is kept by a key that ends in a slash, which obstore cannot delete",
                )
            if found != {key}:
                await opened.library.delete_async(opened.store, join(key, DIRECTORY_KEY))
            return key in found

        if self._run("remove directory", path, call) and here.signed is not None:
            here.signed.send("remove directory", path, "DELETE", f"{key}/")

    def close(self) -> None:
        self._closed = True
        process = self._process.peek()
        if process is not None:
            process.calls.close()
            if process.signed is not None:
                process.signed.close()

    def _connect(self) -> _Process:
        library = obstore()
        location, options = self._location, self._options
        store = make_store(library, location, options)
        if location.scheme != "memory":
            check_credentials(location, store.config, store.credential_provider)
        signed = make_signed_requests(store, location, options)
        opened, calls = Opened(library, store), Calls()
        return _Process(
            opened,
            calls,
            Writing(opened, calls, location, options),
            Listing(opened, calls, signed, options.page_entries),
            Places(opened, location),
            signed,
        )

    def _here(self, operation: str) -> _Process:
        if self._closed:
            raise ValueError(f"{operation} on a closed volume")
        return self._process.get()

    def _run(
        self,
        operation: str,
        path: str,
        call: Callable[[], Coroutine[Any, Any, T]],
        cancel: Cancellation | None = None,
    ) -> T:
        return self._here(operation).calls.run(operation, path, call, cancel)

    def _stat(self, operation: str, path: str, cancel: Cancellation | None = None) -> FileStat:
        here = self._here(operation)
        if not check_name(self._location.scheme, operation, path):
            return FileStat("", is_directory=True)
        key = self._location.key(path)
        head = partial(here.opened.head_now, key)
        meta = here.calls.run_blocking(operation, path, head, cancel)
        if meta is not None:
            return to_stat(path, meta)
        if self._run(operation, path, lambda: here.opened.has_below(key), cancel):
            return FileStat(path, is_directory=True)
        raise NotFound(operation, path, "nothing is there")

    def _stored(
        self, operation: str, path: str, size_bytes: int, etag: str, *, want_version: bool
    ) -> FileStat:
        """What was just stored; another request, as only that tells the time."""
        if not want_version:
            return FileStat(path, is_directory=False, size_bytes=size_bytes, version=etag)
        found = self._stat(operation, path)
        if found.size_bytes == size_bytes and etag in ("", found.version):
            return found
        # Somebody else has replaced it already.
        return FileStat(path, False, size_bytes, found.mtime_ns, etag)

    def _check_place(
        self, operation: str, path: str, *, overwrite: bool, cancel: Cancellation | None = None
    ) -> None:
        if not self._options.check_names:
            return
        places = self._here(operation).places
        self._run(
            operation, path, lambda: places.check(operation, path, overwrite=overwrite), cancel
        )

    def _check_free(self, operation: str, path: str) -> None:
        """An early word, before the bytes are sent; the store settles the race."""
        with suppress(NotFound):
            self._stat(operation, path)
            raise AlreadyExists(operation, path, "something is at the path")

    def _read(
        self,
        path: str,
        byte_range: ByteRange,
        take: Callable[[int, memoryview], None],
        piece_bytes: int,
        version: str | None,
        cancel: Cancellation | None,
    ) -> None:
        here = self._here("read")
        if not len(byte_range):
            # HTTP has no empty range.
            self._read_nothing(path, byte_range.start, version, cancel)
            return
        try:
            read_exactly(
                here.opened,
                here.calls,
                path,
                self._location.key(path),
                byte_range,
                take,
                piece_bytes=piece_bytes,
                version=version,
                cancel=cancel,
            )
        except NotFound:
            if self._stat("read", path).is_directory:
                raise IsADirectory("read", path, "is a directory") from None
            raise

    def _read_nothing(
        self, path: str, offset: int, version: str | None, cancel: Cancellation | None
    ) -> None:
        found = self._stat("read", path, cancel)
        if found.is_directory:
            raise IsADirectory("read", path, "is a directory")
        if version is not None and found.version != version:
            raise PreconditionFailed("read", path, "the file has changed")
        if offset > found.size_bytes:
            raise InexactRange("read", path, "the range reaches past the end of the file")

    def _copy_through_here(self, found: FileStat, destination: str) -> None:
        """Copy what the store does not copy by itself; memory as of an upload."""
        part_bytes = self._options.part_bytes_of(found.size_bytes)
        writing = self._here("rename").writing
        writer = writing.writer("rename", destination, part_bytes=part_bytes, overwrite=True)
        try:
            for start in range(0, found.size_bytes, part_bytes):
                part = ByteRange(start, min(start + part_bytes, found.size_bytes))
                # Nobody else has the buffer, so it may be handed over as it is.
                buffer = bytearray(len(part))
                self.read_into(found.path, part, buffer, version=found.version)
                writer.write(buffer)
            writer.finish()
        except BaseException:
            writer.abort()
            raise


async def _never() -> bool:
    """Of the directory that is to be made: it gets its key even if something is in it already."""
    return False
