"""Who may what: tokens, and the privileges that each has on volumes. Used by `service`.

A JSON file lists grants; those of one token add up. A token itself, or the file that holds it:

    [{"user": "ann", "token_file": "/run/secrets/ann", "volumes": ["main.default.*"],
      "privileges": ["READ VOLUME", "WRITE VOLUME"]},
     {"user": "bob", "token": "…", "volumes": ["main.*.*"], "privileges": ["READ VOLUME"]}]

As in Unity Catalog, to write takes READ VOLUME and WRITE VOLUME; a volume on which a token has
nothing is not listed for it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_files.server.errors import ApiError

__all__ = [
    "FULL_RIGHTS",
    "READ_VOLUME",
    "WRITE_VOLUME",
    "Caller",
    "Callers",
    "Grant",
    "GrantError",
    "is_token",
    "load_grants",
]

READ_VOLUME: Final = "READ_VOLUME"
WRITE_VOLUME: Final = "WRITE_VOLUME"
_PRIVILEGES: Final = (READ_VOLUME, WRITE_VOLUME)
_FIELDS: Final = ("user", "token", "token_file", "volumes", "privileges")


class GrantError(ValueError):
    """A grant is malformed; the message names it and the field, never the token."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Privileges on the volumes that match `catalog.schema.volume`, each name as in a shell."""

    pattern: tuple[str, str, str]
    privileges: frozenset[str]

    def covers(self, *names: str) -> bool:
        """Whether it is for something at, or below, a catalog, schema or volume."""
        return all(
            fnmatch.fnmatchcase(name, pattern)
            for name, pattern in zip(names, self.pattern, strict=False)
        )

    def covers_all(self, *names: str) -> bool:
        """Whether it is for everything at or below."""
        return self.covers(*names) and all(pattern == "*" for pattern in self.pattern[len(names) :])


@dataclass(frozen=True, slots=True)
class Caller:
    """The user that a token stands for."""

    user: str
    grants: tuple[Grant, ...]
    is_admin: bool = False

    def privileges(self, *names: str) -> list[str]:
        """What it has on all of a catalog, schema or volume, in a fixed order."""
        granted = [grant.privileges for grant in self.grants if grant.covers_all(*names)]
        return [name for name in _PRIVILEGES if any(name in some for some in granted)]

    def sees(self, *names: str) -> bool:
        """Whether it has anything at or below a catalog, schema or volume."""
        return any(grant.covers(*names) for grant in self.grants)

    def require(self, privilege: str, volume: Sequence[str]) -> None:
        """Raises ApiError 403 unless it has the privilege on `(catalog, schema, volume)`."""
        granted = self.privileges(*volume)
        needed = (READ_VOLUME,) if privilege == READ_VOLUME else (READ_VOLUME, WRITE_VOLUME)
        for name in needed:
            if name not in granted:
                words, full_name = name.replace("_", " "), ".".join(volume)
                message = f"User '{self.user}' does not have {words} on Volume '{full_name}'."
                raise ApiError(403, "PERMISSION_DENIED", message)


_EVERYTHING: Final = Grant(("*", "*", "*"), frozenset(_PRIVILEGES))

FULL_RIGHTS: Final = Caller("local", (_EVERYTHING,), is_admin=True)
"""Of the server's own token; and of a signed URL, which holds what its maker was granted."""


class Callers:
    """All tokens of a server. Holds their hashes: a look-up tells nothing by its time, and no
    token is in memory twice or in a `repr`.
    """

    def __init__(self, token: str, grants: Iterable[tuple[str, str, Grant]] = ()) -> None:
        """`token` has all rights, none for empty; `grants` are `(token, user, grant)`."""
        self._by_digest: dict[bytes, Caller] = {}
        for other, user, grant in grants:
            known = self._by_digest.get(_digest(other), Caller(user, ()))
            self._by_digest[_digest(other)] = Caller(user, (*known.grants, grant))
        if token:
            self._by_digest[_digest(token)] = FULL_RIGHTS

    def find(self, token: str) -> Caller | None:
        return self._by_digest.get(_digest(token))

    def named(self, user: str) -> Caller | None:
        """The caller of this user name, whatever its token."""
        return next((one for one in self._by_digest.values() if one.user == user), None)


def is_token(text: object) -> bool:
    """Whether it can stand in a header."""
    return isinstance(text, str) and text != "" and all(32 < ord(letter) < 127 for letter in text)


def load_grants(path: Path) -> list[tuple[str, str, Grant]]:
    """Read the file of grants. Raises GrantError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise GrantError(f"grants file {path} cannot be read: {error.strerror}") from None
    except ValueError:
        # Not the parser's own words: they may quote the text around, which holds tokens.
        raise GrantError(f"grants file {path} is not JSON") from None
    if not isinstance(document, list):
        raise GrantError(f"grants file {path}: must be a JSON list of grants")
    found: list[tuple[str, str, Grant]] = []
    users: dict[str, str] = {}
    for index, entry in enumerate(document):
        try:
            token, user, grants = _parse_grant(f"grants[{index}]", entry)
            if users.setdefault(token, user) != user:
                raise GrantError(f"grants[{index}].user must be one and the same for a token")
        except GrantError as error:
            raise GrantError(f"grants file {path}: {error}") from None
        found += [(token, user, grant) for grant in grants]
    return found


def _parse_grant(where: str, entry: Any) -> tuple[str, str, list[Grant]]:
    if not isinstance(entry, dict):
        raise GrantError(f"{where} must be an object")
    for name in entry:
        if name not in _FIELDS:
            raise GrantError(f"{where}.{name} is not a field; there are {', '.join(_FIELDS)}")
    user = entry.get("user")
    if not isinstance(user, str) or not user or not user.isprintable():
        raise GrantError(f"{where}.user must be a name")
    patterns = [_pattern(where, text) for text in _texts(where, entry, "volumes")]
    privileges = frozenset(_privilege(where, text) for text in _texts(where, entry, "privileges"))
    token = _token(where, entry)
    return token, user, [Grant(pattern, privileges) for pattern in patterns]


def _token(where: str, entry: Mapping[str, Any]) -> str:
    if ("token" in entry) == ("token_file" in entry):
        raise GrantError(f"{where} must have either token or token_file")
    field = "token" if "token" in entry else "token_file"
    token = entry[field]
    if field == "token_file":
        if not isinstance(token, str) or not token:
            raise GrantError(f"{where}.token_file must be the path of a file")
        try:
            token = Path(token).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise GrantError(f"{where}.token_file cannot be read: {error.strerror}") from None
        except ValueError:
            token = None
    if not is_token(token):
        raise GrantError(f"{where}.{field} must be printable ASCII without spaces, and not empty")
    return str(token)


def _texts(where: str, entry: Mapping[str, Any], field: str) -> list[str]:
    value = entry.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise GrantError(f"{where}.{field} must be a list of texts, and not empty")
    return value


def _pattern(where: str, text: str) -> tuple[str, str, str]:
    parts = text.split(".")
    if len(parts) != 3 or not all(parts) or "/" in text:
        raise GrantError(f"{where}.volumes must be CATALOG.SCHEMA.VOLUME or patterns, got {text!r}")
    return parts[0], parts[1], parts[2]


def _privilege(where: str, text: str) -> str:
    name = text.replace(" ", "_").upper()
    if name not in _PRIVILEGES:
        known = ", ".join(known.replace("_", " ") for known in _PRIVILEGES)
        raise GrantError(f"{where}.privileges must be of {known}; got {text!r}")
    return name


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
