"""Which volume of the data directory a source is. Pure; used by `launch` and `agent`."""

from __future__ import annotations

__all__ = ["volume_name", "volume_subdirectory"]


def volume_name(source: str) -> str | None:
    """`catalog.schema.volume` of a source such as `/Volumes/main/default/data/part`; None for a
    source that the local server does not hold, such as a bucket.
    """
    parts = _parts(source)
    return ".".join(parts[:3]) if len(parts) >= 3 else None


def volume_subdirectory(source: str) -> str | None:
    """The path of a source below the data directory; None as above."""
    parts = _parts(source)
    return "/".join(parts) if len(parts) >= 3 else None


def _parts(source: str) -> list[str]:
    path = source.removeprefix("dbfs:")
    if not path.startswith("/Volumes/"):
        return []
    return [part for part in path.removeprefix("/Volumes/").split("/") if part]
