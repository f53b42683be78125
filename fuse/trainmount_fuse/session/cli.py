"""`remount` and `unmount`, as a person calls them, and the two programs behind `remount`. `main.py`
registers them."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainmount_files.wording import printable
from trainmount_fuse.options import (
    add_change_options,
    add_log_options,
    changed_settings,
    log_arguments,
)
from trainmount_fuse.session.exit_codes import (
    EXIT_CONFIGURATION,
    EXIT_ENDED,
    EXIT_FAILED,
    EXIT_UNSENT,
)

if TYPE_CHECKING:
    from trainmount_fuse.session.registry import MountRecord

__all__ = ["add_session_commands", "kill_holder"]

REMOUNT_TIMEOUT_SECONDS: Final = 40.0
"""Above what the holder gives each step."""


def add_session_commands(commands: Any) -> None:
    """`commands` is what `add_subparsers` returned."""
    remount = commands.add_parser(
        "remount",
        help="go on with a mount in the installed version, with new credentials or options",
    )
    remount.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path)
    add_change_options(remount)
    add_log_options(remount)
    remount.set_defaults(run=_told_in_one_line(_remount))
    unmount = commands.add_parser("unmount", help="upload what is unsent, and end a mount")
    unmount.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path)
    unmount.add_argument(
        "--force",
        action="store_true",
        help="also where programs use it or nothing answers; they get errors",
    )
    add_log_options(unmount)
    unmount.set_defaults(run=_told_in_one_line(_unmount))
    candidate = commands.add_parser("candidate")
    candidate.add_argument("--control-fd", type=int, required=True)
    candidate.set_defaults(run=_candidate)
    holder = commands.add_parser("holder")
    holder.add_argument("mountpoint")
    holder.add_argument("--estate-fd", type=int, required=True)
    holder.set_defaults(run=_holder)


def _told_in_one_line(command: Any) -> Any:
    def run(options: argparse.Namespace) -> int:
        from trainmount_fuse.session.commands import CommandError
        from trainmount_fuse.session.mounting import MountError
        from trainmount_fuse.settings import SettingsError

        try:
            code: int = command(options)
        except SettingsError as error:
            print(f"trainmount: {printable(str(error))}", file=sys.stderr)
            return EXIT_CONFIGURATION
        except (CommandError, MountError) as error:
            print(f"trainmount: {printable(str(error))}", file=sys.stderr)
            return EXIT_FAILED
        return code

    return run


def _remount(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.commands import CommandError, ask_holder

    record = _record_at(options.mountpoint)
    if record is None or record.uid != os.getuid():
        # Credentials go to nobody else's process.
        raise CommandError(f"no mount of yours is at {options.mountpoint}; use `trainmount mount`")
    status = ask_holder(record, {"want": "status"})
    settings = changed_settings(options, status["settings"])
    how_to_log = log_arguments(options) or status["log_arguments"]
    request = {
        "want": "remount",
        "command": [sys.executable, "-m", "trainmount_fuse", *how_to_log],
        "environment": dict(os.environ),
        "settings": json.loads(settings.to_json()),
    }
    try:
        result = ask_holder(record, request, REMOUNT_TIMEOUT_SECONDS)
    except CommandError as error:
        raise CommandError(f"not remounted, all is as before: {error}") from error
    if not result["is_whole"]:
        print(
            "trainmount: remounted; only the process that keeps the mount could not be renewed, "
            "its log tells why",
            file=sys.stderr,
        )
    return EXIT_ENDED


def _unmount(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.commands import CommandError, ask_holder

    record = _record_at(options.mountpoint)
    if record is None:
        return _unmount_unkept(options.mountpoint, is_forced=options.force)
    try:
        ask_holder(record, {"want": "status"})
    except CommandError as error:
        if not options.force:
            raise CommandError(f"{error}; --force ends it") from error
        kill_holder(record)
        return _unmount_unkept(options.mountpoint, is_forced=True)
    result = ask_holder(record, {"want": "unmount", "is_forced": options.force}, None)
    unsent = result["unsent"]
    if unsent:
        print(
            f"trainmount: unmounted, but not uploaded and kept in {record.state_dir}: "
            f"{', '.join(unsent)}; mount again to send them",
            file=sys.stderr,
        )
        return EXIT_UNSENT
    return int(result["exit_code"])


def _record_at(mountpoint: Path) -> MountRecord | None:
    """The living mount whose name this is; one that is only above it is not meant.

    Raises CommandError.
    """
    from trainmount_fuse.session.commands import CommandError
    from trainmount_fuse.session.mounting import find_mount, normalized
    from trainmount_fuse.session.registry import find_record

    record = find_record(mountpoint)
    if record is None or find_mount(mountpoint) or record.mountpoint == normalized(mountpoint):
        return record
    raise CommandError(f"{mountpoint} is inside the mount at {record.mountpoint}: name that")


def kill_holder(record: MountRecord) -> None:
    """Raises CommandError where the process belongs to another user than the mount: a record is
    only what that user says."""
    from trainmount_fuse.session.commands import CommandError

    try:
        process = os.pidfd_open(record.holder_pid)
    except ProcessLookupError:
        return
    try:
        if Path(f"/proc/{record.holder_pid}").stat().st_uid != record.uid:
            raise CommandError(
                f"process {record.holder_pid} does not belong to who mounted "
                f"{record.mountpoint}, and is left alone"
            )
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    finally:
        os.close(process)


def _unmount_unkept(mountpoint: Path, *, is_forced: bool) -> int:
    """A mount whose holder is gone or belongs to somebody else."""
    from trainmount_fuse.session.dead_mounts import remove_dead_mount
    from trainmount_fuse.session.mounting import (
        FILESYSTEM_TYPE,
        FuseConnection,
        MountError,
        abort,
        find_mount,
        unmount,
    )

    mount = find_mount(mountpoint)
    if mount is None or mount.filesystem_type != FILESYSTEM_TYPE:
        raise MountError(f"nothing of trainmount is mounted at {mountpoint}")
    if os.getuid() and f"user_id={os.getuid()}" not in mount.options.split(","):
        raise MountError(f"{mountpoint} was mounted by another user: that one and root can end it")
    if remove_dead_mount(mountpoint):
        return EXIT_ENDED
    if is_forced:
        abort(
            FuseConnection(
                fd=-1, init_request=b"", device_minor=mount.device_minor, mountpoint=mount.path
            )
        )
    unmount(mountpoint, lazy=is_forced)
    return EXIT_ENDED


def _candidate(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.candidate import run_candidate

    return run_candidate(options.control_fd)


def _holder(options: argparse.Namespace) -> int:
    from trainmount_fuse.session.holder import resume
    from trainmount_fuse.session.succession import Estate
    from trainmount_fuse.session.supervisor import SupervisorOptions

    return resume(Estate.inherited(options.estate_fd), SupervisorOptions(), log_arguments(options))
