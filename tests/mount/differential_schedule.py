"""What test_differential.py does: operations drawn from a seed, and the smallest part of them that
still shows a difference.

Operations do not depend on one another's results, so any part of a schedule is a schedule.
"""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Callable
from typing import Any, Final

__all__ = ["EXEMPT", "Step", "draw", "shrink"]

Step = list[Any]
"""`[program, operation, argument, ...]`, or `["control", what, argument, ...]`."""

EXEMPT: Final[dict[str, str]] = {
    "link, symlink, mknod": "EPERM: a volume has names for files and directories, nothing else",
    "nlink and size of directories": "2 and 0: a store does not count either",
    "ctime, atime, blocks": "follow mtime and size: a store keeps none of them",
    "inode numbers": "compared with themselves elsewhere: two filesystems need not agree",
    "fallocate, SEEK_HOLE, O_TMPFILE, O_DIRECT, RENAME_EXCHANGE": "a volume has no holes, no files"
    " without names and no exchange: EOPNOTSUPP or EINVAL, never drawn here",
    "mtime after truncate to the same size": "changes on one and not on the other, so it is set",
    "mtime of an uploaded file": "becomes the store's time of arrival, in whole seconds",
}
"""What may differ from tmpfs, and why; everything else is compared."""

DIRECTORIES: Final = ("d", "e", "d/sub")
FILES: Final = ("a", "b", "c", "d/a", "d/b", "e/a", "d/sub/a")
NUM_SLOTS: Final = 4
SIZES: Final = (0, 1, 10, 100, 4095, 4096, 4097, 9000, 65_536, 131_073)
LARGE_SIZES: Final = (1 << 20, (1 << 20) + 1, 3_000_000, 5_300_000)
OFFSETS: Final = (0, 0, 0, 1, 100, 4096, 5000, 70_000, (1 << 20) - 1)
ACCESS: Final = (os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_RDWR)
EXTRA_FLAGS: Final = (os.O_CREAT, os.O_CREAT, os.O_EXCL, os.O_TRUNC, os.O_APPEND, os.O_SYNC)
RARE_FLAGS: Final = (os.O_DIRECTORY, os.O_NOFOLLOW, os.O_NONBLOCK, os.O_NOATIME)

FAULTS: Final[tuple[list[dict[str, Any]], ...]] = (
    [{"status": 503, "count": 3}],
    [{"status": 429, "retry_after": "0", "count": 2}],
    [{"status": 500, "count": 2, "skip": 1}],
    [{"latency_ms": 100, "count": 6}],
    [{"route": "get_file", "cut_after_bytes": 1000, "count": 2}],
    [{"route": "presigned_get", "cut_after_bytes": 70_000, "count": 2}],
    [{"route": "put_file", "cut_after_bytes": 10, "count": 1}],
    [{"route": "put_part", "cut_after_bytes": 1000, "count": 1}],
    [{"route": "presigned_get", "expired_url": True, "count": 1}],
    [{"route": "put_part", "expired_url": True, "count": 1}],
    [{"route": "complete_upload", "lose_reply": True, "count": 1}],
    [{"route": "put_file", "lose_reply": True, "count": 1}],
    [{"route": "make_directory", "lose_reply": True, "count": 1}],
    [{"route": "delete_file", "lose_reply": True, "count": 1}],
    [{"route": "remove_directory", "lose_reply": True, "count": 1}],
    [{"route": "head_file", "status": 503, "count": 2}],
    [{"route": "list_directory", "status": 503, "count": 2}],
)
"""What the server does to the next requests: each ends before the client's patience does."""


class _Dice:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._num_contents = seed * 1_000_000

    def slot(self) -> int:
        return self.random.randrange(NUM_SLOTS)

    def file(self) -> str:
        return self.random.choice(FILES)

    def name(self) -> str:
        return self.random.choice((*FILES, *FILES, *DIRECTORIES))

    def offset(self) -> int:
        return self.random.choice(OFFSETS)

    def size(self) -> int:
        return self.random.choice(LARGE_SIZES if self.random.random() < 0.03 else SIZES)

    def content(self) -> int:
        self._num_contents += 1
        return self._num_contents

    def flags(self) -> int:
        flags = self.random.choice(ACCESS)
        for flag in self.random.sample(EXTRA_FLAGS, self.random.randrange(3)):
            flags |= flag
        if self.random.random() < 0.05:
            flags |= self.random.choice(RARE_FLAGS)
        return flags


_Maker = Callable[[_Dice], Step]

