"""The commands on mounts as functions: what both command lines call and then print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainmount_fuse.control.client import (
    Answer,
    Mount,
    ask,
    find_mount,
    group_by_mount,
    list_mounts,
)
from trainmount_fuse.control.protocol import ControlError, WrongName
from trainmount_fuse.session.commands import CommandError, ask_holder

__all__ = [
    "MountAnswer",
    "Progress",
    "change_cache",
    "flush",
    "metrics",
    "read_list",
    "refresh",
    "statuses",
]

Progress = Callable[[Mapping[str, int]], None]
"""Gets the counts of a long command, now and then."""

_ANSWER_SECONDS: Final = 10.0
"""For what a daemon answers out of its head."""


@dataclass(frozen=True, slots=True)
class MountAnswer:
    """What one mount answered."""

    mount: Mount
    answer: Answer

    def failures(self) -> list[dict[str, str]]:
        """What could not be done, by its path on the mount."""
        root = str(self.mount.mountpoint).rstrip("/")
        return [{**one, "path": f"{root}/{one['path']}"} for one in self.answer.failed]


def statuses(mountpoint: Path | None) -> list[dict[str, Any]]:
    """One mount, or all of this user. A daemon that gives no answer is the mount's `error`.

    Raises:
        ControlError: no mount is at the mountpoint.
    """
    mounts = list_mounts() if mountpoint is None else [find_mount(mountpoint)]
    return [_status(mount) for mount in mounts]


def _status(mount: Mount) -> dict[str, Any]:
    status: dict[str, Any] = {"mountpoint": str(mount.mountpoint), "source": mount.source}
    if mount.record is not None:
        try:
            # The holder answers where the daemon hangs, or there is none at the moment.
            status["session"] = ask_holder(mount.record, {"want": "status"})
        except CommandError as error:
            status["error"] = str(error)
    try:
        answer = ask(mount, "status", timeout_seconds=_ANSWER_SECONDS)
    except ControlError as error:
        return {**status, "error": str(error)}
    return {**status, **answer.result, "files": answer.files}


def metrics(mountpoint: Path | None) -> str:
    """The numbers of one mount as Prometheus reads them. Raises ControlError."""
    return ask(find_mount(mountpoint), "metrics", timeout_seconds=_ANSWER_SECONDS).text


def change_cache(
    request: str,
    patterns: Sequence[str],
    mountpoint: Path | None,
    progress: Progress = lambda _counts: None,
) -> list[MountAnswer]:
    """`warm` or `evict` what the patterns mean; a daemon that ends meanwhile is no failure.

    Raises:
        ControlError: no mount has a pattern, or it cannot be done at all.
    """
    if not patterns:
        raise WrongName(f"{request}: name files, directories or patterns")
    mount = None if mountpoint is None else find_mount(mountpoint)
    answers: list[MountAnswer] = []

    def note(message: Mapping[str, Any]) -> None:
        if "progress" in message:
            # Mounts come one after the other; the bar shows them together.
            earlier = [one.answer.result for one in answers]
            counts = message["progress"]
            progress({name: sum(one[name] for one in [*earlier, counts]) for name in counts})

    for one, rest in group_by_mount(patterns, mount):
        answer = ask(one, request, rest, note=note, may_repeat=True)
        answers.append(MountAnswer(one, answer))
    return answers


def flush(mountpoint: Path | None) -> MountAnswer:
    """Have everything uploaded. Raises ControlError."""
    mount = find_mount(mountpoint)
    return MountAnswer(mount, ask(mount, "flush", may_repeat=True))


def refresh(paths: Sequence[str], mountpoint: Path | None) -> list[MountAnswer]:
    """Have names forgotten: of these paths, or of the whole mount without any.

    Raises ControlError.
    """
    if paths:
        mount = None if mountpoint is None else find_mount(mountpoint)
        wanted = group_by_mount(paths, mount)
    else:
        wanted = [(find_mount(mountpoint), [])]
    return [MountAnswer(one, ask(one, "refresh", rest, may_repeat=True)) for one, rest in wanted]


def read_list(file: str) -> list[str]:
    """One path a line, of a file or of standard input for `-`. Raises ControlError."""
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise WrongName(f"--list {file}: {error.strerror}") from error
    lines = data.decode(errors="surrogateescape").split("\n")
    return [line.removesuffix("\r") for line in lines if line.strip()]
