"""Reads along with a run: every line of every node and attempt once, and what happens in between.

Called by `run --watch` and `logs`. Only reads the folder, so any number may follow, and the run
does not notice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_cli.local.store import RunFolder
from trainmount_operator.status import Reason

__all__ = ["EventNote", "LogLine", "follow", "read_logs"]

_POLL_SECONDS: Final = 0.2
_READ_BYTES: Final = 1 << 20
_BEFORE_LINES: Final = frozenset({Reason.STARTING, Reason.RUNNING})


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line a node printed."""

    attempt: int
    node: int
    text: str
    """Without its end of line."""


@dataclass(frozen=True, slots=True)
class EventNote:
    """Something that happened to the run."""

    reason: str
    message: str
    attempt: int | None


class _LogFile:
    """Reads one growing file line by line."""

    def __init__(self, attempt: int, node: int, path: Path) -> None:
        self._attempt = attempt
        self._node = node
        self._path = path
        self._offset = 0
        self._rest = b""

    def read(self, *, is_over: bool) -> Iterator[LogLine]:
        """The whole lines that are new; when the file is over also a last one without an end."""
        while True:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(_READ_BYTES)
            self._offset += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                yield self._line(line)
            if len(data) < _READ_BYTES:
                break
        if is_over and self._rest:
            rest, self._rest = self._rest, b""
            yield self._line(rest)

    def _line(self, data: bytes) -> LogLine:
        text = data.decode("utf-8", errors="replace").rstrip("\r")
        return LogLine(self._attempt, self._node, text)


class _Reader:
    """All that is new in a run's folder since the last look."""

    def __init__(self, folder: RunFolder, *, skip_events: int, first_attempt: int) -> None:
        self._folder = folder
        self._files: dict[tuple[int, int], _LogFile] = {}
        self._num_events = skip_events
        self._first_attempt = first_attempt

    def read(self, *, is_over: bool) -> Iterator[LogLine | EventNote]:
        """In an order that makes sense: a start before the lines, an end after the last of them."""
        new = self._folder.read_events()[self._num_events :]
        self._num_events += len(new)
        notes = [EventNote(event["reason"], event["message"], event["attempt"]) for event in new]
        yield from (note for note in notes if note.reason in _BEFORE_LINES)
        last = self._folder.num_attempts()
        for attempt in range(self._first_attempt, last):
            for node, path in self._folder.node_logs(attempt).items():
                key = (attempt, node)
                file = self._files.setdefault(key, _LogFile(attempt, node, path))
                yield from file.read(is_over=is_over or attempt < last - 1)
        yield from (note for note in notes if note.reason not in _BEFORE_LINES)


def read_logs(folder: RunFolder, *, attempt: int) -> Iterator[LogLine]:
    """What the nodes of one attempt have printed so far, node by node."""
    for node, path in folder.node_logs(attempt).items():
        yield from _LogFile(attempt, node, path).read(is_over=True)


def follow(
    folder: RunFolder,
    *,
    skip_events: int = 0,
    first_attempt: int = 0,
    on_status: Callable[[dict[str, Any]], None] | None = None,
) -> Iterator[LogLine | EventNote]:
    """Everything from `first_attempt` on until no supervisor lives any more and all of it is told.

    `skip_events` is how many events not to tell; `on_status` sees the status each time it is read.
    """
    reader = _Reader(folder, skip_events=skip_events, first_attempt=first_attempt)
    while True:
        # Asked before the reading: what is written before an end is read after it.
        is_over = not folder.is_alive()
        if on_status is not None:
            on_status(folder.read_status())
        yield from reader.read(is_over=is_over)
        if is_over:
            return
        time.sleep(_POLL_SECONDS)