_OPERATIONS: Final[dict[str, tuple[int, _Maker]]] = {
    "open": (12, lambda d: [d.slot(), d.name(), d.flags(), 0o644]),
    "close": (7, lambda d: [d.slot()]),
    "dup": (1, lambda d: [d.slot(), d.slot()]),
    "read": (4, lambda d: [d.slot(), d.size()]),
    "pread": (4, lambda d: [d.slot(), d.offset(), d.size()]),
    "write": (7, lambda d: [d.slot(), d.content(), d.size()]),
    "pwrite": (5, lambda d: [d.slot(), d.offset(), d.content(), d.size()]),
    "seek": (2, lambda d: [d.slot(), d.offset(), d.random.randrange(3)]),
    "ftruncate": (3, lambda d: [d.slot(), d.size()]),
    "truncate": (3, lambda d: [d.name(), d.size()]),
    "fsync": (2, lambda d: [d.slot()]),
    "fdatasync": (1, lambda d: [d.slot()]),
    "forget_pages": (2, lambda d: [d.slot()]),
    "copy_range": (1, lambda d: [d.slot(), d.slot(), d.size()]),
    "flock": (1, lambda d: [d.slot(), d.random.choice((1, 2, fcntl.LOCK_UN))]),
    "lock_range": (1, lambda d: [d.slot(), d.random.choice((1, 2, 8)), d.offset(), 100]),
    "map_read": (2, lambda d: [d.slot(), d.offset(), d.size()]),
    "map_write": (3, lambda d: [d.slot(), d.offset(), d.content(), 100, d.random.random() < 0.5]),
    "map_write_after_close": (1, lambda d: [d.slot(), d.offset(), d.content(), 5000]),
    "put": (10, lambda d: [d.name(), d.content(), d.size()]),
    "append": (5, lambda d: [d.file(), d.content(), d.size()]),
    "get": (8, lambda d: [d.name()]),
    "rename": (8, lambda d: [d.name(), d.name()]),
    "rename_noreplace": (2, lambda d: [d.name(), d.name()]),
    "unlink": (5, lambda d: [d.name()]),
    "mkdir": (6, lambda d: [d.random.choice((*DIRECTORIES, d.name())), 0o755]),
    "rmdir": (3, lambda d: [d.random.choice((*DIRECTORIES, d.name()))]),
    "list": (4, lambda d: [d.random.choice(("", *DIRECTORIES, d.name()))]),
    "stat": (3, lambda d: [d.name()]),
    "access": (1, lambda d: [d.name(), d.random.choice((os.R_OK, os.W_OK, os.X_OK))]),
    "chmod": (1, lambda d: [d.name(), d.random.choice((0o600, 0o644, 0o755))]),
    "utime": (1, lambda d: [d.name(), 1_000_000_000 + d.random.randrange(10**6)]),
    "tree": (3, lambda d: []),
}


def draw(
    seed: int, num_steps: int, *, num_faults: int = 0, num_kills: int = 0, num_rests: int = 0
) -> list[Step]:
    """`num_steps` operations of programs 0 and 1, and in between so many controls at random.

    A rest is long enough for every name, time and listing that the mount remembers to be too old.
    """
    dice = _Dice(seed)
    names = list(_OPERATIONS)
    weights = [weight for weight, _ in _OPERATIONS.values()]
    steps: list[Step] = [
        [dice.random.randrange(2), name, *_OPERATIONS[name][1](dice)]
        for name in dice.random.choices(names, weights, k=num_steps)
    ]
    controls: list[Step] = [
        ["control", "faults", dice.random.choice(FAULTS)] for _ in range(num_faults)
    ]
    for number in range(num_kills):
        # Most of them while the next operation is under way.
        controls.append(["control", "kill", dice.random.choice((0, 1, 3, 10, 30)) / 1000])
        if number % 4 == 0:
            controls.append(["control", "end_program", dice.random.randrange(2)])
    controls += [["control", "rest"] for _ in range(num_rests)]
    for control in controls:
        steps.insert(dice.random.randrange(len(steps)), control)
    return steps


def shrink(
    steps: list[Step], still_fails: Callable[[list[Step]], bool], max_tries: int
) -> list[Step]:
    """A part of `steps` of which nothing can be left out, as far as so many tries tell."""
    calm = [step for step in steps if step[0] != "control"]
    if still_fails(calm):
        steps = calm
    size = len(steps) // 2
    while size and max_tries > 0:
        start = 0
        while start < len(steps) and max_tries > 0:
            candidate = steps[:start] + steps[start + size :]
            max_tries -= 1
            if candidate and still_fails(candidate):
                steps = candidate
            else:
                start += size
        size = min(size // 2, len(steps) // 2) if size > 1 else 0
    return steps
