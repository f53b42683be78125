"""How the programs of this package log: one line a record on standard error, for people or for
programs.

Only `main.py` calls this; modules take `logging.getLogger(__name__)`, and say a constant sentence
with fields.
"""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, Literal

__all__ = ["LogFormat", "configure_logging"]

LogFormat = Literal["text", "json"]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


class _TextFormatter(logging.Formatter):
    """`time level pid sentence name=value ...`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = "".join(
            f" {name}={value!r}" if isinstance(value, str) else f" {name}={value}"
            for name, value in _fields(record).items()
        )
        return super().formatMessage(record) + fields


class _JsonFormatter(logging.Formatter):
    """One object a line: `time`, `level`, `pid`, `logger`, `message`, the fields, and `traceback`
    where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        document = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def configure_logging(*, verbose: bool, log_format: LogFormat = "text") -> None:
    """Send records to standard error; only ours are shown below a warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(
        _JsonFormatter()
        if log_format == "json"
        else _TextFormatter("%(asctime)s %(levelname)s %(process)d %(message)s")
    )
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    # It names the address with its query, and that of a signed URL is a password.
    logging.getLogger("urllib3").setLevel(logging.CRITICAL)
    level = logging.DEBUG if verbose else logging.INFO
    for package in ("trainmount_fuse", "trainmount_files"):
        logging.getLogger(package).setLevel(level)
