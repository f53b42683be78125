"""`python -m trainmount_files.server DIR`: serve a directory until SIGTERM or Ctrl-C. Also what
`trainmount serve` runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from trainmount_files.server.embedded import StartError, serving
from trainmount_files.server.endpoints import DEFAULT_ENDPOINTS, ENDPOINTS
from trainmount_files.server.faults import FaultError
from trainmount_files.server.grants import GrantError
from trainmount_files.server.settings import ServerSettings
from trainmount_files.wording import OneLineParser

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
    is_open = not token and options.grants is None
    try:
        settings = _settings(options, secrets.token_urlsafe(24) if is_open else token)
    except ValueError as error:
        print(f"trainmount serve: {error}", file=sys.stderr)
        return _EXIT_USAGE
    if is_open:
        print(
            f"no token was given, made one: export DATABRICKS_TOKEN={settings.token}",
            file=sys.stderr,
        )
    return run_server(settings, options.ready_file)


def _settings(options: argparse.Namespace, token: str) -> ServerSettings:
    return ServerSettings(
        directory=options.directory,
        token=token,
        grants=options.grants,
        host=options.host,
        port=options.port,
        volumes=tuple(options.volume),
        tls_certificate=options.tls_cert,
        tls_key=options.tls_key,
        endpoints=tuple(options.endpoint or DEFAULT_ENDPOINTS),
        resumable=options.resumable,
        implicit_directories=options.implicit_directories,
        faults=options.faults,
        admin=options.admin,
        fsync=not options.no_fsync,
        min_part_bytes=options.min_part_bytes,
        max_put_bytes=options.max_put_bytes,
        max_url_lifetime_seconds=options.max_url_lifetime_seconds,
        upload_lifetime_seconds=options.upload_lifetime_seconds,
    )


def _allow_descriptors() -> None:
    """A download holds four descriptors, so that the usual 1,024 are few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run_server(settings: ServerSettings, ready_file: Path | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Prints where, and writes the URL to
    `ready_file`.
    """
    _allow_descriptors()
    try:
        asyncio.run(_serve(settings, ready_file))
    except (StartError, FaultError, GrantError) as error:
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
    parser = OneLineParser(
        prog="trainmount serve",
        description="Serve a directory as Unity Catalog volumes over the Databricks Files API.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="holds CATALOG/SCHEMA/VOLUME")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (%(default)s)")
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
    parser.add_argument(
        "--no-fsync", action="store_true", help="faster; a power cut loses the newest files"
    )
    _add_access(parser.add_argument_group("who may"))
    _add_store(parser.add_argument_group("what kind of store"))
    _add_trouble(parser.add_argument_group("for tests of clients"))
    return parser


def _add_access(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--token", help=f"token with all rights; {TOKEN_VARIABLE} keeps it out of `ps`"
    )
    group.add_argument(
        "--grants",
        type=Path,
        metavar="FILE",
        help="JSON list: user, token or token_file, volumes, privileges",
    )
    group.add_argument("--tls-cert", type=Path, metavar="FILE", help="PEM; with --tls-key: HTTPS")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM; with --tls-cert: HTTPS")


def _add_store(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--resumable",
        action="store_true",
        help="large files go up by resumable uploads, as on Google Cloud; for SDKs up to 0.158",
    )
    group.add_argument(
        "--implicit-directories",
        action="store_true",
        help="a directory that came with a file goes with the last one in it",
    )
    group.add_argument(
        "--endpoint",
        action="append",
        metavar="NAME",
        help=f"for clients that ask which to use, best first: {', '.join(ENDPOINTS)}; repeatable",
    )
    group.add_argument(
        "--min-part-bytes",
        type=int,
        default=ServerSettings.min_part_bytes,
        metavar="N",
        help="smallest part of an upload but its last (%(default)s)",
    )
    group.add_argument(
        "--max-put-bytes",
        type=int,
        default=ServerSettings.max_put_bytes,
        metavar="N",
        help="largest body of one request (%(default)s)",
    )
    group.add_argument(
        "--max-url-lifetime-seconds",
        type=float,
        default=ServerSettings.max_url_lifetime_seconds,
        metavar="N",
        help="signed URLs expire then at the latest (%(default)s)",
    )
    group.add_argument(
        "--upload-lifetime-seconds",
        type=float,
        default=ServerSettings.upload_lifetime_seconds,
        metavar="N",
        help="an upload that rests for so long is dropped (%(default)s)",
    )


def _add_trouble(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--faults", type=Path, metavar="FILE", help="JSON file of faults to inject")
    group.add_argument(
        "--admin", action="store_true", help="serve /admin/faults and /admin/statistics"
    )


if __name__ == "__main__":
    sys.exit(main())
