"""`/Volumes` and the two levels below it as one tree of files, for a mount of everything.

    /Volumes/<catalog>/<schema>/<volume>      directories: objects of Unity Catalog -> objects.py
    .../<volume>/<path>                       files and directories -> FilesApiVolume

The objects can be looked at and listed, not made, renamed or removed: that is done in Unity
Catalog, with its own rights. Their names are stored in lower case and found by exactly that name:
one object has one path.
"""

from __future__ import annotations

import threading
from typing import BinaryIO, Final

from trainmount_files.catalog.objects import KINDS, CatalogObject, Objects
from trainmount_files.errors import (
    AlreadyExists,
    InvalidRequest,
    IsADirectory,
    NotFound,
    PermissionDenied,
    Unsupported,
)
from trainmount_files.files_api import Credentials, FilesApiOptions, FilesApiVolume
from trainmount_files.paths import join, split
from trainmount_files.per_process import PerProcess
from trainmount_files.volume import (
    Buffer,
    ByteRange,
    Capabilities,
    FileStat,
    Page,
    Progress,
    Upload,
)

__all__ = ["CatalogVolume"]

_VOLUME_DEPTH: Final = len(KINDS)
"""Names of a volume's path below `/Volumes`; a file has more."""

_PAGE_ENTRIES: Final = 1000
"""As the Files API, so that a schema with ten thousand volumes comes in bounded pieces."""

KEEP_SECONDS: Final = 30.0
"""How long a list of objects is believed. They change rarely; a mount asks with each lookup."""


