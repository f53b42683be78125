"""What commands print: text for people, JSON envelopes for programs. One envelope has
`{"v": 1, "ts": …, "data": …}` or `"error"` in place of `data`.
"""

from __future__ import annotations

import json
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from trainmount_cli.errors import CliError

__all__ = ["Output", "print_data", "print_error", "print_line", "select", "timestamp"]


class Output(StrEnum):
    """The values of `-o`."""

    TEXT = "text"
    JSON = "json"


def timestamp() -> str:
    """Now, as RFC 3339 in UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


_selected: ContextVar[Output] = ContextVar("selected", default=Output.TEXT)


def select(output: Output) -> None:
    """Remember what the user asked for, for an error that comes later."""
    _selected.set(output)


def print_data(data: Any) -> None:
    """One envelope on standard output."""
    print_line({"v": 1, "ts": timestamp(), "data": data})


def print_line(document: Any) -> None:
    """One line of JSON on standard output, at once: somebody may be reading along."""
    print(json.dumps(document), flush=True)


def print_error(error: CliError) -> None:
    """A line on standard error, or an envelope on standard output if JSON was selected."""
    if _selected.get() is Output.JSON:
        details = {
            "code": error.code,
            "kind": error.kind,
            "message": error.message,
            "retryable": error.is_retryable,
        }
        print_line({"v": 1, "ts": timestamp(), "error": details})
    else:
        print(f"trainmount: {error.message}", file=sys.stderr)
