"""`status`, `warm`, `evict`, `flush` and `refresh` of `python -m trainmount_fuse`, for a pod that
has nothing but the mount. `trainmount` has the same with a bar and envelopes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from trainmount_files.wording import printable
from trainmount_fuse.session.exit_codes import EXIT_ENDED, EXIT_FAILED

__all__ = ["add_control_commands"]

_PROGRESS_SECONDS: Final = 10.0

_INTERRUPTED: Final = 130


def add_control_commands(commands: Any) -> None:
    """`commands` is what `add_subparsers` returned."""
    status = commands.add_parser("status", help="what is mounted, and how it is")
    status.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path, nargs="?")
    form = status.add_mutually_exclusive_group()
    form.add_argument("--output", "-o", choices=("text", "json"), default="text")
    form.add_argument("--metrics", action="store_true", help="as Prometheus reads it")
    _register(status, _status)
    for name, text in (
        ("warm", "bring files into the cache before they are read"),
        ("evict", "free what the cache keeps of files"),
    ):
        parser = commands.add_parser(name, help=text)
        parser.add_argument("patterns", metavar="GLOB", nargs="*")
        parser.add_argument("--list", metavar="FILE", help="one path a line; - is standard input")
        parser.add_argument("--mount", metavar="MOUNTPOINT", type=Path)
        parser.set_defaults(request=name)
        _register(parser, _change_cache)
    flush = commands.add_parser("flush", help="have everything written uploaded")
    flush.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path, nargs="?")
    _register(flush, _flush)
    refresh = commands.add_parser("refresh", help="ask the store again for names and sizes")
    refresh.add_argument("paths", metavar="PATH", nargs="*")
    refresh.add_argument("--mount", metavar="MOUNTPOINT", type=Path)
    _register(refresh, _refresh)


def _register(
    parser: argparse.ArgumentParser, command: Callable[[argparse.Namespace], int]
) -> None:
    def run(options: argparse.Namespace) -> int:
        from trainmount_fuse.control.protocol import ControlError

        try:
            return command(options)
        except ControlError as error:
            _complain(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            return _INTERRUPTED

    parser.set_defaults(run=run)


def _status(options: argparse.Namespace) -> int:
    from trainmount_fuse.control.actions import metrics, statuses
    from trainmount_fuse.control.text import status_lines

    if options.metrics:
        print(metrics(options.mountpoint), end="")
        return EXIT_ENDED
    found = statuses(options.mountpoint)
    if options.output == "json":
        print(json.dumps({"mounts": found}))
    elif not found:
        print("nothing is mounted")
    for status in found if options.output == "text" else ():
        _print_lines(status_lines(status))
    return EXIT_FAILED if any("error" in status for status in found) else EXIT_ENDED


def _change_cache(options: argparse.Namespace) -> int:
    from trainmount_fuse.control.actions import change_cache, read_list
    from trainmount_fuse.control.text import evict_line, warm_lines

    patterns = [*options.patterns, *(read_list(options.list) if options.list else ())]
    told_at = time.monotonic()

    def progress(counts: Mapping[str, int]) -> None:
        from trainmount_fuse.control.text import progress_line

        nonlocal told_at
        if time.monotonic() - told_at >= _PROGRESS_SECONDS:
            told_at = time.monotonic()
            _complain(progress_line(options.request, counts))

    failures: list[dict[str, str]] = []
    for one in change_cache(options.request, patterns, options.mount, progress):
        is_warm = options.request == "warm"
        _print_lines(warm_lines(one.answer) if is_warm else [evict_line(one.answer)])
        failures += one.failures()
    return _fail_for(failures)


def _flush(options: argparse.Namespace) -> int:
    from trainmount_fuse.control.actions import flush
    from trainmount_fuse.control.text import flush_line

    done = flush(options.mountpoint)
    print(flush_line(done.answer))
    return _fail_for(done.failures())


def _refresh(options: argparse.Namespace) -> int:
    from trainmount_fuse.control.actions import refresh

    refresh(options.paths, options.mount)
    return EXIT_ENDED


def _fail_for(failures: Sequence[Mapping[str, str]]) -> int:
    from trainmount_fuse.control.text import failure_line

    for failure in failures:
        _complain(failure_line(failure))
    return EXIT_FAILED if failures else EXIT_ENDED


def _print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line)


def _complain(line: str) -> None:
    print(f"trainmount: {printable(line)}", file=sys.stderr, flush=True)