class CatalogVolume:
    """Everything below `/Volumes`, a catalog or a schema; implements
    `trainmount_files.volume.Volume` and `ReadsToFile`.

    May be pickled and forked: connections, credentials and lists of objects are made anew in the
    other process.
    """

    def __init__(
        self,
        root: str,
        credentials: Credentials,
        options: FilesApiOptions | None = None,
        *,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        """`root` is `/Volumes`, `/Volumes/<catalog>` or `/Volumes/<catalog>/<schema>`; a deeper one
        works as well. No request is sent.

        For `keep_seconds` a list of catalogs, schemas or volumes answers without a request; 0 asks
        each time.
        """
        self._root = root
        self._above = tuple(root.split("/")[2:])
        self._keep_seconds = keep_seconds
        self._arguments = (root, credentials, options)
        # One volume for all: what it calls a path is the rest of a path below `/Volumes`, whichever
        # volume that is in, and all share its connections.
        self._files = FilesApiVolume(root, credentials, options)
        self._objects = PerProcess(lambda: Objects(keep_seconds))

    def __repr__(self) -> str:
        return f"CatalogVolume({self._root!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (*self._arguments, self._keep_seconds)

    @property
    def url(self) -> str:
        return self._root

    @property
    def capabilities(self) -> Capabilities:
        return self._files.capabilities

    def stat(self, path: str) -> FileStat:
        names = self._names("stat", path)
        if len(names) > _VOLUME_DEPTH:
            return self._files.stat(path)
        return self._stat_object("stat", path, names)

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        names = self._names("list", path)
        if len(names) >= _VOLUME_DEPTH:
            return self._files.list_page(path, page_token)
        self._check_nameable("list", path, names)
        try:
            below = self._objects.get().below(self._files.api, "list", path, names)
        except NotFound:
            # From the list that it should be in, its real name is known.
            self._stat_object("list", path, names)
            raise
        # The token is the last name of the page before: right whatever came or went in between.
        rest = [
            each
            for each in below.values()
            if not each.browse_only and (page_token is None or each.name > page_token)
        ]
        page = rest[:_PAGE_ENTRIES]
        entries = tuple(_to_stat(join(path, each.name), each) for each in page)
        return Page(entries, page[-1].name if len(page) < len(rest) else None)

    def read_into(
        self,
        path: str,
        byte_range: ByteRange,
        buffer: bytearray | memoryview,
        *,
        version: str | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        self._require_in_volume("read", path)
        self._files.read_into(path, byte_range, buffer, version=version, cancel=cancel)

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
        self._require_in_volume("read", path)
        self._files.read_to_file(
            path, byte_range, descriptor, version=version, progress=progress, cancel=cancel
        )

    def put(
        self, path: str, data: Buffer, *, overwrite: bool = True, want_version: bool = True
    ) -> FileStat:
        self._require_in_volume("put", path, makes=True, overwrite=overwrite)
        return self._files.put(path, data, overwrite=overwrite, want_version=want_version)

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
        self._require_in_volume("upload", path, makes=True, overwrite=overwrite)
        return self._files.upload(
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
        self._require_in_volume("upload", path, makes=True, overwrite=overwrite)
        return self._files.start_upload(path, overwrite=overwrite, cancel=cancel)

    def token_of(self, upload: Upload) -> str:
        return self._files.token_of(upload)

    def abandon_upload(self, path: str, token: str) -> bool:
        return self._files.abandon_upload(path, token)

    def delete(self, path: str) -> None:
        self._require_in_volume("delete", path)
        self._files.delete(path)

    def rename(self, source: str, destination: str) -> FileStat:
        """Move a file within one volume.

        Raises:
            Unsupported: the destination is in another volume.
        """
        self._require_in_volume("rename", source)
        self._require_in_volume("rename", destination, makes=True)
        here, there = (
            "/".join(("/Volumes", *self._names("rename", path)[:_VOLUME_DEPTH]))
            for path in (source, destination)
        )
        if here != there:
            reason = f"cannot be moved from {here} to {there}: copy it and delete the original"
            raise Unsupported("rename", source, reason)
        return self._files.rename(source, destination)

    def make_directory(self, path: str) -> None:
        names = self._names("make directory", path)
        if len(names) > _VOLUME_DEPTH:
            self._files.make_directory(path)
            return
        try:
            self._stat_object("make directory", path, names)
            return
        except NotFound as error:
            missing = error
        raise Unsupported(
            "make directory",
            path,
            f"{missing.reason}; a {KINDS[len(names) - 1]} is made in Unity Catalog, not here",
        )

    def remove_directory(self, path: str) -> None:
        names = self._names("remove directory", path)
        if not path:
            raise InvalidRequest("remove directory", path, "the root cannot be removed")
        if len(names) > _VOLUME_DEPTH:
            self._files.remove_directory(path)
            return
        self._stat_object("remove directory", path, names)
        kind = KINDS[len(names) - 1]
        raise Unsupported(
            "remove directory", path, f"is a {kind}, which is dropped in Unity Catalog, not here"
        )

    def close(self) -> None:
        self._files.close()

    def _names(self, operation: str, path: str) -> tuple[str, ...]:
        """The names of `path` below `/Volumes`."""
        return (*self._above, *split(operation, path))

    def _stat_object(self, operation: str, path: str, names: tuple[str, ...]) -> FileStat:
        """A directory above the files, from the list that it is in.

        Raises:
            PermissionDenied: it exists, and the identity may not use it.
        """
        api = self._files.api
        if not names:
            return FileStat(path, is_directory=True)
        self._check_nameable(operation, path, names)
        name, kind = names[-1], KINDS[len(names) - 1]
        known = self._objects.get().below(api, operation, path, names[:-1])
        found = known.get(name)
        if found is None:
            reason = f"there is no {kind} {name}, or it may not be seen"
            if name.lower() in known:
                reason = f"there is no {kind} {name}; it is called {name.lower()}"
            raise NotFound(operation, path, reason)
        if found.browse_only:
            raise PermissionDenied(operation, path, f"the {kind} {name} may only be browsed")
        return _to_stat(path, found)

    def _check_nameable(self, operation: str, path: str, names: tuple[str, ...]) -> None:
        """Raises NotFound, without a request, for what no object can be called: a mount is asked
        for `.git` and the like all day.
        """
        for name, kind in zip(names, KINDS, strict=False):
            if "." in name or any(ord(letter) <= 32 or ord(letter) == 127 for letter in name):
                raise NotFound(operation, path, f"no {kind} can be called {name!a}")

    def _require_in_volume(
        self, operation: str, path: str, *, makes: bool = False, overwrite: bool = True
    ) -> None:
        """Say what is wrong with a file above the volumes; with `makes` it would be a new one."""
        names = self._names(operation, path)
        if len(names) > _VOLUME_DEPTH:
            self._check_nameable(operation, path, names)
            return
        what = KINDS[len(names) - 1] if names else "list of all catalogs"
        try:
            self._stat_object(operation, path, names)
        except NotFound as error:
            if not makes:
                raise
            missing = error
        else:
            kind = IsADirectory if overwrite else AlreadyExists
            raise kind(operation, path, f"is a {what}; files are inside volumes")
        reason = f"{missing.reason}; files are inside volumes: /Volumes/CATALOG/SCHEMA/VOLUME/..."
        raise Unsupported(operation, path, reason)


def _restored(
    root: str, credentials: Credentials, options: FilesApiOptions | None, keep_seconds: float
) -> CatalogVolume:
    return CatalogVolume(root, credentials, options, keep_seconds=keep_seconds)


def _to_stat(path: str, known: CatalogObject) -> FileStat:
    return FileStat(path, is_directory=True, mtime_ns=known.updated_ms * 1_000_000)
