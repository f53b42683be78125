"""`python -m trainmount_files.server DIR`: serve a directory until SIGTERM or Ctrl-C. Also what
`trainmount serve` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainmount_files.server.embedded import StartError, serving
from trainmount_files.server.faults import FaultError
from trainmount_files.server.settings import ServerSettings

__all__ = ["main", "run_server"]

TOKEN_VARIABLE: Final = "TRAINMOUNT_SERVE_TOKEN"  # noqa: S105  the variable's name

_EXIT_USAGE: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse and serve; returns the exit status."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    token = options.token or os.environ.get(TOKEN_VARIABLE, "")
    try:
        settings = ServerSettings(
            directory=options.directory,
            token=token or secrets.token_urlsafe(24),
            host=options.host,
            port=options.port,
            volumes=tuple(options.volume),
            faults=options.faults,
            admin=options.admin,
            fsync=not options.no_fsync,
            min_part_bytes=options.min_part_bytes,
        )
    except ValueError as error:
        print(f"trainmount serve: {error}", file=sys.stderr)
        return _EXIT_USAGE
    if not token:
        print(
            f"no token was given, made one: export DATABRICKS_TOKEN={settings.token}",
            file=sys.stderr,
        )
    return run_server(settings, options.ready_file)


def run_server(settings: ServerSettings, ready_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Prints where, and writes the URL to
    `ready_file`.
    """
    try:
        asyncio.run(_serve(settings, ready_file))
    except (StartError, FaultError) as error:
        print(f"trainmount serve: {error}", file=sys.stderr)
        return _EXIT_USAGE
    return 0


async def _serve(settings: ServerSettings, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(settings) as running:
        if ready_file is not None:
            _write_ready_file(ready_file, running.url)
        print(f"serving {settings.directory} at {running.url}", flush=True)
        await stop.wait()


def _write_ready_file(path: Path, url: str) -> None:
    """In one step, so that whoever waits for the file never reads half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(url, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StartError(f"ready file {path} cannot be written: {error.strerror}") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainmount serve",
        description="Serve a directory as Unity Catalog volumes over the Databricks Files API.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="holds CATALOG/SCHEMA/VOLUME")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (%(default)s)")
    parser.add_argument("--token", help=f"bearer token; {TOKEN_VARIABLE} keeps it out of `ps`")
    parser.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="C.S.V",
        help="volume to create; repeatable",
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="gets the URL once requests are served"
    )
    parser.add_argument("--faults", type=Path, metavar="FILE", help="JSON file of faults to inject")
    parser.add_argument(
        "--admin", action="store_true", help="serve /admin/faults and /admin/statistics"
    )
    parser.add_argument(
        "--no-fsync", action="store_true", help="faster; a power cut loses the newest files"
    )
    parser.add_argument(
        "--min-part-bytes",
        type=int,
        default=ServerSettings.min_part_bytes,
        metavar="N",
        help="smallest part of an upload but its last (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
