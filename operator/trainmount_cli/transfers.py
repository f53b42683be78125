"""What `cp`, `ls`, `rm` and `mkdir` share: how progress looks, how Ctrl-C ends it, how a result is
told.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from trainmount_cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, CliError
from trainmount_cli.locations import Location, reason_of
from trainmount_cli.output import print_error
from trainmount_files import LocalError
from trainmount_files.trees import Failure, Report
from trainmount_files.wording import printable, size_text

__all__ = [
    "Part",
    "failures_of",
    "interruptible",
    "noticing_silence",
    "print_failures",
    "showing_progress",
]

_PLAIN_PERIOD_SECONDS: Final = 10.0
"""Where standard error is a file: one line in this time, for whoever reads the log."""

_TERMINAL_PERIOD_SECONDS: Final = 0.1

_SILENCE_SECONDS: Final = 10.0

_WRITING: Final = ("write", "make directory")


@dataclass(frozen=True, slots=True)
class Part:
    """One argument of a command, and what became of it."""

    location: Location
    report: Report

    local_target: str = ""
    """Where it goes, if that is on this machine: what is wrong there is told with its name."""


class _Interrupted(BaseException):
    """A signal came. Not an Exception, so that nothing on the way takes it for an error."""


@contextlib.contextmanager
def interruptible(what: str) -> Iterator[None]:
    """On SIGINT or SIGTERM leave the block, say so, and exit with 130."""
    signals = (signal.SIGINT, signal.SIGTERM)

    def leave(_number: int, _frame: FrameType | None) -> None:
        for number in signals:
            signal.signal(number, signal.SIG_IGN)  # the second and third Ctrl-C change nothing
        raise _Interrupted

    previous = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    except _Interrupted:
        with contextlib.suppress(OSError):
            print_error(
                CliError(f"{what} was interrupted", code="CANCELLED", exit_status=EXIT_INTERRUPTED)
            )
            sys.stderr.flush()
            sys.stdout.flush()
        if threading.active_count() > 1:
            # A thread that the network holds must not hold the terminal.
            os._exit(EXIT_INTERRUPTED)
        sys.exit(EXIT_INTERRUPTED)
    for number, handler in previous.items():
        signal.signal(number, handler)


@contextlib.contextmanager
def noticing_silence() -> Iterator[Callable[[], None]]:
    """Say so on standard error where the block takes long before it calls what it is given: the
    volume keeps trying for minutes, and nobody would know that it is down.
    """
    timer = threading.Timer(_SILENCE_SECONDS, _print_silence)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _print_silence() -> None:
    with contextlib.suppress(OSError):
        print(
            "trainmount: no answer yet; it is tried for up to two minutes, Ctrl-C ends it",
            file=sys.stderr,
            flush=True,
        )


@contextlib.contextmanager
def showing_progress(verb: str, reports: Sequence[Report]) -> Iterator[None]:
    """Show how far `reports` are while the block lasts: a bar on a terminal, else a line now and
    then.
    """
    over = threading.Event()
    show = _show_bar if sys.stderr.isatty() else _show_lines
    thread = threading.Thread(target=show, args=(verb, reports, over), name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)


def _show_lines(verb: str, reports: Sequence[Report], over: threading.Event) -> None:
    while not over.wait(_PLAIN_PERIOD_SECONDS):
        done, found, num_bytes = _sums(reports)
        line = f"trainmount: {verb} {done:,} of {found:,} files so far, {size_text(num_bytes)}"
        with contextlib.suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def _show_bar(verb: str, reports: Sequence[Report], over: threading.Event) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        # The colours of rich are one grey where a terminal has 16.
        BarColumn(complete_style="cyan", finished_style="green", style="bright_black"),
        TextColumn("{task.fields[files]}"),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(verb, total=None, files="", amount="")
        while not over.wait(_TERMINAL_PERIOD_SECONDS):
            done, found, num_bytes = _sums(reports)
            if found == 1 and (total := sum(report.num_bytes_found for report in reports)):
                state: dict[str, Any] = {"completed": num_bytes, "total": total}
                state["amount"] = f"{size_text(num_bytes)} of {size_text(total)}"
            else:
                state = {"completed": done, "total": found or None}
                state["files"] = f"{done:,}/{found:,} files"
                state["amount"] = size_text(num_bytes)
            bar.update(task, **state)
            bar.refresh()


def _sums(reports: Sequence[Report]) -> tuple[int, int, int]:
    return (
        sum(report.num_done for report in reports),
        sum(report.num_found for report in reports),
        sum(report.num_bytes for report in reports),
    )


def failures_of(parts: Sequence[Part]) -> list[dict[str, str]]:
    """Every path that failed, as programs read it."""
    return [
        {
            "path": part.location.shown(failure.path),
            "code": failure.code,
            "message": _message(part, failure),
        }
        for part in parts
        for failure in sorted(part.report.failures, key=lambda failure: failure.path)
    ]


def _message(part: Part, failure: Failure) -> str:
    reason = reason_of(failure.error, part.location)
    is_there = isinstance(failure.error, LocalError) or failure.error.operation in _WRITING
    if not (part.local_target and is_there):
        return reason
    target = f"{part.local_target}/{failure.path}" if failure.path else part.local_target
    return f"{target}: {reason}"


def print_failures(failures: Sequence[dict[str, str]]) -> int:
    """Name them on standard error; returns the exit status."""
    for failure in failures:
        line = f"trainmount: {printable(failure['path'])}: {failure['message']}"
        print(line, file=sys.stderr)
    return EXIT_FAILED if failures else 0
