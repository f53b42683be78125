"""Reading an untyped document field by field, with errors that name the field.

Called by `spec` and `workload` only. A `Fields` is one mapping of the document together with its
path; what nobody asked for is refused by `finish()`, so a typing error is never silently ignored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from trainmount_files.wording import printable

__all__ = ["Fields", "SpecError"]


class SpecError(ValueError):
    """A document that does not describe a job. `str()` is one line that starts with the field's
    path.
    """

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path = path
        self.problem = problem

    def __str__(self) -> str:
        return f"{printable(self.path)}: {self.problem}"


class Fields:
    """One mapping of the document. Every getter raises `SpecError` with the full path of what is
    wrong.
    """

    def __init__(self, value: object, path: str) -> None:
        if not isinstance(value, Mapping):
            raise SpecError(path, f"must be a mapping, got {_kind(value)}")
        for key in value:
            if not isinstance(key, str):
                raise SpecError(path, f"keys must be strings, got {key!r}")
        self.path = path
        self._value: Mapping[str, Any] = value
        self._known: set[str] = set()

    def at(self, name: str) -> str:
        """The path of one field here."""
        return f"{self.path}.{name}" if self.path else name

    def has(self, name: str) -> bool:
        """Whether the field is set; null counts as absent, as it does for Kubernetes."""
        self._known.add(name)
        return self._value.get(name) is not None

    def raw(self, name: str) -> Any:
        """The field as it stands, None if absent."""
        self._known.add(name)
        return self._value.get(name)

    def fields(self, name: str) -> Fields | None:
        """The mapping under a field, None if absent."""
        return Fields(self.raw(name), self.at(name)) if self.has(name) else None

    def required(self, name: str) -> None:
        """Refuse the document if the field is absent, naming what may be it, misspelt."""
        if self.has(name):
            return
        near = difflib.get_close_matches(name, [key for key in self._value if key != name], n=1)
        hint = f"; did you mean it by {near[0]!r}?" if near else ""
        raise SpecError(self.at(name), f"is required{hint}")

    def string(
        self,
        name: str,
        *,
        pattern: str | None = None,
        rule: str = "",
        maximum_length: int | None = None,
    ) -> str | None:
        """A string that is not blank, None if absent. `rule` is `pattern` in words."""
        if not self.has(name):
            return None
        value = self.raw(name)
        if not isinstance(value, str):
            raise SpecError(self.at(name), f"must be a string, got {_kind(value)}")
        if not value.strip():
            raise SpecError(self.at(name), "must not be empty")
        if maximum_length is not None and len(value) > maximum_length:
            raise SpecError(
                self.at(name),
                f"must not be longer than {maximum_length} characters, has {len(value)}",
            )
        if pattern is not None and not re.fullmatch(pattern, value):
            raise SpecError(self.at(name), f"{rule}, got {value!r}")
        return value

    def integer(self, name: str, *, minimum: int, maximum: int | None = None) -> int | None:
        """An integer within inclusive bounds, None if absent."""
        if not self.has(name):
            return None
        value = self.raw(name)
        if isinstance(value, bool) or not isinstance(value, int):
            raise SpecError(self.at(name), f"must be an integer, got {_kind(value)}")
        if value < minimum:
            raise SpecError(self.at(name), f"must be at least {minimum}, got {value}")
        if maximum is not None and value > maximum:
            raise SpecError(self.at(name), f"must be at most {maximum}, got {value}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """A boolean; `default` if absent."""
        if not self.has(name):
            return default
        value = self.raw(name)
        if not isinstance(value, bool):
            raise SpecError(self.at(name), f"must be true or false, got {_kind(value)}")
        return value

    def strings(self, name: str) -> dict[str, str]:
        """A map of strings, empty if absent."""
        inner = self.fields(name)
        if inner is None:
            return {}
        for key, value in inner._value.items():
            if not isinstance(value, str):
                raise SpecError(
                    inner.at(key), f"must be a string (quote the value), got {_kind(value)}"
                )
        return dict(inner._value)

    def items(self, name: str) -> list[Any]:
        """A list, empty if absent."""
        if not self.has(name):
            return []
        value = self.raw(name)
        if not isinstance(value, list):
            raise SpecError(self.at(name), f"must be a list, got {_kind(value)}")
        return value

    def finish(self) -> None:
        """Refuse every field that nobody asked for, with the nearest name that exists."""
        for name in self._value:
            if name in self._known:
                continue
            near = difflib.get_close_matches(name, self._known, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(sorted(self._known))}"
            )
            raise SpecError(self.at(name), f"unknown field; {hint}")


def _kind(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "a mapping"
