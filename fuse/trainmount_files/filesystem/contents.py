"""The verbs of fsspec that move what is in files, each for one file. Called by users, and by the
verbs for many files.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fsspec.callbacks import DEFAULT_CALLBACK
from fsspec.compression import compr
from fsspec.core import get_compression
from fsspec.utils import isfilelike

from trainmount_files.errors import AlreadyExists, IsADirectory, NotFound
from trainmount_files.filesystem.bulk import LockedCallback, raise_failures, try_each
from trainmount_files.filesystem.files import CompressedFile, ReadFile, TextFile, WriteFile
from trainmount_files.filesystem.locations import Locations, strip
from trainmount_files.filesystem.many_files import Info, ManyFilesFileSystem
from trainmount_files.filesystem.os_errors import as_os_errors
from trainmount_files.filesystem.ranges import read_range, resolve
from trainmount_files.transfer import (
    download_file,
    iterate,
    open_reader,
    open_writer,
    upload_file,
    upload_stream,
)
from trainmount_files.volume import MIB, FileStat, Volume

__all__ = ["FileContentsFileSystem"]

_RANGES: Final = 16
"""Ranges of all files that are fetched at once: what 16 files share, one large file has alone."""

_PUT_BYTES: Final = 16 * MIB
"""Contents up to this size are stored by one request; larger ones in parts."""


class FileContentsFileSystem(ManyFilesFileSystem):
    """Bytes in and out."""

    blocksize = 8 * MIB

    _locations: Locations

    def touch(self, path: str, truncate: bool = True, **_: Any) -> None:
        """Make an empty file, or make a file empty; its time alone cannot be changed."""
        try:
            self.pipe_file(path, b"", mode="overwrite" if truncate else "create")
        except FileExistsError:
            # Says that it is not to be had.
            super().touch(path, truncate=False)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        """Store `value`, a buffer of bytes; with the mode "create" only where nothing is."""
        full = strip(path)
        data = memoryview(value).cast("B")
        overwrite = mode != "create"
        with as_os_errors(full):
            volume, within = self._file_at(full)
            if len(data) <= _PUT_BYTES:
                volume.put(within, data, overwrite=overwrite, want_version=False)
            else:
                size = len(data)
                with open_writer(volume, within, overwrite=overwrite, size_bytes=size) as writer:
                    writer.write(data)
        self.invalidate_cache(full)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        """The bytes `[start:end]` of a file, as slices have it, all of one version."""
        full = strip(path)
        with as_os_errors(full):
            volume, within = self._file_at(full)
            found = volume.stat(within)
        return self._read(full, found, start, end, parallelism=_RANGES)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """The bytes `[start:end]` of each path, in order; those of one path are of one version."""
        if max_gap is not None:
            # Says that ranges are not merged.
            super().cat_ranges(paths, starts, ends, max_gap=max_gap)
        num = len(paths)
        starts = starts if isinstance(starts, Sequence) else [starts] * num
        ends = ends if isinstance(ends, Sequence) else [ends] * num
        full = [strip(path) for path in paths]
        names = list(dict.fromkeys(full))
        stats = dict(zip(names, try_each(names, self._stat, parallelism=_RANGES), strict=True))

        def read(wanted: tuple[str, int | None, int | None], _: threading.Event) -> bytes:
            path, start, end = wanted
            found = stats[path]
            if isinstance(found, Exception):
                raise found
            return self._read(path, found, start, end, parallelism=1)

        wanted = list(zip(full, starts, ends, strict=True))
        contents = try_each(wanted, read, parallelism=_RANGES)
        if on_error == "raise":
            raise_failures(contents, "read")
        return contents

    def head(self, path: str, size: int = 1024) -> bytes:
        return self.cat_file(path, 0, size)

    def tail(self, path: str, size: int = 1024) -> bytes:
        return self.cat_file(path, -size if size else None, None if size else 0)

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """A file as `files.py` has it: `rb`, `wb`, `xb`, or the same as text."""
        text = {
            name: kwargs.pop(name) for name in ("encoding", "errors", "newline") if name in kwargs
        }
        binary_mode = mode.replace("t", "").replace("b", "") + "b"
        file = super().open(path, binary_mode, block_size, cache_options, **kwargs)
        codec = get_compression(strip(path), compression)
        if codec is not None:
            compressor = compr[codec](file, mode=mode[0])
            file = compressor if mode[0] == "r" else CompressedFile(compressor, file)
        return file if "b" in mode else TextFile(file, **text)

    def get_file(
        self,
        rpath: str,
        lpath: Any,
        callback: Any = DEFAULT_CALLBACK,
        outfile: Any = None,
        **_: Any,
    ) -> None:
        """Copy one file to this machine, whole or absent, or into an open file."""
        if outfile is None and isfilelike(lpath):
            outfile = lpath
        counted = LockedCallback(callback, threading.Lock())
        if outfile is None:
            self._fetch(strip(rpath), os.fspath(lpath), None, counted, threading.Event(), share=1)
            return
        full = strip(rpath)
        with as_os_errors(full):
            volume, within = self._file_at(full)
            found = volume.stat(within)
            counted.set_size(found.size_bytes)
            for block in iterate(volume, within, known=found):
                outfile.write(block)
                counted.relative_update(len(block))

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = DEFAULT_CALLBACK,
        mode: str = "overwrite",
        **_: Any,
    ) -> None:
        """Copy one file of this machine; with the mode "create" only where nothing is."""
        if Path(lpath).is_dir():
            self.makedirs(rpath, exist_ok=True)
            return
        counted = LockedCallback(callback, threading.Lock())
        self._store(os.fspath(lpath), strip(rpath), counted, threading.Event(), mode=mode)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy one version of a file, or make a directory where `path1` is one."""
        source, target = strip(path1), strip(path2)
        if source == target:
            return
        with as_os_errors(source):
            volume, within = self._file_at(source)
            found = volume.stat(within)
            if not found.is_directory:
                with open_reader(volume, within, known=found) as reader, as_os_errors(target):
                    there, place = self._file_at(target)
                    upload_stream(there, place, reader, size_bytes=found.size_bytes)
        if found.is_directory:
            self.makedirs(target, exist_ok=True)
        self.invalidate_cache(target)

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        details: Info | None = None,
        **_: Any,
    ) -> Any:
        full = strip(path)
        if mode not in ("rb", "wb", "xb"):
            raise io.UnsupportedOperation(
                f"mode {mode!r} of {full}: a volume has neither append nor writes in place; "
                "write the whole file anew"
            )
        with as_os_errors(full):
            volume, within = self._file_at(full)
            if mode == "rb":
                known = None if details is None else _to_stat(within, details)
                given = isinstance(block_size, int) and block_size > 0
                block_bytes = block_size if given else self.blocksize
                reader = open_reader(volume, within, known=known, block_bytes=block_bytes)
                return ReadFile(self, full, reader, self._info_of(full, reader.stat), block_bytes)
            if mode == "xb":
                # An early word; the store holds it against a race when the file is closed.
                with suppress(NotFound):
                    volume.stat(within)
                    raise AlreadyExists("open", within, "something is at the path")
            writer = open_writer(volume, within, overwrite=mode == "wb")
            return WriteFile(self, full, writer, autocommit=autocommit)

    def _info_of(self, path: str, found: FileStat) -> Info:
        """What fsspec is told of a path."""
        info: Info = {
            "name": path,
            "size": found.size_bytes,
            "type": "directory" if found.is_directory else "file",
        }
        if found.mtime_ns:
            info["mtime"] = found.mtime_ns / 1e9
        if not found.is_directory:
            # By `ETag` Hugging Face datasets tell whether what they have cached is still right.
            info["version"] = info["ETag"] = found.version
        return info

    def _file_at(self, path: str) -> tuple[Volume, str]:
        location = self._locations.find(path)
        return location.volume, location.path

    def _stat(self, path: str, _: object = None) -> FileStat:
        with as_os_errors(path):
            volume, within = self._file_at(path)
            return volume.stat(within)

    def _read(
        self, path: str, found: FileStat, start: int | None, end: int | None, *, parallelism: int
    ) -> bytes:
        with as_os_errors(path):
            if found.is_directory:
                raise IsADirectory("read", found.path, "is a directory")
            volume, _ = self._file_at(path)
            wanted = resolve(start, end, found.size_bytes)
            return read_range(volume, found, wanted, parallelism=parallelism)

    def _fetch(
        self,
        rpath: str,
        lpath: str,
        info: Info | None,
        callback: LockedCallback,
        stop: threading.Event,
        *,
        share: int,
        **_: Any,
    ) -> None:
        with as_os_errors(rpath):
            volume, within = self._file_at(rpath)
            known = volume.stat(within) if info is None else _to_stat(within, info)
            if known.is_directory:
                Path(lpath).mkdir(parents=True, exist_ok=True)
                return
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
            callback.set_size(known.size_bytes)
            download_file(
                volume,
                within,
                Path(lpath),
                known=known,
                parallelism=max(1, _RANGES // min(share, self.parallelism)),
                progress=callback.relative_update,
                cancel=stop,
            )

    def _store(
        self,
        lpath: str,
        rpath: str,
        callback: LockedCallback,
        stop: threading.Event,
        mode: str = "overwrite",
        **_: Any,
    ) -> None:
        with as_os_errors(rpath):
            volume, within = self._file_at(rpath)
            callback.set_size(Path(lpath).stat().st_size)
            upload_file(
                volume,
                Path(lpath),
                within,
                overwrite=mode != "create",
                progress=callback.relative_update,
                cancel=stop,
                want_version=False,
            )
        self.invalidate_cache(rpath)

    def _move(self, path1: str, path2: str) -> None:
        with as_os_errors(path1):
            volume, within = self._file_at(path1)
            there, place = self._file_at(path2)
            if there is volume:
                volume.rename(within, place)
            else:
                self.cp_file(path1, path2)
                volume.delete(within)
        self.invalidate_cache(path1)
        self.invalidate_cache(path2)


def _to_stat(path: str, info: Info) -> FileStat:
    """What a listing has said; the time is not used where it goes."""
    return FileStat(path, is_directory=False, size_bytes=info["size"], version=info["version"])
