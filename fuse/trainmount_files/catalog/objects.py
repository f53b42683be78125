"""Which catalogs, schemas and volumes there are, asked of Unity Catalog and kept for a while.

Called by `volume.py`. A listing is asked for whole, so that a look for one name in it costs no
request while it is fresh; threads that need the same one wait for one question.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from trainmount_files.errors import NotFound, PermissionDenied, Unavailable, VolumeError
from trainmount_files.files_api.answers import json_object
from trainmount_files.files_api.api import Call, FilesApi

__all__ = ["KINDS", "CatalogObject", "Objects"]

_LOG: Final = logging.getLogger(__name__)

_BASE: Final = "/api/2.1/unity-catalog"

KINDS: Final = ("catalog", "schema", "volume")
"""By the number of names above an object; its calls and its key in an answer have an `s` more."""

_KEPT: Final = 256
"""Listings kept; the least recently used goes."""

_MAX_PAGES: Final = 10_000
"""An end for a service that always has another page; each may be empty."""

_NEGATIVE_SECONDS: Final = 5.0
"""How long a refusal is believed: a grant or a new schema should show soon."""

_WITHOUT_VOLUMES: Final = "information_schema"
"""Each catalog has this schema of views. No volume can be made in it."""


@dataclass(frozen=True, slots=True)
class CatalogObject:
    """A catalog, a schema or a volume."""

    name: str
    """As Unity Catalog stores it, which is in lower case."""

    updated_ms: int
    """Milliseconds since the epoch; 0 where it is not told."""

    browse_only: bool
    """The identity may see that it exists and no more."""


@dataclass(slots=True)
class _Slot:
    """One listing; its lock is held while it is asked for."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    objects: Mapping[str, CatalogObject] | None = None
    refusal: VolumeError | None = None
    good_until: float = 0.0


class Objects:
    """The objects above the files, of one process. Any thread may call."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        # (catalog, schema) or fewer -> slot, least recently used first; guarded by the lock, which
        # is never held during a request.
        self._slots: OrderedDict[tuple[str, ...], _Slot] = OrderedDict()
        self._lock = threading.Lock()

    def below(
        self, api: FilesApi, operation: str, path: str, parents: tuple[str, ...]
    ) -> Mapping[str, CatalogObject]:
        """The objects in `parents` by name, sorted by it: catalogs in none, schemas in a catalog,
        volumes in a catalog and a schema. `operation` and `path` are for messages.

        Raises:
            NotFound: there is no such catalog or schema.
            PermissionDenied: the identity may not list it.
        """
        with self._lock:
            slot = self._slots.setdefault(parents, _Slot())
            self._slots.move_to_end(parents)
            while len(self._slots) > _KEPT:
                self._slots.popitem(last=False)
        with slot.lock:
            if monotonic() < slot.good_until:
                if slot.objects is not None:
                    return slot.objects
                if slot.refusal is not None:
                    raise type(slot.refusal)(operation, path, slot.refusal.reason)
            began = monotonic()
            try:
                slot.objects, slot.refusal = _list(api, operation, path, parents), None
            except (NotFound, PermissionDenied) as refusal:
                slot.objects, slot.refusal = None, refusal
                slot.good_until = began + min(_NEGATIVE_SECONDS, self._keep_seconds)
                raise
            slot.good_until = began + self._keep_seconds
            return slot.objects


def _list(
    api: FilesApi, operation: str, path: str, parents: tuple[str, ...]
) -> dict[str, CatalogObject]:
    """All pages. A page may be empty although more follow."""
    key = f"{KINDS[len(parents)]}s"
    # What may only be browsed is asked for too: it tells "not allowed" from "not there".
    query: dict[str, str | int] = {"max_results": 0, "include_browse": "true"}
    query.update(zip(("catalog_name", "schema_name"), parents, strict=False))
    found: dict[str, CatalogObject] = {}
    seen: set[str] = set()
    for _ in range(_MAX_PAGES):
        call = Call(
            operation=operation,
            path=path,
            method="GET",
            target=f"/{key}",
            query=query,
            base=_BASE,
            expects_json=True,
        )
        answer = json_object(api.call(call).unwrap().body)
        entries, token = answer.get(key) or [], answer.get("next_page_token") or None
        if not isinstance(entries, list) or not isinstance(token, str | None):
            raise Unavailable(operation, path, f"the answer is no list of {key}")
        for entry in entries:
            known = _parse(entry, key)
            if known is not None and not (key == "schemas" and known.name == _WITHOUT_VOLUMES):
                found[known.name] = known
        if token is None:
            return dict(sorted(found.items()))
        if token in seen:
            raise Unavailable(operation, path, "Unity Catalog repeated a page token")
        seen.add(token)
        query["page_token"] = token
    raise Unavailable(operation, path, f"Unity Catalog has more than {_MAX_PAGES} pages of {key}")


def _parse(entry: Any, key: str) -> CatalogObject | None:
    """One entry; None, with a warning, where its name is none that a path can hold."""
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not name or any(c in "./" or ord(c) <= 32 for c in name):
        _LOG.warning(
            "Unity Catalog lists an object that no path can name; it is left out",
            extra={"kind": key, "entry": ascii(name)},
        )
        return None
    updated = entry.get("updated_at")
    return CatalogObject(
        name,
        updated if isinstance(updated, int) and updated > 0 else 0,
        browse_only=entry.get("browse_only") is True,
    )
