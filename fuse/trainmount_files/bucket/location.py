"""From the URL of a bucket to its parts. Called by `open.py`; sends nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from trainmount_files.errors import InvalidRequest

__all__ = ["Location", "parse_location"]

_SCHEMES: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "azure": "az",
    "abfs": "az",
    "abfss": "az",
}
"""Hadoop's names for the same stores are among them."""

_EXPECTED: Final = (
    "must be s3://bucket[/prefix], gs://bucket[/prefix], az://container[/prefix] or "
    "abfss://container@account.dfs.core.windows.net[/prefix]"
)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a bucket volume is."""

    scheme: str
    """`s3`, `gs`, `az`, or `memory`: a store in this process, for tests."""

    bucket: str

    prefix: str = ""
    """Names joined by `/`, without one at either end; empty for the whole bucket."""

    account: str = ""
    """Of Azure, where the URL names it; otherwise the environment or an option does."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def key(self, path: str) -> str:
        """The key of a file of the volume; of the root, what all of its keys begin with."""
        return f"{self.prefix}/{path}" if self.prefix and path else self.prefix or path


def parse_location(url: str) -> Location:
    """The bucket that `url` names. The path is taken as it stands: nothing in it is decoded.

    Raises:
        InvalidRequest: the URL has no bucket, or a user, a port, or an empty, `.` or `..` name.
    """
    scheme, separator, rest = url.partition("://")
    host, _, path = rest.partition("/")
    account = ""
    if scheme in ("abfs", "abfss") and "@" in host:
        host, _, domain = host.partition("@")
        account = domain.partition(".")[0]
    prefix = path.strip("/")
    names = prefix.split("/") if prefix else []
    if (
        not separator
        or scheme not in _SCHEMES
        or not host
        # Whatever stands before an `@` or after a `:` may be a secret.
        or any(character in host for character in "@:?#% ")
        or any(name in ("", ".", "..") or not name.isprintable() for name in names)
    ):
        raise InvalidRequest("open", scheme + separator, _EXPECTED)
    return Location(_SCHEMES[scheme], host, prefix, account)
