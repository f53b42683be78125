"""How the programs of this package log: one line a record on standard error, the fields after the
sentence.

Only `main.py` calls this; modules take `logging.getLogger(__name__)`.
"""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["configure_logging"]

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class _FieldFormatter(logging.Formatter):
    """`time level pid sentence name=value ...`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = "".join(
            f" {name}={value!r}" if isinstance(value, str) else f" {name}={value}"
            for name, value in vars(record).items()
            if name not in _STANDARD
        )
        return super().formatMessage(record) + fields


def configure_logging(*, verbose: bool) -> None:
    """Send records to standard error; only ours are shown below a warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(_FieldFormatter("%(asctime)s %(levelname)s %(process)d %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    level = logging.DEBUG if verbose else logging.INFO
    for package in ("trainmount_fuse", "trainmount_files"):
        logging.getLogger(package).setLevel(level)
