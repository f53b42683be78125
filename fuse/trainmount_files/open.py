"""From a URL to a volume. Called by the mount, the loader, the command line: everything that takes
a volume's URL.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from trainmount_files.errors import InvalidRequest
from trainmount_files.volume import Volume

__all__ = ["open_volume"]

_NAMES_OF_A_VOLUME: Final = 3

_EXPECTED: Final = (
    "must be /Volumes[/<catalog>[/<schema>[/<volume>[/...]]]], dbfs:/Volumes/..., "
    "file:///directory, s3://bucket[/prefix], gs://bucket[/prefix] or az://container[/prefix]"
)

_ELSEWHERE: Final = {
    "/Workspace": (
        "workspace files are no volume: other limits (500 MB a file, 10,000 entries a directory) "
        "and another API; copy them to a volume first"
    ),
    "dbfs:": "of DBFS only dbfs:/Volumes is reached; copy what is needed to a volume",
    "/dbfs": "DBFS is no volume; copy what is needed to a volume",
}
"""Places that look like a volume's, by the first name of their path."""


_BUCKETS: Final = ("s3:", "s3a:", "gs:", "gcs:", "az:", "azure:", "abfs:", "abfss:")


def open_volume(
    url: str | os.PathLike[str],
    *,
    host: str | None = None,
    token: str | None = None,
    profile: str | None = None,
    options: Mapping[str, str] | None = None,
    chunk_above_bytes: int | None = None,
) -> Volume:
    """The volume behind `url`: `/Volumes/c/s/v[/sub]`, the same after `dbfs:`,
    `file:///directory`, or a bucket: `s3://bucket[/prefix]`, `gs://…`, `az://container[/prefix]`,
    `abfss://container@account.dfs.core.windows.net[/prefix]`; `/Volumes`, `/Volumes/c` and
    `/Volumes/c/s` are one tree of all volumes below (`CatalogVolume`).

    `host`, `token` and `profile` are for the Files API; without them the databricks SDK's own
    configuration decides (`DATABRICKS_HOST`, `DATABRICKS_TOKEN`, profiles, OAuth). A profile that
    is named here counts before the environment. No request is sent before the first use.

    `options` are for buckets: `endpoint`, `region`, `access_key_id` … (`BucketOptions.storage`);
    without them the cloud's own variables and default chain decide (`AWS_ACCESS_KEY_ID`,
    `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, `AZURE_STORAGE_ACCOUNT_NAME` …).

    With `chunk_above_bytes`, files larger than that are stored as `<name>.chunks/` and read back as
    one (`ChunkedVolume`): for storage that takes no uploads in parts, so that 5 GiB is its limit.
    Who reads them must say so too.

    Raises:
        InvalidRequest: the URL is none of the above, or an option is wrong.
        Unsupported: a bucket, without the extra `bucket`.
        NotFound: the directory of a `file://` URL does not exist.
    """
    opened = _open(os.fspath(url), host, token, profile, options)
    if chunk_above_bytes is None:
        return opened
    # Imported late: few need it, and it brings the transfers.
    from trainmount_files.chunks import ChunkedVolume

    return ChunkedVolume(opened, max_object_bytes=chunk_above_bytes)


def _open(
    url: str,
    host: str | None,
    token: str | None,
    profile: str | None,
    options: Mapping[str, str] | None,
) -> Volume:
    # Imported late, each: a program that has one kind of volume need not wait for the others.
    if url.startswith("file:"):
        from trainmount_files.directory import DirectoryVolume

        return DirectoryVolume(_directory_of(url))
    remote = url.removeprefix("dbfs:")
    if remote == "/Volumes" or remote.startswith("/Volumes/"):
        root = _catalog_root(remote)
        from trainmount_files.catalog import CatalogVolume
        from trainmount_files.files_api import Credentials, FilesApiVolume

        credentials = Credentials(host=host, token=token, profile=profile)
        if len(root.split("/")) - 2 < _NAMES_OF_A_VOLUME:
            return CatalogVolume(root, credentials)
        return FilesApiVolume(root, credentials)
    if url.startswith(_BUCKETS):
        from trainmount_files.bucket import BucketOptions, BucketVolume, parse_location

        return BucketVolume(parse_location(url), BucketOptions(storage=dict(options or {})))
    for begin, reason in _ELSEWHERE.items():
        if url == begin or url.startswith(f"{begin}/"):
            raise InvalidRequest("open", _without_query(url), reason)
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
    if any(name in ("", ".", "..") for name in names):
        raise InvalidRequest("open", root, _EXPECTED)
    return root


def _without_query(url: str) -> str:
    # A mistyped URL may be a signed one.
    return url.partition("?")[0]
