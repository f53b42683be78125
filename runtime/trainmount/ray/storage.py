"""From a path and storage options to an fsspec filesystem, under the names that Ray gives paths
(without scheme; of a bucket with its name in front). Called by `filesystem.py` and `reading.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import fsspec.config
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractFileSystem

from trainmount.locations import is_local
from trainmount_files.errors import NotFound
from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.filesystem.locations import Identity, Location, Locations, strip

__all__ = ["StorageOptions", "open_filesystem", "path_in", "scheme_of"]

StorageOptions = Mapping[str, Any]
"""Options of one scheme, or `{scheme: options}` of several."""

_SAME: Final = (
    ("s3", "s3a"),
    ("cos", "cosn"),
    ("oss",),
    ("gs", "gcs"),
    ("az", "azure"),
    ("volumes", "dbfs"),
    ("file", "local"),
)
"""Schemes with one meaning, the first of which stands for all."""

_S3_COMPATIBLE: Final = ("cos", "oss")
"""Stores that speak S3, at an endpoint of their own, and want the bucket's name in the host's."""

_S3_NAMES: Final = {
    "key": "access_key_id",
    "secret": "secret_access_key",
    "token": "session_token",
    "endpoint_url": "endpoint",
    "region_name": "region",
    "anon": "skip_signature",
}
"""What s3fs calls an option, and what the volume of a bucket does."""

_OF_CACHES: Final = ("use_listings_cache", "listings_expiry_time", "max_paths")
"""Options that s3fs users set so that a listing is fresh; ours always is."""


def scheme_of(path: str) -> str:
    """`file`, `volumes`, `s3`, `cos`, `oss`, `gs` or `az`.

    A path below `/Volumes` is a file's where the volume is mounted here, else `volumes`.

    Raises:
        ValueError: the path is relative, or of another scheme.
    """
    scheme, separator, _ = path.partition("://")
    if not separator:
        if path.startswith("dbfs:"):
            return "volumes"
        if not path.startswith("/"):
            raise ValueError(f"{path!r} must be absolute: workers have other working directories")
        return "file" if is_local(path) else "volumes"
    for names in _SAME:
        if scheme in names:
            return names[0]
    raise ValueError(
        f"{path!r} must be volumes://, s3://, cos://, oss://, gs://, az:// or an absolute path"
    )


def path_in(path: str) -> str:
    """How Ray calls `path` to its filesystem."""
    scheme, separator, rest = path.partition("://")
    if not separator:
        return path.removeprefix("dbfs:")
    return strip(rest) if scheme in ("volumes", "dbfs", "file", "local") else rest.strip("/")


def open_filesystem(path: str, options: StorageOptions | None) -> AbstractFileSystem:
    """The filesystem that `path` is on. Sends no request.

    Raises:
        ValueError: see `scheme_of`; or an option has no meaning there.
    """
    scheme = scheme_of(path)
    given = _options_of(scheme, options)
    if scheme == "file":
        if given:
            raise ValueError(f"{path!r} takes no storage options, got {', '.join(sorted(given))}")
        return LocalFileSystem()
    if scheme == "volumes":
        return VolumesFileSystem(**given)
    if scheme == "s3" or scheme in _S3_COMPATIBLE:
        given = _s3_options(scheme, given)
    return BucketFileSystem(
        scheme=scheme, options={name: str(each) for name, each in given.items()}
    )


class BucketFileSystem(VolumesFileSystem):
    """All buckets of one identity; paths are `<bucket>/<key>`."""

    protocol: Any = "bucket"

    def __init__(self, *, scheme: str, options: Mapping[str, str]) -> None:
        super().__init__(options=options)
        # Ray takes a filesystem for a path only where it knows the path's scheme.
        self.protocol = next(names for names in _SAME if names[0] == scheme)
        self._locations = _Buckets(scheme, options)

    def unstrip_protocol(self, name: str) -> str:
        return f"{self.protocol[0]}:/{strip(name)}"


class _Buckets(Locations):
    """Finds the volume of a path whose first name is the bucket's."""

    def __init__(self, scheme: str, options: Mapping[str, str]) -> None:
        super().__init__(None, Identity())
        self._scheme = "s3" if scheme in _S3_COMPATIBLE else scheme
        self._options = options
        self._buckets: dict[str, Locations] = {}

    def is_above_all(self, path: str) -> bool:
        # Buckets are not listed: nothing is above them.
        return not path

    def is_root(self, path: str) -> bool:
        return path.count("/") == 1

    def find(self, path: str) -> Location:
        bucket, _, within = path.lstrip("/").partition("/")
        if not bucket:
            raise NotFound("open", path, "paths begin with the name of a bucket")
        if bucket not in self._buckets:
            settings = tuple(sorted(self._of(bucket).items()))
            url = f"{self._scheme}://{bucket}"
            self._buckets[bucket] = Locations(url, Identity(options=settings))
        found = self._buckets[bucket].find(f"/{within}")
        return Location(found.volume, f"/{bucket}", found.path)

    def _of(self, bucket: str) -> dict[str, str]:
        options = dict(self._options)
        endpoint = options.get("endpoint", "")
        if options.get("virtual_hosted_style_request") == "true" and endpoint:
            # The volume wants the endpoint as it is asked, with the bucket's name in it.
            protocol, _, host = endpoint.partition("://")
            if not host.startswith(f"{bucket}."):
                options["endpoint"] = f"{protocol}://{bucket}.{host}"
        return options


def _options_of(scheme: str, options: StorageOptions | None) -> dict[str, Any]:
    """Those of one scheme, above what fsspec's configuration (`FSSPEC_S3_KEY` …) says."""
    names = next(names for names in _SAME if names[0] == scheme)
    found: dict[str, Any] = {}
    for name in names:
        found |= fsspec.config.conf.get(name, {})
    given = dict(options or {})
    known = {name for group in _SAME for name in group}
    if given.keys() & known:
        for name in names:
            found |= given.get(name, {})
    else:
        found |= given
    return {name: each for name, each in found.items() if name not in _OF_CACHES}


def _s3_options(scheme: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """s3fs' options by the names of the volume, whose own are taken as they are."""
    flat = dict(given)
    client = flat.pop("client_kwargs", None) or {}
    config = flat.pop("config_kwargs", None) or {}
    style = (config.get("s3") or {}).get("addressing_style")
    flat |= {name: each for name, each in client.items() if name in _S3_NAMES}
    unknown = sorted(set(client) - set(_S3_NAMES))
    if unknown:
        raise ValueError(f"client_kwargs of {scheme}:// has no meaning here: {', '.join(unknown)}")
    found = {_S3_NAMES.get(name, name): each for name, each in flat.items() if each is not None}
    if "skip_signature" in found:
        found["skip_signature"] = "true" if found["skip_signature"] else "false"
    if scheme in _S3_COMPATIBLE and "endpoint" not in found:
        raise ValueError(f"{scheme}:// needs endpoint_url in its storage options")
    if style is None and scheme in _S3_COMPATIBLE:
        style = "virtual"
    if style in ("virtual", "path"):
        found["virtual_hosted_style_request"] = "true" if style == "virtual" else "false"
    if os.fspath(found.get("endpoint", "")).startswith("http://"):
        found.setdefault("allow_http", "true")
    return found
