"""The options of `trainmount mount` and the settings they are. Called by `main`.

One table, so that a setting that is refused is named as the option that a person wrote.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.settings import MountSettings, SettingsError, parse_address

__all__ = [
    "add_change_options",
    "add_log_options",
    "add_mount_options",
    "changed_settings",
    "kibibytes",
    "log_arguments",
    "mount_name",
    "mount_settings",
    "seconds",
    "state_home",
]

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}

_METADATA: Final = ("entry_timeout_seconds", "attr_timeout_seconds", "directory_timeout_seconds")


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


def seconds(text: str) -> float:
    """The value of an option that is a time. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; write 1 or 0.5")
    return value


def kibibytes(text: str) -> int:
    """The value of an option that is a number of KiB. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit() and int(text) < 1 << 22):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of KiB below 4194304")
    return int(text)


def _id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < (1 << 32) - 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of a user or group")
    return int(text)


def _address(text: str) -> str:
    try:
        host, port = parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class _Option:
    flag: str
    settings: tuple[str, ...]
    """Fields of MountSettings that get its value."""

    convert: Callable[[str], Any] | None
    """None for a switch."""

    metavar: str | None
    help: str


_OPTIONS: Final = (
    _Option("--profile", ("profile",), str, "NAME", "section of ~/.databrickscfg"),
    _Option("--endpoint", ("endpoint",), str, "URL", "service that has the bucket"),
    _Option("--region", ("region",), str, "NAME", "region of the bucket"),
    _Option(
        "--chunk-above",
        ("chunk_above_bytes",),
        _size,
        "SIZE",
        "keep larger files in chunks, for storage that takes 5 GiB a file: 5Gi",
    ),
    _Option("--cache-dir", ("cache_dir",), Path, "DIR", "blocks that were read; mounts share it"),
    _Option("--state-dir", ("state_dir",), Path, "DIR", "written files until they are uploaded"),
    _Option("--cache-size", ("cache_size_bytes",), _size, "SIZE", "of the blocks on disk (10Gi)"),
    _Option(
        "--free-disk",
        ("free_disk_floor_bytes",),
        _size,
        "SIZE",
        "leave this much of the disk free (512Mi)",
    ),
    _Option(
        "--memory", ("memory_bytes",), _size, "SIZE", "for bytes on their way either way (256Mi)"
    ),
    _Option("--read-only", ("read_only",), None, None, "refuse every change"),
    _Option("--allow-other", ("allow_other",), None, None, "let other users look in"),
    _Option("--uid", ("uid",), _id, "NUMBER", "owner that files show (you)"),
    _Option("--gid", ("gid",), _id, "NUMBER", "group that files show (yours)"),
    _Option("--file-mode", ("file_mode",), _mode, "OCTAL", "permissions of files (644)"),
    _Option(
        "--directory-mode", ("directory_mode",), _mode, "OCTAL", "permissions of directories (755)"
    ),
    _Option(
        "--metadata-timeout",
        _METADATA,
        seconds,
        "SECONDS",
        "how long names, sizes and listings are believed (1)",
    ),
    _Option(
        "--negative-timeout",
        ("negative_timeout_seconds",),
        seconds,
        "SECONDS",
        "how long a name that was not there is believed to be missing (1)",
    ),
    _Option(
        "--open-timeout",
        ("open_timeout_seconds",),
        seconds,
        "SECONDS",
        "age up to which open(2) believes what is known; at 0 it asks the store (0)",
    ),
    _Option(
        "--metrics-port",
        ("metrics_address",),
        _address,
        "[HOST:]PORT",
        "answer Prometheus there; localhost without a host",
    ),
)

_CHANGEABLE: Final = frozenset(
    {"--profile", "--cache-dir", "--cache-size", "--free-disk", "--memory", "--uid", "--gid"}
    | {"--file-mode", "--directory-mode", "--metadata-timeout", "--negative-timeout"}
    | {"--open-timeout", "--metrics-port"}
)
"""What a mount that is there can get another value of; the kernel, the store or files not yet
uploaded stand by the others."""

_FLAG_OF: Final = {name: option.flag for option in _OPTIONS for name in option.settings} | {
    "source": "SOURCE"
}


def add_mount_options(parser: argparse.ArgumentParser) -> None:
    """SOURCE, MOUNTPOINT and every option that is a setting."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="/Volumes[/CATALOG[/SCHEMA[/VOLUME[/...]]]], s3://BUCKET[/...], gs://..., az://... or "
        "file:///DIRECTORY",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT", type=Path)
    for option in _OPTIONS:
        _add_option(parser, option)


def add_change_options(parser: argparse.ArgumentParser) -> None:
    """The options that a mount which is there can take."""
    for option in _OPTIONS:
        if option.flag in _CHANGEABLE:
            _add_option(parser, option)


def _add_option(parser: argparse.ArgumentParser, option: _Option) -> None:
    kind: dict[str, Any] = {"action": "store_true"}
    if option.convert is not None:
        kind = {"type": option.convert, "metavar": option.metavar}
    parser.add_argument(
        option.flag, dest=option.settings[0], default=None, help=option.help, **kind
    )


def mount_settings(options: argparse.Namespace) -> MountSettings:
    """The settings that were asked for; where nothing was said of the two folders, the cache is the
    one of this user, and the state is named after source and mountpoint.

    Raises:
        SettingsError: an option has a value that cannot be; the line begins with the option.
    """
    values = _given(options)
    name = mount_name(options)
    values.setdefault("cache_dir", _home("XDG_CACHE_HOME", ".cache") / "cache")
    values.setdefault("state_dir", state_home() / "state" / name)
    return _settings({"source": options.source, **values})


def changed_settings(options: argparse.Namespace, old: Mapping[str, Any]) -> MountSettings:
    """The settings of a mount, as its holder told them, with what is asked for now.

    Raises:
        SettingsError: an option has a value that cannot be; the line begins with the option.
    """
    return _settings({**asdict(MountSettings.from_mapping(old)), **_given(options)})


def _given(options: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in _OPTIONS:
        value = getattr(options, option.settings[0], None)
        if value is not None:
            values.update(dict.fromkeys(option.settings, value))
    return values


def _settings(values: dict[str, Any]) -> MountSettings:
    for folder in ("cache_dir", "state_dir"):
        values[folder] = values[folder].absolute()
    try:
        return MountSettings(**values)
    except SettingsError as error:
        flag = _FLAG_OF.get(error.name)
        if flag is None:
            raise
        raise SettingsError(f"{flag} {error.reason}") from None


def mount_name(options: argparse.Namespace) -> str:
    """Names this mount's own files: the same for the same source at the same place."""
    place = f"{options.source}\0{options.mountpoint.absolute()}"
    return hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:16]


def state_home() -> Path:
    """Where this user's mounts keep what must not be lost."""
    return _home("XDG_STATE_HOME", ".local/state")


def add_log_options(parser: argparse.ArgumentParser, *, has_defaults: bool = False) -> None:
    """How much is logged and in what form; may stand before and after the command."""
    suppressed = argparse.SUPPRESS
    parser.add_argument(
        "--verbose",
        "-v",
        action="store_true",
        default=False if has_defaults else suppressed,
        help="log more",
    )
    parser.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text" if has_defaults else suppressed,
        help="lines for people or for programs (text)",
    )


def log_arguments(options: argparse.Namespace) -> list[str]:
    """The same options for a process that is started by this one."""
    verbose = ["--verbose"] if options.verbose else []
    log_format = [] if options.log_format == "text" else ["--log-format", options.log_format]
    return [*verbose, *log_format]


def _home(variable: str, default: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / default) / "trainmount"
