"""The answer of `GET /api/2.0/fs/endpoints`: by which hosts and protocols files may be moved, best
first. Pure; `service` serves it.
"""

from __future__ import annotations

from typing import Any, Final

__all__ = ["DEFAULT_ENDPOINTS", "ENDPOINTS", "describe_endpoints"]

ENDPOINTS: Final = {
    "io-offload": ("IO_OFFLOAD", None),
    "files-2.0": ("FILES_API", "2.0"),
    "files-3.0": ("FILES_API", "3.0"),
}
"""Signed URLs; the API itself, by version. All are on this server's one host."""

DEFAULT_ENDPOINTS: Final = tuple(ENDPOINTS)


def describe_endpoints(
    names: tuple[str, ...], *, scheme: str, host: str, resumable: bool
) -> dict[str, Any]:
    """`names` of `ENDPOINTS` in the order to tell them; `host` with its port."""
    entries = []
    for name in names:
        api, version = ENDPOINTS[name]
        if version == "3.0" and scheme != "https":
            continue  # clients refuse it: it carries the token over the internet
        entries.append(
            {
                "api": api,
                "api_version": version,
                "scheme": scheme,
                "hostname": host,
                # Resumable uploads take the place of those in parts, but for 3.0.
                "multipart_upload_supported": not resumable or version == "3.0",
            }
        )
    return {"endpoints": entries}
