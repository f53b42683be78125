"""Whose access a volume is used with. Parsed from the secrets of a request; lives in memory and in
a Keeper, nowhere else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from trainmount_csi.errors import InvalidArgument

__all__ = ["HOST_KEY", "TOKEN_KEY", "Credentials"]

HOST_KEY: Final = "DATABRICKS_HOST"
TOKEN_KEY: Final = "DATABRICKS_TOKEN"  # noqa: S105 - the key's name


@dataclass(frozen=True, slots=True)
class Credentials:
    """Host and token for the Files API; both None for a volume that needs none."""

    host: str | None = None

    token: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, secrets: Mapping[str, str], *, required: bool, secret_field: str) -> Credentials:
        """Take host and token out of a request's secrets; `secret_field` tells a person where they
        come from.

        Raises:
            InvalidArgument: `required`, and a key is missing or empty.
        """
        host = secrets.get(HOST_KEY, "").strip()
        token = secrets.get(TOKEN_KEY, "").strip()
        if required:
            for key, value in ((HOST_KEY, host), (TOKEN_KEY, token)):
                if not value:
                    raise InvalidArgument(f"{secret_field} must name a Secret with the key {key}")
        return cls(host.rstrip("/") or None, token or None)

    @property
    def digest(self) -> str:
        """Tells two identities apart and does not tell the token."""
        # A token is long and random, so that its digest cannot be searched for.
        return hashlib.sha256(f"{self.host}\0{self.token}".encode()).hexdigest()

    def environment(self) -> dict[str, str]:
        """The variables the databricks SDK reads in a daemon."""
        values = {HOST_KEY: self.host, TOKEN_KEY: self.token}
        return {key: value for key, value in values.items() if value is not None}
