"""Names of checkpoint files and of the data files that belong to them. Pure; called by
`filesystem.py` and `leftovers.py`.

Ray Data has one checkpoint file for each write task. Its base is the name of the task's data files
without extension: `<base>.pending.parquet` from before the data are written, `<base>.parquet` once
they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = [
    "PENDING",
    "committed_name",
    "hidden",
    "owners",
    "pending_base",
    "presented",
    "stored_name",
]

SUFFIX: Final = ".parquet"
PENDING: Final = ".pending.parquet"

_OWN: Final = "_trainmount_"
"""How the names of what we keep beside Ray's files begin; Ray reads no file of such a name."""

_SEPARATORS: Final = "-_."
"""What stands between a base and the rest of a data file's name."""

_OF_RAY: Final = re.compile(r"_\d{6}$")
"""The end of Ray's own names up to 1,000,000 tasks: of equal length, so none begins another."""

_REST: Final = r"(-\d+|_\d{6,}_\d{6,})?(\.[^/]*)?"
"""The rest: `-<file>` of Parquet, `_<block>_<row>` of one file a row, nothing; and extensions."""


def pending_base(name: str) -> str | None:
    """The base of a pending checkpoint file; None for any other name."""
    return name.removesuffix(PENDING) if name.endswith(PENDING) else None


def committed_name(name: str) -> str:
    """What a pending checkpoint file is called once it is committed."""
    return name.removesuffix(PENDING) + SUFFIX


def hidden(name: str) -> bool:
    """Whether a file is ours and no checkpoint of Ray's."""
    return name.startswith(_OWN)


def presented(names: Iterable[str]) -> dict[str, list[str]]:
    """What Ray is shown for each of the names in a directory.

    Ray's recovery deletes the data files whose name *begins* with a pending base, so with `part-1`
    also `part-10`. Names that could do that are shown once for each separator instead, as
    `part-1-`, `part-1_` and `part-1.`. A pending file whose committed twin is there is committed:
    a copy was made and the original not yet removed.
    """
    listed = list(names)
    there = set(listed)
    shown: dict[str, list[str]] = {}
    for name in listed:
        base = pending_base(name)
        if hidden(name) or (base is not None and committed_name(name) in there):
            shown[name] = []
        elif base is None or _OF_RAY.search(base):
            shown[name] = [name]
        else:
            shown[name] = [f"{base}{each}{PENDING}" for each in _SEPARATORS]
    return shown


def stored_name(name: str) -> str | None:
    """The name of the file that `presented` may have shown as `name`; None if it shows none so."""
    base = pending_base(name)
    if not base or base[-1] not in _SEPARATORS:
        return None
    return f"{base[:-1]}{PENDING}"


def owners(bases: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """To which of the bases each data file belongs; files of none are left out.

    A name may fit several (`part-1` and `part-1-2`); then it is of the longest.
    """
    # A base may be a template with the number of the file in its midst.
    ordered = sorted(set(bases), key=len, reverse=True)
    exact = {base for base in ordered if "{i}" not in base}
    templates = [
        (base, re.compile(re.escape(base).replace(r"\{i\}", r"\d+") + _REST))
        for base in ordered
        if base not in exact
    ]
    rest = re.compile(_REST)
    found: dict[str, str] = {}
    for name in names:
        for end in range(len(name), 0, -1):
            if name[:end] in exact and rest.fullmatch(name, end):
                found[name] = name[:end]
                break
        else:
            for base, pattern in templates:
                if pattern.fullmatch(name):
                    found[name] = base
                    break
    return found
