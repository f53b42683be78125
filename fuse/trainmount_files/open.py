"""From a URL to a volume. Called by the mount, the loader, the command line: everything that takes
a volume's URL.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from trainmount_files.directory import DirectoryVolume
from trainmount_files.errors import InvalidRequest
from trainmount_files.volume import Volume

__all__ = ["open_volume"]

_EXPECTED: Final = (
    "must be /Volumes/<catalog>/<schema>/<volume>[/...], dbfs:/Volumes/... or file:///directory"
)


def open_volume(
    url: str, *, host: str | None = None, token: str | None = None, profile: str | None = None
) -> Volume:
    """The volume behind `url`: `/Volumes/c/s/v[/sub]`, `dbfs:/Volumes/c/s/v[/sub]` or
    `file:///directory`.

    `host`, `token` and `profile` are for the Files API; without them the databricks SDK's own
    configuration decides (`DATABRICKS_HOST`, `DATABRICKS_TOKEN`, profiles, OAuth). What the
    environment sets goes before the profile, as in the SDK. No request is sent before the first
    use.

    Raises:
        InvalidRequest: the URL is none of the above.
        NotFound: the directory of a `file://` URL does not exist.
    """
    if url.startswith("file:"):
        return DirectoryVolume(_directory_of(url))
    remote = url.removeprefix("dbfs:")
    if remote == "/Volumes" or remote.startswith("/Volumes/"):
        root = _catalog_root(remote)
        # Imported late: the Files API drags in an HTTP client that a plain directory does not need.
        from trainmount_files.files_api import FilesApiVolume
        from trainmount_files.files_api.sdk import Credentials

        return FilesApiVolume(root, Credentials(host=host, token=token, profile=profile))
    raise InvalidRequest("open", _without_query(url), _EXPECTED)


def _directory_of(url: str) -> Path:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidRequest("open", _without_query(url), _EXPECTED)
    # `?` and `#` are legal in names; a file URL has no query of its own.
    rest = url.removeprefix("file:").removeprefix("//").removeprefix("localhost")
    return Path(unquote(rest, errors="surrogateescape"))


def _catalog_root(remote: str) -> str:
    root = remote.rstrip("/")
    names = root.split("/")[2:]
    if len(names) < 3 or any(name in ("", ".", "..") for name in names):
        raise InvalidRequest("open", root, _EXPECTED)
    return root


def _without_query(url: str) -> str:
    # A mistyped URL may be a signed one.
    return url.partition("?")[0]
