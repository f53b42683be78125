"""`/Volumes/...`: a Unity Catalog volume, or a directory of one, through the Files API.

    stat list delete make remove    -> api.py: authenticated calls, retried
    read_into                       -> download.py: signed URL or Files API, an exact range
    put upload start_upload         -> upload.py, multipart.py: one PUT or parts

What the wire cannot say in one answer (is the missing file a directory?) is asked only after a
failure.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from trainmount_files.errors import (
    AlreadyExists,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    Unavailable,
    VolumeError,
    local_errors,
)
from trainmount_files.files_api.answers import (
    content_length,
    file_stat,
    json_object,
    last_modified,
)
from trainmount_files.files_api.api import Call, FilesApi, encode_path
from trainmount_files.files_api.download import Downloads, FileTarget, MemoryTarget
from trainmount_files.files_api.file_bodies import SourceTooShort
from trainmount_files.files_api.multipart import MultipartUpload
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.signed_urls import SignedUrls
from trainmount_files.files_api.transport import Transport
from trainmount_files.files_api.upload import Uploads
from trainmount_files.paths import join, split
from trainmount_files.per_process import PerProcess
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

__all__ = ["FilesApiVolume"]

_LOG: Final = logging.getLogger(__name__)

_PAGE_ENTRIES: Final = 1000
"""The service's maximum."""

_COPY_BYTES: Final = 8 * MIB
"""Bytes moved at once by a rename, which is a copy; also its memory."""


@dataclass(frozen=True, slots=True)
class _Process:
    """What one process has of a volume: connections, signed URLs."""

    transport: Transport
    api: FilesApi
    downloads: Downloads
    uploads: Uploads


