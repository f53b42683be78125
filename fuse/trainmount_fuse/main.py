"""The mount's command line: `mount` and `serve` for people and pods, `daemon` and `self-test` for
the two themselves.

Bad arguments, a missing volume or a mountpoint that cannot be used give one line and exit code 2,
and leave nothing behind. Modules that drag in libfuse or an HTTP client are imported by the
command that needs them.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from trainmount_fuse.logs import configure_logging
from trainmount_fuse.session.exit_codes import EXIT_CONFIGURATION, EXIT_ENDED, EXIT_FAILED

__all__ = ["main"]

logger = logging.getLogger(__name__)

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}

MOUNTED: Final = b"mounted"
"""What the process in the background tells the one in front."""


def main(arguments: Sequence[str] | None = None, *, program: str = "trainmount-fuse") -> int:
    """Run one command; its exit code. `program` is what usage lines call it."""
    options = _parser(program).parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else list(arguments)
    configure_logging(verbose=options.verbose)
    result: int = options.run(options)
    return result


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=program, description="Mount a volume as a directory.")
    parser.add_argument("--verbose", "-v", action="store_true", help="log more")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_mount(commands.add_parser("mount", help="mount a volume at a directory"))
    serve = commands.add_parser("serve", help="serve a mount that another process made")
    serve.add_argument("--keeper", type=Path, required=True, metavar="SOCKET")
    serve.add_argument("--reclaim", type=Path, required=True, metavar="SOCKET")
    serve.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS")
    serve.add_argument("--stop-timeout", type=float, default=120.0, metavar="SECONDS")
    serve.set_defaults(run=_serve)
    daemon = commands.add_parser("daemon")
    daemon.add_argument("--control-fd", type=int, required=True)
    daemon.set_defaults(run=_daemon)
    commands.add_parser(
        "self-test", help="tell whether mounts survive their daemon here"
    ).set_defaults(run=_self_test)
    return parser


def _add_mount(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        help="/Volumes[/CATALOG[/SCHEMA[/VOLUME[/...]]]], s3://BUCKET[/...], gs://..., az://... or "
        "file:///DIRECTORY",
    )
    add("mountpoint", metavar="MOUNTPOINT", type=Path)
    add("--profile", default="", metavar="NAME", help="section of ~/.databrickscfg")
    add("--cache-dir", type=Path, metavar="DIR", help="blocks that were read; may be deleted")
    add("--state-dir", type=Path, metavar="DIR", help="written files until they are uploaded")
    add("--cache-size", type=_size, metavar="BYTES", help="for example 20Gi")
    add("--read-only", action="store_true")
    add("--allow-other", action="store_true", help="let other users look in")
    add("--uid", type=int, help="owner that files show (you)")
    add("--gid", type=int, help="group that files show (yours)")
    add("--file-mode", type=_mode, metavar="OCTAL", help="permissions of files (644)")
    add("--directory-mode", type=_mode, metavar="OCTAL", help="permissions of directories (755)")
    add("--foreground", action="store_true", help="stay until the mount ends")
    add("--ready-file", type=Path, metavar="FILE", help="gets the process ids once it is mounted")
    add("--read-ahead-kib", type=int, default=16 * 1024, metavar="KIB")
    add("--stop-timeout", type=float, default=120.0, metavar="SECONDS")
    add("--notify-fd", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=_mount)


def _mount(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.mounting import MountError
    from trainmount_fuse.settings import SettingsError

    try:
        return _mount_in_foreground(options) if options.foreground else _mount_behind(options)
    except (MountError, SettingsError) as error:
        print(f"trainmount: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION


def _mount_in_foreground(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.holder import HolderOptions, hold
    from trainmount_fuse.session.supervisor import SupervisorOptions
    from trainmount_fuse.settings import MountSettings

    name = _name(options)
    given = {
        "cache_dir": options.cache_dir or _base("XDG_CACHE_HOME", ".cache") / "cache" / name,
        "state_dir": options.state_dir or _base("XDG_STATE_HOME", ".local/state") / "state" / name,
        "profile": options.profile,
        "cache_size_bytes": options.cache_size,
        "read_only": options.read_only,
        "allow_other": options.allow_other,
        "uid": options.uid,
        "gid": options.gid,
        "file_mode": options.file_mode,
        "directory_mode": options.directory_mode,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    for name in ("cache_dir", "state_dir"):
        chosen[name] = chosen[name].absolute()
    return hold(
        HolderOptions(
            mountpoint=options.mountpoint,
            settings=MountSettings(source=options.source, **chosen),
            ready_file=options.ready_file,
            read_ahead_kib=options.read_ahead_kib,
            supervisor=SupervisorOptions(
                stop_timeout_seconds=options.stop_timeout, **_daemon_options(options)
            ),
            on_mounted=lambda: _notify(options.notify_fd),
        )
    )


def _mount_behind(options: argparse.Namespace) -> int:
    """Start the holder in a session of its own, and end when a daemon answers."""
    log = _base("XDG_STATE_HOME", ".local/state") / "log" / f"{_name(options)}.log"
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


def _daemon_options(options: argparse.Namespace) -> dict[str, Any]:
    """A verbose mount has verbose daemons."""
    if not options.verbose:
        return {}
    return {"daemon_command": (sys.executable, "-m", "trainmount_fuse", "--verbose", "daemon")}


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
        print(f"trainmount: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    supervisor = Supervisor(
        handover,
        SupervisorOptions(
            keeper_address=options.keeper,
            reclaim_address=options.reclaim,
            stop_timeout_seconds=options.stop_timeout,
            **_daemon_options(options),
        ),
        RestartBudget(),
    )
    ending = supervisor.run()
    logger.info("the service of the mount ended", extra={"reason": ending.value})
    return ending.exit_code


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_ENDED)


def _daemon(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.daemon import run_daemon

    return run_daemon(options.control_fd)


def _self_test(_options: argparse.Namespace) -> int:
    from trainmount_fuse.session.self_test import takeover_fault

    fault = takeover_fault()
    print("takeover" if fault is None else f"remount: {fault}")
    return EXIT_ENDED if fault is None else EXIT_FAILED


def _name(options: argparse.Namespace) -> str:
    """Names this mount's own files: the same for the same source at the same place."""
    place = f"{options.source}\0{options.mountpoint.absolute()}"
    return hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:16]


def _base(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "trainmount"


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]i?)?B?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 500M or 20Gi")
    return int(match[1]) * _UNITS[match[2] or ""]


def _mode(text: str) -> int:
    try:
        return int(text, 8)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mode; write 644") from None
