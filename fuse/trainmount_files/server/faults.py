"""Faults on purpose: what a store on a bad day does, for those who test a client against it.

A JSON file holds a list of rules; each request takes the first rule that matches and has not been
used up. The file is read again when it changes, so faults can come and go while the server runs.
`service` asks, the routes obey.

    [{"route": "presigned_get", "path": "*/shard-*", "count": 2, "cut_after_bytes": 1000000},
     {"route": "put_file", "probability": 0.1, "status": 503, "retry_after": "1"}]

With a seed for the probabilities, the same requests in the same order meet the same faults:

    {"seed": 7, "faults": [{"route": "*", "probability": 0.1, "status": 503}]}
"""

from __future__ import annotations

import fnmatch
import json
import logging
import random
import threading
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

__all__ = ["NO_FAULT", "ROUTES", "Fault", "FaultError", "FaultPlan", "Faults", "parse_faults"]

_log = logging.getLogger(__name__)

ROUTES: Final = frozenset(
    {
        "abort_upload",
        "complete_upload",
        "create_abort_upload_url",
        "create_download_url",
        "create_resumable_upload_url",
        "create_upload_part_urls",
        "delete_file",
        "get_file",
        "head_directory",
        "head_file",
        "initiate_upload",
        "list_directory",
        "list_endpoints",
        "make_directory",
        "presigned_abort",
        "presigned_get",
        "presigned_put",
        "presigned_resumable",
        "put_file",
        "put_part",
        "remove_directory",
        "unity_catalog",
    }
)


EXPIRED_CODES: Final = ("AccessDenied", "AuthenticationFailed", "ExpiredToken")
"""How object stores name a signed URL whose time is over."""


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
    """Close the connection after this much of the body: of the answer, which announced all of it,
    or of the upload, which is then not stored.
    """

    bandwidth_bytes_per_second: float | None = None
    """Let bodies, in and out, through no faster than this."""

    ignore_range: bool = False
    """Answer 200 with the whole file to a request for a range."""

    expired_url: bool = False
    """Answer a presigned request as if its time were over."""

    expired_code: str = "AccessDenied"
    """How `expired_url` says so: `AccessDenied` (S3), `AuthenticationFailed` (Azure) or
    `ExpiredToken` (temporary credentials).
    """

    no_last_modified: bool = False
    """Leave the header out."""

    vanish_parents: bool = False
    """After a delete, remove the directories above that have become empty, up to the volume."""

    @property
    def touches_bodies(self) -> bool:
        """Whether bodies must go the slow way."""
        return self.cut_after_bytes is not None or self.bandwidth_bytes_per_second is not None


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Rules and the seed of their probabilities."""

    rules: tuple[Fault, ...] = ()
    seed: int | None = None
    """None is another one each time."""


NO_FAULT: Final = Fault()


class Faults:
    """The rules in force and how often each was used. Called from the event loop and from tests'
    threads.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._lock = threading.Lock()
        # All guarded by `_lock`.
        self._rules: list[tuple[Fault, list[int]]] = []
        self._random = random.Random()
        self._stamp: tuple[int, int] | None = None
        # Only the event loop, which alone reads the file, touches these.
        self._wrong_stamp: tuple[int, int] | None = None
        self._complaint = ""
        if path is not None:
            self._reload()

    def replace(self, plan: FaultPlan) -> None:
        """Put other rules in force; their counts and the seed begin anew."""
        with self._lock:
            self._rules = [(rule, [0]) for rule in plan.rules]
            self._random = random.Random(plan.seed)

    def take(self, route: str, path: str) -> Fault:
        """The fault of this request; NO_FAULT mostly."""
        self._follow_file()
        with self._lock:
            for rule, seen in self._rules:
                if rule.route not in ("*", route) or not fnmatch.fnmatchcase(path, rule.path):
                    continue
                if rule.probability < 1 and self._random.random() >= rule.probability:
                    continue
                seen[0] += 1
                hits = seen[0] - rule.skip
                if hits > 0 and (rule.count is None or hits <= rule.count):
                    return rule
        return NO_FAULT

    def _follow_file(self) -> None:
        """A file that was made wrong while the server runs is told once; the last rules stay."""
        if self._path is None:
            return
        try:
            self._reload()
        except FaultError as error:
            if self._complaint != str(error):
                self._complaint = str(error)
                _log.warning("The faults file is wrong, the last rules stay: %s", error)
        else:
            self._complaint = ""

    def _reload(self) -> None:
        assert self._path is not None
        try:
            status = self._path.stat()
        except OSError as error:
            raise FaultError(f"faults file {self._path} cannot be read: {error.strerror}") from None
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp == self._stamp:
            return
        if self._complaint and stamp == self._wrong_stamp:
            raise FaultError(self._complaint)
        self._wrong_stamp = stamp
        try:
            plan = parse_faults(json.loads(self._path.read_text(encoding="utf-8")))
        except OSError as error:
            raise FaultError(f"faults file {self._path} cannot be read: {error.strerror}") from None
        except FaultError as error:
            raise FaultError(f"faults file {self._path}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise FaultError(f"faults file {self._path} is not JSON: {error}") from None
        self._stamp = stamp
        self.replace(plan)


def parse_faults(document: Any) -> FaultPlan:
    """Read a list of rules, or an object with `faults` and `seed`. Raises FaultError."""
    seed = None
    if isinstance(document, dict):
        for name in document:
            if name not in ("faults", "seed"):
                raise FaultError(f"{name} is not a field; there are faults, seed")
        seed = document.get("seed")
        if seed is not None and type(seed) is not int:
            raise FaultError(f"seed must be a whole number, got {seed!r}")
        document = document.get("faults")
    if not isinstance(document, list):
        raise FaultError("faults must be a JSON list of rules")
    rules = tuple(_parse_rule(index, rule) for index, rule in enumerate(document))
    return FaultPlan(rules=rules, seed=seed)


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
        if problem := _problem(name, value):
            raise FaultError(f"faults[{index}].{name} must be {problem}; got {value}")
    return Fault(**rule)


def _problem(name: str, value: Any) -> str | None:
    """What a value of the right type must be and is not."""
    if name == "route":
        allowed, wanted = value == "*" or value in ROUTES, "one of " + ", ".join(sorted(ROUTES))
    elif name == "expired_code":
        allowed, wanted = value in EXPIRED_CODES, "one of " + ", ".join(EXPIRED_CODES)
    elif name == "probability":
        allowed, wanted = 0 <= value <= 1, "between 0 and 1"
    elif name == "status":
        allowed, wanted = value is None or 200 <= value <= 599, "between 200 and 599"
    elif name == "retry_after":
        allowed, wanted = value.isprintable(), "one line of text"
    elif name == "bandwidth_bytes_per_second":
        allowed, wanted = value is None or value > 0, "greater than 0"
    elif isinstance(value, int | float):
        allowed, wanted = value >= 0, "at least 0"
    else:
        return None
    return None if allowed else wanted


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "int": (int,),
    "int | None": (int, type(None)),
    "bool": (bool,),
}
