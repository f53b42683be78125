"""The calls of Unity Catalog above the volumes, and who the caller is; called by `service`.

Catalogs, schemas and volumes are the three upper levels of the served directory. What a caller has
no privilege on is not listed for it. Blocking.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainmount_files.server.errors import ApiError, invalid
from trainmount_files.server.grants import Caller, Callers
from trainmount_files.server.listing import name_page, parse_page_size
from trainmount_files.server.paths import decode_target, is_object_name
from trainmount_files.server.store import DirectoryStore

__all__ = ["UnityCatalog", "is_unity_catalog"]

_PREFIX: Final = "/api/2.1/unity-catalog/"
_ME: Final = "/api/2.0/preview/scim/v2/Me"
_CREDENTIALS: Final = (
    "/api/2.0/unity-catalog/temporary-volume-credentials",
    f"{_PREFIX}temporary-volume-credentials",
)
_KINDS: Final = ("catalog", "schema", "volume")
_OWNER: Final = "local"


def is_unity_catalog(target: str) -> bool:
    """Whether `UnityCatalog.answer` is who knows the path of a URL."""
    return target == _ME or target in _CREDENTIALS or target.startswith(_PREFIX)


@dataclass(frozen=True, slots=True)
class UnityCatalog:
    """The tree above the files of one server."""

    store: DirectoryStore
    callers: Callers

    def answer(
        self, caller: Caller, method: str, target: str, query: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """The JSON of a call; None if there is no such call. Raises ApiError."""
        if target in _CREDENTIALS:
            message = "The volumes lie on the server's own disk; there are no credentials for it."
            raise ApiError(501, "NOT_IMPLEMENTED", f"{message} Use the Files API.")
        if method != "GET":
            return None
        if target == _ME:
            return _describe_user(caller)
        names = [decode_target(name) for name in target.removeprefix(_PREFIX).split("/")]
        if names[0] == "effective-permissions" and len(names) == 3:
            return self._permissions(caller, names[1], names[2], query.get("principal"))
        listings: dict[str, Callable[..., dict[str, Any]]] = {
            "catalogs": self._list_catalogs,
            "schemas": self._list_schemas,
            "volumes": self._list_volumes,
        }
        if names[0] not in listings:
            return None
        if len(names) == 1:
            return listings[names[0]](caller, query)
        if len(names) == 2:
            return self._get(caller, names[0].removesuffix("s"), names[1])
        return None

    def _list_catalogs(self, caller: Caller, query: Mapping[str, str]) -> dict[str, Any]:
        return self._page("catalogs", caller, (), query)

    def _list_schemas(self, caller: Caller, query: Mapping[str, str]) -> dict[str, Any]:
        return self._page("schemas", caller, (_required(query, "catalog_name"),), query)

    def _list_volumes(self, caller: Caller, query: Mapping[str, str]) -> dict[str, Any]:
        parents = _required(query, "catalog_name"), _required(query, "schema_name")
        return self._page("volumes", caller, parents, query)

    def _page(
        self, key: str, caller: Caller, parents: tuple[str, ...], query: Mapping[str, str]
    ) -> dict[str, Any]:
        size = parse_page_size(query.get("max_results"), name="max_results", maximum=10_000)
        self._require_seen(caller, parents)
        seen = [
            name.encode()
            for name in self.store.list_objects(*parents)
            if caller.sees(*parents, name)
        ]
        page, token = name_page(seen, query.get("page_token"), size)
        described = [self._describe((*parents, name.decode())) for name in page]
        answer: dict[str, Any] = {key: [one for one in described if one is not None]}
        if token is not None:
            answer["next_page_token"] = token
        return answer

    def _get(self, caller: Caller, kind: str, full_name: str) -> dict[str, Any]:
        names = _parse(kind, full_name)
        self._require_seen(caller, names)
        self._require(names)
        described = self._describe(names)
        if described is None:
            raise _missing(names)
        return described

    def _describe(self, names: tuple[str, ...]) -> dict[str, Any] | None:
        """None for what was removed meanwhile."""
        mtime_ns = self.store.object_mtime_ns(*names)
        return None if mtime_ns is None else _describe(names, mtime_ns // 1_000_000)

    def _permissions(
        self, caller: Caller, kind: str, full_name: str, principal: str | None
    ) -> dict[str, Any]:
        """What one principal may, all of whom have it by the server's own list: the caller unless
        another is named, which only full rights may.
        """
        if kind.lower() not in _KINDS:
            raise invalid(f"The type must be one of {', '.join(_KINDS)}, got {kind}")
        names = _parse(kind.lower(), full_name)
        self._require_seen(caller, names)
        self._require(names)
        asked: Caller | None = caller
        if principal is not None and principal != caller.user:
            if not caller.is_admin:
                message = f"User '{caller.user}' may not see the privileges of others."
                raise ApiError(403, "PERMISSION_DENIED", message)
            asked = self.callers.named(principal)
        if asked is None or not asked.sees(*names):
            return {"privilege_assignments": []}
        privileges = [*(("USE_CATALOG", "USE_SCHEMA")[: len(names)]), *asked.privileges(*names)]
        described = [{"privilege": privilege} for privilege in privileges]
        return {"privilege_assignments": [{"principal": asked.user, "privileges": described}]}

    def _require_seen(self, caller: Caller, names: tuple[str, ...]) -> None:
        if names and not caller.sees(*names):
            kind, full_name = _KINDS[len(names) - 1], ".".join(names)
            message = f"User '{caller.user}' has no privilege on {kind.title()} '{full_name}'."
            raise ApiError(403, "PERMISSION_DENIED", message)

    def _require(self, names: tuple[str, ...]) -> None:
        """Raises ApiError 404, for the uppermost that is missing."""
        for depth in range(1, len(names) + 1):
            if names[depth - 1] not in self.store.list_objects(*names[: depth - 1]):
                raise _missing(names[:depth])


def _describe_user(caller: Caller) -> dict[str, Any]:
    identity = uuid.uuid5(uuid.NAMESPACE_URL, f"trainmount:user:{caller.user}")
    return {
        "schemas": ["urn:ietf:params:scim:schemas:core:2.0:User"],
        "id": str(identity.int % 10**16),
        "userName": caller.user,
        "displayName": caller.user,
        "active": True,
    }


def _missing(names: tuple[str, ...]) -> ApiError:
    kind, full_name = _KINDS[len(names) - 1], ".".join(names)
    code = "RESOURCE_DOES_NOT_EXIST" if kind == "volume" else f"{kind}_DOES_NOT_EXIST"
    return ApiError(404, code.upper(), f"{kind.title()} '{full_name}' does not exist.")


def _describe(names: tuple[str, ...], updated_ms: int) -> dict[str, Any]:
    full_name = ".".join(names)
    described: dict[str, Any] = {
        "name": names[-1],
        "full_name": full_name,
        "owner": _OWNER,
        # A directory does not tell when it was made.
        "created_at": updated_ms,
        "updated_at": updated_ms,
    }
    if len(names) == 1:
        return described | {"catalog_type": "MANAGED_CATALOG"}
    described["catalog_name"] = names[0]
    if len(names) == 2:
        return described
    identity = str(uuid.uuid5(uuid.NAMESPACE_URL, full_name))
    return described | {
        "schema_name": names[1],
        "volume_type": "MANAGED",
        "volume_id": identity,
        "browse_only": False,
    }


def _parse(kind: str, full_name: str) -> tuple[str, ...]:
    names = tuple(full_name.split("."))
    if len(names) != _KINDS.index(kind) + 1 or not all(is_object_name(name) for name in names):
        form = ".".join(_KINDS[: _KINDS.index(kind) + 1]).upper()
        raise invalid(f"The name of a {kind} must be {form}, got {full_name}")
    return names


def _required(query: Mapping[str, str], name: str) -> str:
    value = query.get(name)
    if not value:
        raise invalid(f"{name} must be given")
    if not is_object_name(value):
        raise invalid(f"{name} must be the name of an object, got {value}")
    return value
