"""Paths of the wire: `/Volumes/<catalog>/<schema>/<volume>/…` to names, decoded exactly once."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote_to_bytes

from trainmount_files.server.errors import ApiError, directory_not_found, invalid

__all__ = ["VolumePath", "decode_target", "is_object_name", "parse_volume_path"]

# Unity Catalog's own rule for the names of catalogs, schemas and volumes.
_OBJECT_NAME: Final = re.compile(r"[^\x00-\x20./\x7f]{1,255}")


@dataclass(frozen=True, slots=True)
class VolumePath:
    """A place in a volume. Names hold no slash, no NUL and are never `.` or `..`."""

    catalog: str
    schema: str
    volume: str
    names: tuple[str, ...]
    """Below the volume; empty for the volume's root."""

    def __str__(self) -> str:
        return "/".join(("/Volumes", self.catalog, self.schema, self.volume, *self.names))

    @property
    def all_names(self) -> tuple[str, ...]:
        """From the served directory down."""
        return (self.catalog, self.schema, self.volume, *self.names)

    @property
    def volume_names(self) -> tuple[str, str, str]:
        return self.catalog, self.schema, self.volume

    @property
    def is_root(self) -> bool:
        return not self.names


def is_object_name(name: str) -> bool:
    """Whether a catalog, schema or volume can be called so."""
    return _OBJECT_NAME.fullmatch(name) is not None


def decode_target(raw: str) -> str:
    """Percent-decode the path of a request line once. Raises ApiError unless it is UTF-8."""
    try:
        return unquote_to_bytes(raw).decode("utf-8")
    except UnicodeDecodeError:
        raise invalid("The path must be percent-encoded UTF-8.") from None


def parse_volume_path(path: str) -> VolumePath:
    """Read a decoded path; repeated and trailing slashes do not count.

    Raises:
        ApiError: the path is relative, holds NUL, `.` or `..`, or ends above a volume.
    """
    if not path.startswith("/"):
        raise invalid(f"The path must begin with /Volumes/: {path}")
    if "\0" in path:
        raise invalid("The path must not contain NUL.")
    names = [name for name in path.split("/") if name]
    if any(name in (".", "..") for name in names):
        raise invalid(f"The path must not contain '.' or '..': {path}")
    if not names or names[0] != "Volumes":
        raise ApiError(404, "NOT_FOUND", f"The path must begin with /Volumes/: {path}")
    if len(names) < 4 or not all(is_object_name(name) for name in names[1:4]):
        # Above a volume the tree belongs to Unity Catalog, which has its own calls. No name of its
        # has a dot: so the server's own folder, which has one, is out of reach.
        raise directory_not_found(path)
    return VolumePath(names[1], names[2], names[3], tuple(names[4:]))
