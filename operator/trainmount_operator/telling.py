"""The one line of a program's last output that says why it failed.

Called by `judge` with a pod's termination message: what `launch` chose out of the program's errors,
or the last lines of its log. Pure.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["telling_line"]

# "ValueError: bad sample", "torch.OutOfMemoryError: ...", with or without torch's "[rank1]: ".
_ERROR: Final = re.compile(
    r"^(?:\[\w+\]:\s*)?(?:[A-Za-z_][\w.]*\.)?"
    r"[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure|Timeout)(?::\s|:?$)"
)
# A launcher's own report of the failure of what it launched.
_LAUNCHER: Final = re.compile(r"ChildFailedError|SignalException|CalledProcessError")
# torchrun: "rank      : 2 (local_rank: 0)", below "Root Cause (first observed failure)".
_FIRST_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+) \(local_rank", re.MULTILINE)
_REPORT: Final = "Root Cause"
_LETTER: Final = re.compile(r"[^\W\d_]")


def telling_line(text: str) -> str:
    """The error of the rank that failed first, else the last error, else the last line with
    letters in it; empty if there is none.
    """
    lines = [line.strip() for line in text.splitlines()]
    errors = [line for line in lines if _ERROR.match(line) and not _LAUNCHER.search(line)]
    first = _FIRST_RANK.search(text, max(text.rfind(_REPORT), 0))
    if first is not None:
        prefix = f"[rank{first[1]}]:"
        errors = [line for line in errors if line.startswith(prefix)] or errors
    if errors:
        return errors[-1]
    worded = [line for line in lines if _LETTER.search(line)]
    # torchrun ends with advice; what it names failed is said above.
    plain = [line for line in worded if not line.startswith(("traceback :", "error_file:"))]
    return (plain or worded or [""])[-1]
