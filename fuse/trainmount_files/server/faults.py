"""Faults on purpose: what a store on a bad day does, for those who test a client against it.

A JSON file holds a list of rules; each request takes the first rule that matches and has not been
used up. The file is read again when it changes, so faults can come and go while the server runs.
`service` asks, the routes obey.

    [{"route": "presigned_get", "path": "*/shard-*", "count": 2, "cut_after_bytes": 1000000},
     {"route": "put_file", "probability": 0.1, "status": 503, "retry_after": "1"}]
"""

from __future__ import annotations

import fnmatch
import json
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

__all__ = ["NO_FAULT", "ROUTES", "Fault", "FaultError", "Faults", "parse_faults"]

ROUTES: Final = frozenset(
    {
        "abort_upload",
        "complete_upload",
        "create_abort_upload_url",
        "create_download_url",
        "create_upload_part_urls",
        "delete_file",
        "get_file",
        "head_directory",
        "head_file",
        "initiate_upload",
        "list_directory",
        "make_directory",
        "presigned_abort",
        "presigned_get",
        "presigned_put",
        "put_file",
        "put_part",
        "remove_directory",
        "unity_catalog",
    }
)


class FaultError(ValueError):
    """A rule is malformed; the message names it and the field."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rule. What it does not name stays as it is."""

    route: str = "*"
    """Name of a route, or `*`."""

    path: str = "*"
    """Pattern of the path in the volume, as in a shell."""

    probability: float = 1.0
    """Of a matching request being hit, 0 to 1."""

    count: int | None = None
    """How many requests are hit at most; None is no limit."""

    skip: int = 0
    """How many matching requests pass untouched first."""

    latency_ms: float = 0.0
    """Wait before anything else."""

    status: int | None = None
    """Answer with this status instead of acting."""

    error_code: str = ""
    """The `error_code` that goes with `status`; a plain one by default."""

    retry_after: str = ""
    """The header's value, passed as it is: seconds, a date or nonsense."""

    lose_reply: bool = False
    """Act, then close the connection (or answer with `status`), so that the client does not learn
    of it.
    """

    cut_after_bytes: int | None = None
    """Announce the whole body, send this much of it and close the connection."""

    ignore_range: bool = False
    """Answer 200 with the whole file to a request for a range."""

    expired_url: bool = False
    """Answer a presigned request as if its time were over."""

    no_last_modified: bool = False
    """Leave the header out."""


NO_FAULT: Final = Fault()


class Faults:
    """The rules in force and how often each was used. Called from the event loop and from tests'
    threads.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        # Both guarded by `_lock`.
        self._rules: list[tuple[Fault, list[int]]] = []
        self._stamp: tuple[int, int] | None = None
        if path is not None:
            self._reload()

    def replace(self, rules: Sequence[Fault]) -> None:
        """Put other rules in force; their counts begin anew."""
        with self._lock:
            self._rules = [(rule, [0]) for rule in rules]

    def take(self, route: str, path: str) -> Fault:
        """The fault of this request; NO_FAULT mostly."""
        if self._path is not None:
            self._reload()
        with self._lock:
            for rule, seen in self._rules:
                if rule.route not in ("*", route) or not fnmatch.fnmatchcase(path, rule.path):
                    continue
                if random.random() >= rule.probability:
                    continue
                seen[0] += 1
                hits = seen[0] - rule.skip
                if hits > 0 and (rule.count is None or hits <= rule.count):
                    return rule
        return NO_FAULT

    def _reload(self) -> None:
        assert self._path is not None
        try:
            status = self._path.stat()
        except OSError as error:
            raise FaultError(f"faults file {self._path} cannot be read: {error.strerror}") from None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return
        try:
            rules = parse_faults(json.loads(self._path.read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise FaultError(f"faults file {self._path} is not JSON: {error}") from None
        self._stamp = stamp
        self.replace(rules)


def parse_faults(document: Any) -> list[Fault]:
    """Read a list of rules. Raises FaultError."""
    if not isinstance(document, list):
        raise FaultError("faults must be a JSON list of rules")
    return [_parse_rule(index, rule) for index, rule in enumerate(document)]


def _parse_rule(index: int, rule: Any) -> Fault:
    if not isinstance(rule, dict):
        raise FaultError(f"faults[{index}] must be an object")
    types: dict[str, tuple[type, ...]] = {
        field.name: _TYPES[str(field.type)] for field in fields(Fault)
    }
    for name, value in rule.items():
        if name not in types:
            known = ", ".join(types)
            raise FaultError(f"faults[{index}].{name} is not a field; there are {known}")
        is_right = isinstance(value, types[name]) and isinstance(value, bool) == (
            bool in types[name]
        )
        if not is_right:
            raise FaultError(f"faults[{index}].{name} has the wrong type: {value!r}")
    route = rule.get("route", "*")
    if route != "*" and route not in ROUTES:
        known = ", ".join(sorted(ROUTES))
        raise FaultError(f"faults[{index}].route must be one of {known}; got {route}")
    return Fault(**rule)


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "float": (int, float),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
}
