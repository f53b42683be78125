"""A directory of a volume as a volume of its own: made, recorded, deleted. Called by the
controller.

`<source>/<name>/` is the volume. `<source>/.trainmount/<name>.json` is the record that we made it
and how large it was asked for; it is written first and deleted last, so that a crash in between
leaves nothing that is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import quote

from trainmount_csi.errors import AlreadyExists, InvalidArgument
from trainmount_csi.volume_context import VolumeContext
from trainmount_csi.wire import csi_pb2
from trainmount_files import ByteRange, NotADirectory, NotFound, Volume, list_directory

__all__ = ["Capacity", "child", "create", "delete", "directory_name", "parse_capacity", "split_id"]

_RECORDS: Final = ".trainmount"

_MAX_RECORD_BYTES: Final = 64 * 1024

_VOLUME_ID: Final = re.compile(r"(?P<parent>(?:file:|/Volumes/).+)/(?P<name>[^/]+)")


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a claim asked for; a volume has no size of its own, so it is only remembered."""

    required_bytes: int

    limit_bytes: int
    """0 is no limit."""


def parse_capacity(wanted: csi_pb2.CapacityRange) -> Capacity:
    """Raises InvalidArgument for a range that nothing fits."""
    if wanted.required_bytes < 0 or wanted.limit_bytes < 0:
        raise InvalidArgument("capacity_range must not be negative")
    if 0 < wanted.limit_bytes < wanted.required_bytes:
        raise InvalidArgument("capacity_range must not require more than its limit")
    return Capacity(wanted.required_bytes, wanted.limit_bytes)


def directory_name(volume_name: str) -> str:
    """A name that every store takes, different for different volume names."""
    # Not with %, which a file URL would take for its own. quote() escapes "=" itself, so it is
    # free.
    name = quote(volume_name, safe="").replace("%", "=")
    # A leading dot would make `..`, or collide with our records.
    return f"=2E{name[1:]}" if name.startswith(".") else name


def child(parent: VolumeContext, name: str) -> VolumeContext:
    """The volume in the directory `name`; options are the parent's."""
    return replace(parent, source=f"{parent.source}/{name}")


def split_id(volume_id: str) -> tuple[VolumeContext | None, str]:
    """The volume that holds the directory of `volume_id`, and its name there; None for an id that
    is not ours."""
    match = _VOLUME_ID.fullmatch(volume_id)
    if match is None or any(part in (".", "..") for part in volume_id.split("/")):
        return None, ""
    return VolumeContext(source=match["parent"]), match["name"]


def create(volume: Volume, name: str, capacity: Capacity) -> None:
    """Make and record the directory `name`; the same again changes nothing.

    Raises:
        AlreadyExists: it was made for another capacity.
    """
    record = _read_record(volume, name)
    if record is None:
        record = {
            "required_bytes": capacity.required_bytes,
            # What was there before us is somebody's data.
            "adopted": _exists(volume, name),
        }
        volume.put(_record_path(name), json.dumps(record).encode())
    size = record.get("required_bytes", 0)
    if size < capacity.required_bytes or 0 < capacity.limit_bytes < size:
        raise AlreadyExists(
            f"volume {name} exists with {size} bytes, and {capacity.required_bytes} to "
            f"{capacity.limit_bytes or 'any number'} are asked for; ask for its size or delete it"
        )
    volume.make_directory(name)


def delete(volume: Volume, name: str) -> None:
    """Delete the directory `name` with all in it if we made it, and its record; one that has no
    record stays."""
    record = _read_record(volume, name)
    if record is None:
        return
    if not record.get("adopted", False):
        _delete_tree(volume, name)
    _ignore_missing(volume.delete, _record_path(name))


def _delete_tree(volume: Volume, path: str) -> None:
    try:
        entries = list(list_directory(volume, path))
    except NotFound:
        return
    except NotADirectory:
        _ignore_missing(volume.delete, path)
        return
    for entry in entries:
        if entry.is_directory:
            _delete_tree(volume, entry.path)
        else:
            _ignore_missing(volume.delete, entry.path)
    _ignore_missing(volume.remove_directory, path)


def _record_path(name: str) -> str:
    return f"{_RECORDS}/{name}.json"


def _read_record(volume: Volume, name: str) -> dict[str, Any] | None:
    path = _record_path(name)
    try:
        found = volume.stat(path)
        buffer = bytearray(min(found.size_bytes, _MAX_RECORD_BYTES))
        volume.read_into(path, ByteRange(0, len(buffer)), buffer)
    except NotFound:
        return None
    record = json.loads(buffer)
    assert isinstance(record, dict)
    return record


def _exists(volume: Volume, path: str) -> bool:
    try:
        volume.stat(path)
    except NotFound:
        return False
    return True


def _ignore_missing(remove: Callable[[str], None], path: str) -> None:
    try:
        remove(path)
    except NotFound:
        return  # an earlier try got this far
