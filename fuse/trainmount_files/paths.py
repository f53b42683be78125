"""The one place that says what a path inside a volume may look like. Used by every volume before it
touches a store.
"""

from __future__ import annotations

from typing import Final

from trainmount_files.errors import InvalidRequest

__all__ = ["STAGING_NAME", "join", "parent_of", "split"]

STAGING_NAME: Final = ".trainmount-staging"
"""Directory at the root of a `file://` volume that holds what is not published yet; never part of
the volume.
"""


def split(operation: str, path: str) -> tuple[str, ...]:
    """The names of `path`, none for the root.

    Raises:
        InvalidRequest: a name is empty, `.` or `..`, or holds a NUL: such a path could leave the
            volume.
    """
    if not path:
        return ()
    names = tuple(path.split("/"))
    for name in names:
        if name in ("", ".", ".."):
            raise InvalidRequest(
                operation, path, "must be relative to the volume, without empty, '.' or '..' names"
            )
        if "\0" in name:
            raise InvalidRequest(operation, path.replace("\0", "\\0"), "must not contain NUL")
    return names


def join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def parent_of(path: str) -> str:
    """The directory that holds `path`; the root's own is the root."""
    return path.rpartition("/")[0]
