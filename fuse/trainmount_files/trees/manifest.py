"""The record of a publication: every file with its size and checksum, written last. No I/O.

The text is the same whenever the files are: no times, no hosts, sorted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from trainmount_files.errors import InvalidRequest, Unsupported
from trainmount_files.paths import split

__all__ = ["CLAIM_NAME", "MANIFEST_NAME", "Manifest", "PublishedFile"]

MANIFEST_NAME: Final = ".trainmount-manifest.json"
"""At the root of a publication. Readers of tables and data sets leave out names with a dot."""

CLAIM_NAME: Final = ".trainmount-publishing"
"""At the root while it is being published; says whose turn it is."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True, order=True)
class PublishedFile:
    """One file of a publication."""

    path: str
    """Relative to the publication's root."""
    size_bytes: int
    sha256: str
    """64 hexadecimal digits."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole publication."""

    files: tuple[PublishedFile, ...]
    """Sorted by path."""

    empty_directories: tuple[str, ...] = ()
    """Sorted."""

    @classmethod
    def of(cls, files: Iterable[PublishedFile], empty_directories: Iterable[str]) -> Manifest:
        return cls(tuple(sorted(files)), tuple(sorted(empty_directories)))

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        document = {
            "version": _VERSION,
            "files": [
                {"path": file.path, "size_bytes": file.size_bytes, "sha256": file.sha256}
                for file in self.files
            ],
            "empty_directories": list(self.empty_directories),
        }
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def parse(cls, path: str, data: bytes) -> Manifest:
        """The manifest in the file `path`.

        Raises:
            Unsupported: a newer version than this one knows. InvalidRequest: it is no manifest, or
            a path in it leads out of the publication.
        """
        try:
            document = json.loads(data)
            version = document["version"]
            if version != _VERSION:
                reason = f"the manifest has version {version!r}, this release reads {_VERSION}"
                raise Unsupported("fetch", path, reason)
            files = tuple(_parse_file(value) for value in document["files"])
            directories = tuple(str(value) for value in document["empty_directories"])
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidRequest("fetch", path, f"is no manifest: {error!r}") from None
        for name in (*(file.path for file in files), *directories):
            if not split("fetch", name):
                raise InvalidRequest("fetch", path, "the manifest names its own root")
        if len({file.path for file in files}) != len(files):
            raise InvalidRequest("fetch", path, "the manifest names a file twice")
        return cls(files, directories)


def _parse_file(value: Any) -> PublishedFile:
    name, size, checksum = value["path"], value["size_bytes"], value["sha256"]
    if not isinstance(name, str) or not isinstance(size, int) or size < 0:
        raise ValueError(f"a file must have a path and a size, got {value!r}")
    if not isinstance(checksum, str) or len(checksum) != 64:
        raise ValueError(f"sha256 must be 64 hexadecimal digits, got {checksum!r}")
    return PublishedFile(name, size, checksum)
