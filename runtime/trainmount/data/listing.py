"""Which files a dataset has: those below its directory, an explicit list, or a recorded listing.

Called by `dataset`, on one rank for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from trainmount.data.checksums import parse_checksum
from trainmount.data.manifest import Entry, Manifest, compile_pattern
from trainmount.data.recorded import read_recorded, write_recorded
from trainmount.errors import DataError

if TYPE_CHECKING:
    from trainmount.data.sources import Source

__all__ = ["Selection", "list_files"]

_FILES_AT_ONCE: Final = 8


class Selection:
    """What a dataset was asked to read. Checked when it is made."""

    def __init__(
        self,
        directory: str,
        pattern: str,
        files: Sequence[str] | Mapping[str, int] | None,
        checksums: Mapping[str, str] | None,
        recorded: str | None,
    ) -> None:
        """Raises ValueError: the pattern, a path, a size or a checksum is none."""
        self.directory = directory
        self.pattern = pattern
        self.matches = compile_pattern(pattern)
        self.recorded = recorded
        self.files: dict[str, int | None] | None = None
        if files is not None:
            sizes = files if isinstance(files, Mapping) else {}
            self.files = {_relative(directory, path): sizes.get(path) for path in files}
            if len(self.files) != len(files):
                raise ValueError("files names a file more than once")
            if any(size is not None and size < 0 for size in self.files.values()):
                raise ValueError("the size of a file must not be negative")
        self.checksums = {
            _relative(directory, path): parse_checksum(text)
            for path, text in (checksums or {}).items()
        }


def list_files(source: Source, selection: Selection) -> Manifest:
    """The listing of what was selected, in one pass.

    Raises:
        DataError: the directory cannot be listed, nothing matches, or a file of an explicit list is
            not there (MissingFile).
    """
    manifest = _list(source, selection)
    if selection.checksums:
        checksums = selection.checksums
        manifest = Manifest(
            (
                replace(entry, checksum=checksums.get(entry.path, entry.checksum))
                for entry in manifest
            ),
            keeps_order=True,
        )
    if len(manifest) == 0:
        what = (
            "files is empty"
            if selection.files is not None
            else (f"no file matches {selection.pattern!r}")
        )
        raise DataError(f"{selection.directory}: {what}")
    return manifest


def _list(source: Source, selection: Selection) -> Manifest:
    if selection.files is not None:
        return Manifest(_look_at(source, selection.files), keeps_order=True)
    if selection.recorded is None:
        return Manifest(source.scan(selection.pattern, selection.matches))
    manifest = read_recorded(selection.recorded, selection.pattern)
    if manifest is None:
        manifest = Manifest(source.scan(selection.pattern, selection.matches))
        write_recorded(selection.recorded, selection.pattern, manifest)
    return manifest


def _look_at(source: Source, files: Mapping[str, int | None]) -> Iterator[Entry]:
    """The files as entries; those without a size are asked for it, several at once."""
    from trainmount_files.transfer.workers import Workers

    workers = Workers(_FILES_AT_ONCE, "trainmount-list")
    try:
        coming: list[Entry | Future[Entry]] = []
        for path, size_bytes in files.items():
            if size_bytes is not None:
                coming.append(Entry(path, size_bytes))
            else:
                coming.append(workers.submit(partial(source.find, path)))
        for entry in coming:
            yield entry.result() if isinstance(entry, Future) else entry
    finally:
        workers.close(wait_seconds=0)


def _relative(directory: str, path: str) -> str:
    """A path of a file relative to the directory, as it is or from one that begins with it."""
    relative = path.removeprefix(f"{directory.rstrip('/')}/")
    names = relative.split("/")
    if not relative or any(name in ("", ".", "..") for name in names):
        raise ValueError(f"a file must have a path relative to {directory}, got {path!r}")
    return relative