class FilesApiVolume:
    """A directory of a Unity Catalog volume; implements `trainmount_files.volume.Volume`.

    May be pickled and forked: connections and credentials are made anew in the other process.
    """

    def __init__(
        self, root: str, credentials: Credentials, options: FilesApiOptions | None = None
    ) -> None:
        """`root` is `/Volumes/<catalog>/<schema>/<volume>[/...]`. No request is sent."""
        self._root = root
        self._credentials = credentials
        self._options = options or FilesApiOptions()
        self._closed = False
        self._process = PerProcess(self._connect)

    def __repr__(self) -> str:
        return f"FilesApiVolume({self._root!r})"

    def __reduce__(self) -> tuple[type[FilesApiVolume], tuple[str, Credentials, FilesApiOptions]]:
        return FilesApiVolume, (self._root, self._credentials, self._options)

    @property
    def url(self) -> str:
        return self._root

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            atomic_rename=False,
            renames_through_client=True,
            exclusive_create=True,
            coarse_versions=True,
            max_put_bytes=self._options.max_put_bytes,
            min_part_bytes=self._options.min_part_bytes,
            max_parts=self._options.max_parts,
            max_part_bytes=self._options.max_part_bytes,
            part_bytes=self._options.part_size_bytes,
        )

    @property
    def api(self) -> FilesApi:
        """The workspace's API over this volume's connections, for calls that are about no file.

        Each process has its own, so keep none. Raises ValueError after `close`.
        """
        return self._here().api

    def stat(self, path: str) -> FileStat:
        split("stat", path)
        if not path:
            return self._stat_directory("stat", path)
        try:
            return self._stat_file("stat", path)
        except NotFound:
            pass
        return self._stat_directory("stat", path)

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        query: dict[str, str | int] = {"page_size": _PAGE_ENTRIES}
        if page_token is not None:
            query["page_token"] = page_token
        call = self._call("list", path, "GET", "directories", query)
        outcome = self._here().api.call(call)
        if isinstance(outcome.error, NotFound) and self._is_file(path):
            raise NotADirectory("list", path, "is a file")
        answer = json_object(outcome.unwrap().body)
        contents = answer.get("contents") or []
        token = answer.get("next_page_token") or None
        if not isinstance(contents, list) or not isinstance(token, str | None):
            raise Unavailable("list", path, "the answer is no listing")
        entries: list[FileStat] = []
        refused: list[str] = []
        for value in contents:
            entry = _to_entry(path, value)
            if entry is not None:
                entries.append(entry)
            else:
                refused.append(str(value.get("name") if isinstance(value, dict) else value))
        return Page(tuple(entries), token, tuple(refused))

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self._file("read", path)
        target = memoryview(buffer).cast("B")
        if len(target) < len(byte_range):
            raise ValueError(f"buffer of {len(target)} bytes is shorter than {byte_range}")
        if not len(byte_range):
            # HTTP has no empty range.
            self._read_nothing(path, byte_range.start, version)
            return
        place = MemoryTarget(target[: len(byte_range)])
        self._here().downloads.read(path, byte_range, place, version=version, cancel=cancel)

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
        """See `ReadsToFile`."""
        self._file("read", path)
        if not len(byte_range):
            self._read_nothing(path, byte_range.start, version)
            return
        place = FileTarget(descriptor, byte_range.start, progress)
        self._here().downloads.read(path, byte_range, place, version=version, cancel=cancel)

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        self._file("put", path)
        with self._directories_named("put", path, overwrite=overwrite):
            return self._here().uploads.put(
                path, data, overwrite=overwrite, want_version=want_version
            )

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
        self._file("upload", path)
        with self._directories_named("upload", path, overwrite=overwrite):
            return self._here().uploads.upload(
                path,
                source,
                size_bytes,
                overwrite=overwrite,
                progress=progress,
                cancel=cancel,
                want_version=want_version,
            )

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        self._file("upload", path)
        with self._directories_named("upload", path, overwrite=overwrite):
            return self._here().uploads.start(path, overwrite=overwrite, cancel=cancel)

    def token_of(self, upload: Upload) -> str:
        assert isinstance(upload, MultipartUpload)
        return upload.token

    def abandon_upload(self, path: str, token: str) -> bool:
        return self._here().uploads.abandon(path, token)

    def delete(self, path: str) -> None:
        self._file("delete", path)
        outcome = self._here().api.call(self._call("delete", path, "DELETE", "files"))
        if isinstance(outcome.error, NotFound) and outcome.was_uncertain:
            # The try whose answer was lost did it.
            return
        if isinstance(outcome.error, NotFound | InvalidRequest) and self._is_directory(path):
            raise IsADirectory("delete", path, "is a directory")
        outcome.unwrap()

    def rename(self, source: str, destination: str) -> FileStat:
        self._file("rename", source)
        self._file("rename", destination)
        before = self.stat(source)
        if before.is_directory:
            raise IsADirectory("rename", source, "is a directory")
        if source == destination:
            return before
        # Unlinked at once: nothing stays behind whatever happens.
        with local_errors("rename", source), tempfile.TemporaryFile() as copy:
            buffer = memoryview(bytearray(min(_COPY_BYTES, before.size_bytes)))
            for start in range(0, before.size_bytes, _COPY_BYTES):
                piece = ByteRange(start, min(start + _COPY_BYTES, before.size_bytes))
                self.read_into(source, piece, buffer, version=before.version)
                copy.write(buffer[: len(piece)])
            copy.flush()
            result = self.upload(destination, copy, before.size_bytes)
        if self.stat(source).version != before.version:
            raise PreconditionFailed("rename", source, "the file has changed; it was left in place")
        self.delete(source)
        return result

    def make_directory(self, path: str) -> None:
        self._here().api.call(self._call("make directory", path, "PUT", "directories")).unwrap()

    def remove_directory(self, path: str) -> None:
        if not path:
            raise InvalidRequest("remove directory", path, "the volume's root cannot be removed")
        call = self._call("remove directory", path, "DELETE", "directories")
        outcome = self._here().api.call(call)
        if isinstance(outcome.error, NotFound) and outcome.was_uncertain:
            return
        if isinstance(outcome.error, NotFound | InvalidRequest) and self._is_file(path):
            raise NotADirectory("remove directory", path, "is a file")
        outcome.unwrap()

    def close(self) -> None:
        """See `Volume.close`. Uploads that are still open are aborted, which takes two seconds at
        most.
        """
        self._closed = True
        process = self._process.peek()
        if process is not None:
            process.transport.interrupt()
            process.uploads.abort_all()
            process.transport.close()

    def _connect(self) -> _Process:
        options = self._options
        transport = Transport(options.transport)
        api = FilesApi(self._credentials, transport, options.retry)
        urls = SignedUrls(api, self._root, options.url_lifetime_seconds)
        downloads = Downloads(
            api, transport, urls, self._root, direct_read_max_bytes=options.direct_read_max_bytes
        )
        uploads = Uploads(
            api, transport, self._root, options, lambda path: self._stat_file("stat", path)
        )
        return _Process(transport, api, downloads, uploads)

    def _here(self) -> _Process:
        if self._closed:
            raise ValueError("the volume is closed")
        return self._process.get()

    def _call(
        self,
        operation: str,
        path: str,
        method: str,
        kind: str,
        query: dict[str, str | int] | None = None,
    ) -> Call:
        split(operation, path)
        remote_path = join(self._root, path) if path else self._root
        return Call(
            operation=operation,
            path=path,
            method=method,
            target=f"/{kind}{encode_path(operation, remote_path)}",
            query=query,
            expects_json=method == "GET",
        )

    def _file(self, operation: str, path: str) -> None:
        if not split(operation, path):
            raise IsADirectory(operation, path, "is the volume's root")

    def _stat_file(self, operation: str, path: str) -> FileStat:
        call = self._call(operation, path, "HEAD", "files")
        headers = self._here().api.call(call).unwrap().headers
        size_bytes = content_length(headers)
        if size_bytes is None:
            raise Unavailable(operation, path, "the store does not tell the file's size")
        return file_stat(path, size_bytes, (last_modified(headers) or 0) * 1_000_000_000)

    def _stat_directory(self, operation: str, path: str) -> FileStat:
        self._here().api.call(self._call(operation, path, "HEAD", "directories")).unwrap()
        return FileStat(path, is_directory=True)

    def _is_file(self, path: str) -> bool:
        with suppress(VolumeError):
            self._stat_file("stat", path)
            return bool(path)
        return False

    def _is_directory(self, path: str) -> bool:
        with suppress(VolumeError):
            self._stat_directory("stat", path)
            return True
        return False

    @contextmanager
    def _directories_named(self, operation: str, path: str, *, overwrite: bool) -> Iterator[None]:
        """Say so where a directory is what is in the way; the service's codes differ on it."""
        refusal: VolumeError
        try:
            yield
            return
        except SourceTooShort:
            # Ours, not the store's.
            raise
        except (AlreadyExists, InvalidRequest) as error:
            refusal = error
        is_plain = isinstance(refusal, AlreadyExists) and not overwrite
        if is_plain or not self._is_directory(path):
            raise refusal
        raise (IsADirectory if overwrite else AlreadyExists)(operation, path, "is a directory")

    def _read_nothing(self, path: str, position: int, version: str | None) -> None:
        found = self.stat(path)
        if found.is_directory:
            raise IsADirectory("read", path, "is a directory")
        if version is not None and found.version != version:
            raise PreconditionFailed("read", path, "the file has changed")
        if position > found.size_bytes:
            raise InvalidRequest("read", path, "the range reaches past the end of the file")


def _to_entry(parent: str, value: Any) -> FileStat | None:
    """One entry of a listing; None, with a warning, where its name could leave the directory."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        _LOG.warning(
            "A listing holds an entry that no path can name; it is left out",
            extra={"directory": parent, "entry": ascii(name)},
        )
        return None
    path = join(parent, name)
    if value.get("is_directory"):
        return FileStat(path, is_directory=True)
    size, mtime_milliseconds = value.get("file_size") or 0, value.get("last_modified") or 0
    if not (isinstance(size, int) and isinstance(mtime_milliseconds, int)):
        raise Unavailable("list", parent, "the answer is no listing")
    if size < 0 or mtime_milliseconds < 0:
        raise Unavailable("list", parent, "the answer is no listing")
    return file_stat(path, size, mtime_milliseconds * 1_000_000)
