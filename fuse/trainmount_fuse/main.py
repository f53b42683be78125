"""The mount's command line: `mount` and `serve` for people and pods; session/cli.py has what ends
and renews a mount, control/command_line.py what looks at one and asks it for something.

Bad arguments, a missing volume or a mountpoint that cannot be used give one line and exit code 2,
and leave nothing behind. Modules that drag in libfuse or an HTTP client are imported by the
command that needs them.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from trainmount_files.wording import OneLineParser, printable
from trainmount_fuse.control.command_line import add_control_commands
from trainmount_fuse.logs import configure_logging
from trainmount_fuse.options import (
    add_log_options,
    add_mount_options,
    kibibytes,
    log_arguments,
    mount_name,
    mount_settings,
    seconds,
    state_home,
)
from trainmount_fuse.session.cli import add_session_commands
from trainmount_fuse.session.exit_codes import EXIT_CONFIGURATION, EXIT_ENDED, EXIT_FAILED
from trainmount_fuse.session.mounting import READ_AHEAD_KIB, MountError

__all__ = ["main"]

logger = logging.getLogger(__name__)

_LIBRARIES: Final = frozenset({"pyfuse3", "_pyfuse3", "trio"})
"""What the extra `fuse` brings."""

EXIT_INTERRUPTED: Final = 130
"""As a shell tells it of a program that Ctrl-C ended."""

MOUNTED: Final = b"mounted"
"""What the process in the background tells the one in front."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = _parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    configure_logging(verbose=options.verbose, log_format=options.log_format)
    result: int = options.run(options)
    return result


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="trainmount", description="Mount a volume as a directory.")
    add_log_options(parser, has_defaults=True)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_mount(commands.add_parser("mount", help="mount a volume at a directory"))
    serve = commands.add_parser("serve", help="serve a mount that another process made")
    add_log_options(serve)
    serve.add_argument("--keeper", type=Path, required=True, metavar="SOCKET")
    serve.add_argument("--reclaim", type=Path, required=True, metavar="SOCKET")
    serve.add_argument("--timeout", type=seconds, default=300.0, metavar="SECONDS")
    serve.add_argument("--stop-timeout", type=seconds, default=120.0, metavar="SECONDS")
    serve.set_defaults(run=_serve)
    add_session_commands(commands)
    add_control_commands(commands)
    commands.add_parser(
        "self-test", help="tell whether mounts survive their daemon here"
    ).set_defaults(run=_self_test)
    return parser


def _add_mount(parser: argparse.ArgumentParser) -> None:
    add_mount_options(parser)
    add_log_options(parser)
    add = parser.add_argument
    add("--foreground", action="store_true", help="stay until the mount ends")
    add("--ready-file", type=Path, metavar="FILE", help="gets the process ids once it is mounted")
    add("--read-ahead-kib", type=kibibytes, default=READ_AHEAD_KIB, metavar="KIB")
    add("--stop-timeout", type=seconds, default=120.0, metavar="SECONDS")
    add("--notify-fd", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=_mount)


def _mount(options: argparse.Namespace) -> int:
    from trainmount_fuse.settings import SettingsError

    try:
        return _mount_in_foreground(options) if options.foreground else _mount_behind(options)
    except (MountError, SettingsError) as error:
        print(f"trainmount: {printable(str(error))}", file=sys.stderr)
        return EXIT_CONFIGURATION
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in _LIBRARIES:
            raise
        print(
            f"trainmount: a mount needs {error.name}: pip install 'trainmount[fuse]', after "
            f"apt-get install libfuse3-dev or its like ({error})",
            file=sys.stderr,
        )
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        # Before anything was mounted; afterwards it is an order to end.
        return EXIT_INTERRUPTED


def _mount_in_foreground(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.holder import HolderOptions, hold
    from trainmount_fuse.session.supervisor import SupervisorOptions

    return hold(
        HolderOptions(
            mountpoint=options.mountpoint,
            settings=mount_settings(options),
            ready_file=options.ready_file,
            read_ahead_kib=options.read_ahead_kib,
            log_arguments=tuple(log_arguments(options)),
            supervisor=SupervisorOptions(stop_timeout_seconds=options.stop_timeout),
            on_mounted=lambda: _notify(options.notify_fd),
        )
    )


def _mount_behind(options: argparse.Namespace) -> int:
    """Start the holder in a session of its own, and end when a daemon answers."""
    log = state_home() / "log" / f"{mount_name(options)}.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "trainmount_fuse", *options.arguments]
    reader, writer = os.pipe()
    with log.open("ab") as output, open(reader, "rb") as answers:  # noqa: PTH123 - a descriptor
        start = output.tell()
        child = subprocess.Popen(
            [*command, "--foreground", "--notify-fd", str(writer)],
            pass_fds=[writer],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        os.close(writer)
        if answers.read() == MOUNTED:
            # It goes on without us; there is nothing to wait for.
            child.returncode = EXIT_ENDED
            return EXIT_ENDED
    code = child.wait()
    with log.open("rb") as output:
        output.seek(start)
        lines = output.read().decode(errors="replace").splitlines()
    told = [line for line in lines if line.startswith("trainmount: ")]
    print(told[-1] if told else f"trainmount: not mounted; see {log}", file=sys.stderr)
    return code or EXIT_FAILED


def _notify(fd: int | None) -> None:
    if fd is not None:
        os.write(fd, MOUNTED)
        os.close(fd)


def _serve(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.handover import HandoverError, request_handover
    from trainmount_fuse.session.restarts import RestartBudget
    from trainmount_fuse.session.supervisor import Supervisor, SupervisorOptions

    # As the first process of a container it would not be ended by the signal otherwise.
    signal.signal(signal.SIGTERM, _leave)
    try:
        handover = request_handover(options.keeper, options.timeout)
    except HandoverError as error:
        print(f"trainmount: {printable(str(error))}", file=sys.stderr)
        return EXIT_CONFIGURATION
    supervisor = Supervisor(
        handover,
        SupervisorOptions(
            keeper_address=options.keeper,
            reclaim_address=options.reclaim,
            stop_timeout_seconds=options.stop_timeout,
        ),
        RestartBudget(),
    )
    ending = supervisor.run()
    logger.info("the service of the mount ended", extra={"reason": ending.value})
    return ending.exit_code


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_ENDED)


def _self_test(_options: argparse.Namespace) -> int:
    from trainmount_fuse.session.self_test import takeover_fault

    fault = takeover_fault()
    print("takeover" if fault is None else f"remount: {fault}")
    return EXIT_ENDED if fault is None else EXIT_FAILED
