"""The listing calls of Unity Catalog above the volumes, and who the caller is; called by `service`.

Catalogs, schemas and volumes are the three upper levels of the served directory. Blocking.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from trainmount_files.server.errors import ApiError, invalid
from trainmount_files.server.listing import name_page, parse_page_size
from trainmount_files.server.settings import parse_volume_name
from trainmount_files.server.store import DirectoryStore

__all__ = ["describe_caller", "get_volume", "list_catalogs", "list_schemas", "list_volumes"]

_OWNER = "local"


def list_catalogs(store: DirectoryStore, query: Mapping[str, str]) -> dict[str, Any]:
    return _page("catalogs", store.list_objects(), query, _catalog)


def list_schemas(store: DirectoryStore, query: Mapping[str, str]) -> dict[str, Any]:
    catalog = _required(query, "catalog_name")
    names = store.list_objects(catalog)
    return _page("schemas", names, query, lambda name: _schema(catalog, name))


def list_volumes(store: DirectoryStore, query: Mapping[str, str]) -> dict[str, Any]:
    catalog, schema = _required(query, "catalog_name"), _required(query, "schema_name")
    names = store.list_objects(catalog, schema)
    return _page("volumes", names, query, lambda name: _volume(catalog, schema, name))


def get_volume(store: DirectoryStore, full_name: str) -> dict[str, Any]:
    try:
        catalog, schema, name = parse_volume_name(full_name)
    except ValueError as error:
        raise invalid(str(error)) from None
    try:
        exists = name in store.list_objects(catalog, schema)
    except ApiError:
        exists = False
    if not exists:
        raise ApiError(404, "RESOURCE_DOES_NOT_EXIST", f"Volume '{full_name}' does not exist.")
    return _volume(catalog, schema, name)


def describe_caller() -> dict[str, Any]:
    """The answer of SCIM's `Me`; there is one user, who holds the token."""
    return {"id": "1", "userName": _OWNER, "displayName": _OWNER, "active": True}


def _page(key: str, names: list[str], query: Mapping[str, str], describe: Any) -> dict[str, Any]:
    size = parse_page_size(query.get("max_results"), name="max_results", maximum=10_000)
    encoded = [name.encode() for name in names]
    page, token = name_page(encoded, query.get("page_token"), size)
    answer: dict[str, Any] = {key: [describe(name.decode()) for name in page]}
    if token is not None:
        answer["next_page_token"] = token
    return answer


def _required(query: Mapping[str, str], name: str) -> str:
    value = query.get(name)
    if not value:
        raise invalid(f"{name} must be given")
    if "/" in value or value in (".", "..") or "\0" in value:
        raise invalid(f"{name} must be the name of an object, got {value}")
    return value


def _catalog(name: str) -> dict[str, Any]:
    return {"name": name, "full_name": name, "catalog_type": "MANAGED_CATALOG", "owner": _OWNER}


def _schema(catalog: str, name: str) -> dict[str, Any]:
    full_name = f"{catalog}.{name}"
    return {"name": name, "full_name": full_name, "catalog_name": catalog, "owner": _OWNER}


def _volume(catalog: str, schema: str, name: str) -> dict[str, Any]:
    full_name = f"{catalog}.{schema}.{name}"
    return {
        "name": name,
        "full_name": full_name,
        "catalog_name": catalog,
        "schema_name": schema,
        "volume_type": "MANAGED",
        "volume_id": str(uuid.uuid5(uuid.NAMESPACE_URL, full_name)),
        "owner": _OWNER,
    }
