"""A listing in a file, so that a long one is made once. Called by `dataset`.

One JSON object a line: `{"path": "a/b.png", "size": 1234}`, and as far as they are known
`"version"` and one checksum, `"crc32"`, `"sha256"`, … Such a file can come from whatever else made
the data. Its first line may tell what it lists, which is held against what is asked for.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from trainmount.data.checksums import is_kind, parse_checksum
from trainmount.data.manifest import Entry, Manifest
from trainmount.errors import DataError
from trainmount.locations import is_local, local_path

if TYPE_CHECKING:
    from trainmount_files.volume import Volume

__all__ = ["read_recorded", "write_recorded"]


def read_recorded(path: str, pattern: str) -> Manifest | None:
    """The listing that the file at `path` has; None if there is none.

    Raises:
        DataError: the file cannot be read, is no listing, or is one by another pattern.
    """
    from trainmount_files.errors import VolumeError

    try:
        with _open_to_read(path) as file:
            return Manifest(_entries(path, file, pattern), keeps_order=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except VolumeError as error:
        raise DataError(f"cannot read {path}: {error}") from error


def write_recorded(path: str, pattern: str, manifest: Manifest) -> None:
    """Record a listing at `path`, whole or not at all.

    Raises:
        DataError: the file cannot be written.
    """
    lines = _lines(pattern, manifest)
    if is_local(path):
        place = local_path(path)
        partial = place.with_name(f".{place.name}.{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.writelines(lines)
            partial.replace(place)
        except OSError as error:
            raise DataError(f"cannot write {path}: {error.strerror or error}") from error
        return
    from trainmount_files.errors import VolumeError
    from trainmount_files.transfer import open_writer

    volume, name = _beside(path)
    try:
        with open_writer(volume, name) as writer:
            for line in lines:
                writer.write(line)
    except VolumeError as error:
        raise DataError(f"cannot write {path}: {error}") from error


def _lines(pattern: str, manifest: Manifest) -> Iterator[bytes]:
    yield _line({"pattern": pattern, "count": len(manifest)})
    for entry in manifest:
        fields: dict[str, Any] = {"path": entry.path, "size": entry.size_bytes}
        if entry.version:
            fields["version"] = entry.version
        if entry.checksum:
            kind, _, digits = entry.checksum.partition(":")
            fields[kind] = digits
        yield _line(fields)


def _line(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode("ascii") + b"\n"


def _entries(path: str, lines: Iterable[bytes], pattern: str) -> Iterator[Entry]:
    expected: int | None = None
    count = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if number == 1 and "path" not in fields:
                expected = int(fields["count"])
                recorded = str(fields["pattern"])
                if recorded != pattern:
                    raise DataError(
                        f"{path} lists files by pattern {recorded!r}, not {pattern!r}; "
                        "give the dataset another manifest, or remove it"
                    )
                continue
            entry = _entry(fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}, line {number}, is no entry of a listing: {error}") from error
        count += 1
        yield entry
    if expected not in (None, count):
        raise DataError(f"{path} has {count} files, and says it lists {expected}; remove it")


def _entry(fields: dict[str, Any]) -> Entry:
    size_bytes = int(fields["size"])
    if size_bytes < 0:
        raise ValueError(f"size must not be negative, got {size_bytes}")
    # Whoever wrote it may have more to say of a file.
    kinds = [name for name in fields if is_kind(name)]
    checksum = parse_checksum(f"{kinds[0]}:{fields[kinds[0]]}") if kinds else ""
    return Entry(str(fields["path"]), size_bytes, str(fields.get("version", "")), checksum)


def _open_to_read(path: str) -> IO[bytes]:
    """Raises FileNotFoundError, OSError, VolumeError."""
    if is_local(path):
        return local_path(path).open("rb")
    from trainmount_files.errors import NotFound
    from trainmount_files.transfer import open_reader

    volume, name = _beside(path)
    try:
        return io.BufferedReader(open_reader(volume, name))
    except NotFound as error:
        raise FileNotFoundError(path) from error


def _beside(path: str) -> tuple[Volume, str]:
    """The volume of the file's directory, and its name there."""
    from trainmount_files import open_volume

    directory, _, name = path.rstrip("/").rpartition("/")
    return open_volume(directory), name
