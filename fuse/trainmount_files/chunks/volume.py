"""A volume whose files may be larger than one object of its store, where that takes no upload in
parts (storage behind a firewall: 5 GiB a file).

    up to `max_object_bytes`     a plain object, as ever
    above                        <name>.chunks/<generation>/<number>, and a manifest put last,
                                 read back as one file `<name>`

manifest.py     what is stored how
generation.py   a write, its publication, what is removed when, and why no reader sees a mix
sending.py      the chunks of a file of known length
upload.py       parts of a file of unknown length
parts.py        the bytes of a chunked file

Programs that do not know of chunks see the directory `<name>.chunks`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO, Final

from trainmount_files.chunks.generation import Chunks, Generation
from trainmount_files.chunks.manifest import (
    MAX_PARTS,
    Manifest,
    file_of_chunks,
    is_chunked_version,
)
from trainmount_files.chunks.parts import Parts, by_pieces, changed
from trainmount_files.chunks.sending import SendChunk, send_all
from trainmount_files.chunks.upload import ChunkedUpload
from trainmount_files.errors import (
    AlreadyExists,
    DirectoryNotEmpty,
    InvalidRequest,
    IsADirectory,
    NotADirectory,
    NotFound,
    PreconditionFailed,
    TooLarge,
    VolumeError,
)
from trainmount_files.paths import split
from trainmount_files.volume import (
    MIB,
    Buffer,
    ByteRange,
    Capabilities,
    FileStat,
    Page,
    Progress,
    ReadsToFile,
    Upload,
    Volume,
    list_directory,
)

__all__ = ["ChunkedVolume"]

_LOG: Final = logging.getLogger(__name__)


class ChunkedVolume:
    """Another volume with files of any size; implements `trainmount_files.volume.Volume` and
    `ReadsToFile`.

    Over the Files API, a look at a plain file costs what it costs below, one at a chunked file
    three requests, one at nothing two more than below. A listing costs a request for each chunked
    file in it, two where it was written in the last seconds. Each write, delete and new directory
    costs two small requests more, an exclusive write four.

    May be pickled and forked where the other volume may.
    """

    def __init__(
        self,
        volume: Volume,
        *,
        max_object_bytes: int,
        chunk_bytes: int = 256 * MIB,
        parallelism: int = 4,
    ) -> None:
        """Files above `max_object_bytes` are stored as chunks of `chunk_bytes`, larger ones where
        10,000 would not hold the file. `parallelism` chunks are on their way at once; each stands
        in the temporary directory meanwhile.
        """
        if max_object_bytes < 1 or chunk_bytes < 1 or parallelism < 1:
            raise ValueError("max_object_bytes, chunk_bytes and parallelism must be at least 1")
        self._volume = volume
        self._max_object_bytes = max_object_bytes
        self._chunk_bytes = min(chunk_bytes, max_object_bytes)
        self._parallelism = parallelism
        self._chunks = Chunks(volume)
        self._parts = Parts(volume, self._chunks)

    def __repr__(self) -> str:
        return f"ChunkedVolume({self._volume!r})"

    def __reduce__(self) -> tuple[object, ...]:
        arguments = (self._volume, self._max_object_bytes, self._chunk_bytes, self._parallelism)
        return _restored, arguments

    @property
    def url(self) -> str:
        return self._volume.url

    @property
    def capabilities(self) -> Capabilities:
        below = self._volume.capabilities
        largest = self._max_object_bytes
        return replace(
            below,
            # Of plain objects it may be; callers must not count on it.
            atomic_rename=False,
            # Chunks stay where they are.
            renames_through_client=False,
            max_put_bytes=None,
            min_part_bytes=1,
            max_parts=MAX_PARTS,
            max_part_bytes=largest,
            part_bytes=min(below.part_bytes, largest),
            parts_in_order=False,
            copies_parts=True,
        )

    def stat(self, path: str) -> FileStat:
        try:
            return self._volume.stat(path)
        except NotFound as error:
            missing = error
        manifest = self._chunks.manifests.read("stat", path) if path else None
        if manifest is None:
            raise missing
        return manifest.to_stat(path)

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        try:
            page = self._volume.list_page(path, page_token)
        except NotFound as error:
            if path and self._chunks.exist(path):
                raise NotADirectory("list", path, "is a file") from None
            raise error
        if not any(file_of_chunks(entry) for entry in page.entries):
            return page
        # One page tells of each name whether there is a plain object of it.
        is_whole = page_token is None and page.next_page_token is None
        plain = {entry.path for entry in page.entries}
        entries: list[FileStat] = []
        refused = list(page.refused)
        for entry in page.entries:
            file_path = file_of_chunks(entry)
            try:
                shown = entry
                if file_path is not None:
                    found = self._shown(entry, file_path, plain, is_whole=is_whole)
                    if found is None:
                        continue
                    shown = found
            except VolumeError as error:
                # One damaged file must not hide the others.
                _LOG.warning(
                    "A chunked file is left out of a listing",
                    extra={"path": file_path, "reason": error.reason},
                )
                refused.append(entry.name)
                continue
            entries.append(shown)
        return Page(tuple(entries), page.next_page_token, tuple(refused))

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        split("read", path)
        target = memoryview(buffer).cast("B")
        if len(target) < len(byte_range):
            raise ValueError(f"buffer of {len(target)} bytes is shorter than {byte_range}")
        self._read(
            path,
            version,
            lambda: self._volume.read_into(
                path, byte_range, buffer, version=version, cancel=cancel
            ),
            lambda manifest: self._parts.read(
                path, manifest, byte_range, target[: len(byte_range)], cancel
            ),
        )

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
        split("read", path)
        volume = self._volume

        def read_plain() -> None:
            if isinstance(volume, ReadsToFile):
                volume.read_to_file(
                    path, byte_range, descriptor, version=version, progress=progress, cancel=cancel
                )
                return

            def read(piece: ByteRange, target: memoryview) -> None:
                volume.read_into(path, piece, target, version=version, cancel=cancel)

            by_pieces(read, byte_range, descriptor, progress)

        def read_chunks(manifest: Manifest) -> None:
            def read(piece: ByteRange, target: memoryview) -> None:
                self._parts.read(path, manifest, piece, target, cancel)

            by_pieces(read, byte_range, descriptor, progress)

        self._read(path, version, read_plain, read_chunks)

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        view = memoryview(data).cast("B")
        if len(view) <= self._max_object_bytes:
            return self._store_plain(
                path,
                lambda: self._volume.put(
                    path, data, overwrite=overwrite, want_version=want_version
                ),
                overwrite=overwrite,
            )
        size = self._chunk_size("put", path, len(view))

        def send_to(generation: Generation) -> SendChunk:
            return lambda number, start, length, _: generation.put(
                number, view[start : start + length]
            )

        return self._store_chunks(path, len(view), size, send_to, overwrite=overwrite)

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
        if size_bytes <= self._max_object_bytes:
            return self._store_plain(
                path,
                lambda: self._volume.upload(
                    path,
                    source,
                    size_bytes,
                    overwrite=overwrite,
                    progress=progress,
                    cancel=cancel,
                    want_version=want_version,
                ),
                overwrite=overwrite,
            )
        if os.fstat(source.fileno()).st_size < size_bytes:
            reason = f"the source has fewer than {size_bytes} bytes"
            raise InvalidRequest("upload", path, reason)
        descriptor = source.fileno()

        def send_to(generation: Generation) -> SendChunk:
            def send(number: int, start: int, length: int, stop: threading.Event) -> None:
                generation.put_slice(number, descriptor, start, length, cancel=stop)
                if progress is not None:
                    progress(length)

            return send

        size = self._chunk_size("upload", path, size_bytes)
        return self._store_chunks(
            path, size_bytes, size, send_to, overwrite=overwrite, cancel=cancel
        )

    def start_upload(
        self, path: str, *, overwrite: bool = True, cancel: threading.Event | None = None
    ) -> Upload:
        self._require_name("upload", path)
        generation = self._chunks.begin(path, overwrite=overwrite)
        return ChunkedUpload(
            self._chunks,
            generation,
            lambda file, size: self.upload(path, file, size, overwrite=overwrite, cancel=cancel),
            max_object_bytes=self._max_object_bytes,
            overwrite=overwrite,
            cancel=cancel,
        )

    def delete(self, path: str) -> None:
        self._require_name("delete", path)
        if not self._chunks.exist(path):
            self._volume.delete(path)
            return
        if self._is_directory(path):
            raise IsADirectory("delete", path, "is a directory")
        self._chunks.delete(path)

    def rename(self, source: str, destination: str) -> FileStat:
        """Move a file. A chunked one is copied chunk by chunk, published, then deleted."""
        self._require_name("rename", source)
        self._require_name("rename", destination)
        try:
            found = self._volume.stat(source)
        except NotFound as error:
            manifest = self._chunks.manifests.read("rename", source)
            if manifest is None:
                raise NotFound("rename", source, error.reason) from None
            return self._rename_chunks(source, destination, manifest)
        if found.is_directory:
            raise IsADirectory("rename", source, "is a directory")
        if source == destination:
            return found
        hidden = self._chunks.manifests.read("rename", source)
        if hidden is not None:
            # It would come to light when the plain object goes.
            self._chunks.drop(source, hidden)
        return self._store_plain(
            destination, lambda: self._volume.rename(source, destination), overwrite=True
        )

    def make_directory(self, path: str) -> None:
        if path and self._chunks.exist(path) and not self._is_directory(path):
            raise AlreadyExists("make directory", path, "a file is at the path")
        self._volume.make_directory(path)

    def remove_directory(self, path: str) -> None:
        try:
            self._volume.remove_directory(path)
            return
        except NotFound as error:
            if path and self._chunks.exist(path):
                raise NotADirectory("remove directory", path, "is a file") from None
            raise error
        except DirectoryNotEmpty:
            if next(list_directory(self, path), None) is not None:
                raise
        # Only what no listing shows is in it: parts of writes that were not published.
        for entry in list_directory(self._volume, path):
            self._chunks.remove_leftovers(entry)
        self._volume.remove_directory(path)

    def close(self) -> None:
        self._volume.close()

    def _read(
        self,
        path: str,
        version: str | None,
        read_plain: Callable[[], None],
        read_chunks: Callable[[Manifest], None],
    ) -> None:
        """Read in the way that a version names, or the one that the file is stored in now."""
        if version is not None and is_chunked_version(version):
            read_chunks(self._parts.manifest_of(path, version))
            return
        try:
            read_plain()
            return
        except NotFound as error:
            missing = error
        manifest = self._chunks.manifests.read("read", path) if path else None
        if manifest is None:
            raise missing
        if version is not None:
            raise changed(path)
        read_chunks(manifest)

    def _shown(
        self, entry: FileStat, file_path: str, plain: set[str], *, is_whole: bool
    ) -> FileStat | None:
        """What a listing shows of a directory that is called as one of chunks; None is nothing."""
        manifest = self._chunks.manifests.read("list", file_path)
        if manifest is None:
            return None if self._chunks.is_unpublished(entry) else entry
        if file_path in plain:
            return None
        if not is_whole:
            try:
                self._volume.stat(file_path)
                return None
            except NotFound:
                pass
        return manifest.to_stat(file_path)

    def _store_plain(
        self, path: str, store: Callable[[], FileStat], *, overwrite: bool
    ) -> FileStat:
        """Store a plain object in place of whatever the file is."""
        self._require_name("put", path)
        if not overwrite and self._chunks.exist(path):
            raise AlreadyExists("put", path, "something is at the path")
        before = self._chunks.replaceable(path) if overwrite else None
        stored = store()
        if before is not None:
            self._chunks.drop(path, before)
        if not overwrite and self._chunks.exist(path):
            # Both were exclusive; a manifest that was published meanwhile may have won.
            self._volume.delete(path)
            raise AlreadyExists("put", path, "somebody else has stored the file")
        return stored

    def _chunk_size(self, operation: str, path: str, size_bytes: int) -> int:
        """Bytes of each chunk but the last."""
        size = max(self._chunk_bytes, -(-size_bytes // MAX_PARTS))
        if size > self._max_object_bytes:
            limit = MAX_PARTS * self._max_object_bytes
            reason = f"a file may have {limit} bytes here, this one has {size_bytes}"
            raise TooLarge(operation, path, reason)
        return size

    def _store_chunks(
        self,
        path: str,
        size_bytes: int,
        chunk_bytes: int,
        send_to: Callable[[Generation], SendChunk],
        *,
        overwrite: bool,
        cancel: threading.Event | None = None,
    ) -> FileStat:
        self._require_name("upload", path)
        generation = self._chunks.begin(path, overwrite=overwrite)
        try:
            send_all(
                send_to(generation),
                size_bytes,
                chunk_bytes,
                parallelism=self._parallelism,
                cancel=cancel,
            )
            return self._chunks.publish(generation, overwrite=overwrite)
        except BaseException:
            self._chunks.discard(generation)
            raise

    def _rename_chunks(self, source: str, destination: str, manifest: Manifest) -> FileStat:
        if source == destination:
            return manifest.to_stat(source)
        generation = self._chunks.begin(destination, overwrite=True)
        try:
            self._parts.copy(source, manifest, generation)
            result = self._chunks.publish(generation, overwrite=True)
        except BaseException:
            self._chunks.discard(generation)
            raise
        if self.stat(source).version != manifest.version:
            raise PreconditionFailed("rename", source, "the file has changed; it was left in place")
        self._chunks.delete(source)
        return result

    def _is_directory(self, path: str) -> bool:
        try:
            return self._volume.stat(path).is_directory
        except NotFound:
            return False

    def _require_name(self, operation: str, path: str) -> None:
        if not split(operation, path):
            raise IsADirectory(operation, path, "is the volume's root")


def _restored(
    volume: Volume, max_object_bytes: int, chunk_bytes: int, parallelism: int
) -> ChunkedVolume:
    return ChunkedVolume(
        volume,
        max_object_bytes=max_object_bytes,
        chunk_bytes=chunk_bytes,
        parallelism=parallelism,
    )
