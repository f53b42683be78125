"""Where the rig keeps things: the cache of what is built once, and a folder for each rig."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = ["HERE", "PROJECT", "RIGS", "Progress", "cache_folder", "digest_of", "locked"]

Progress = Callable[[str], None]
"""Takes one line about what is going on, for the person who waits."""

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[2]

RIGS = Path("/var/tmp/trainmount-rig")
"""One folder a rig. /var/tmp is a disk on every distribution, /tmp often memory; and it is not
below /var/lib or /run, which each node replaces by its own."""


def cache_folder() -> Path:
    """The folder for binaries and images, made if missing; it follows `XDG_CACHE_HOME`."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(home) / "trainmount" / "rig"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def digest_of(parts: Iterable[str | bytes]) -> str:
    """16 hex digits over the parts in order; each is delimited, so that moving a byte counts."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]


@contextlib.contextmanager
def locked(name: str, progress: Progress) -> Iterator[None]:
    """Hold the lock `name` of the cache: two runs never build the same thing at the same time."""
    with (cache_folder() / f"{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another run that builds the {name}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
