"""How the service of a mount ends, and what to say where the daemon itself could not tell.
supervisor.py and holder.py use it."""

from __future__ import annotations

import enum
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainmount_fuse.session.exit_codes import EXIT_ENDED, EXIT_FAILED, EXIT_UNSENT
from trainmount_fuse.writes.journal import unsent_paths

__all__ = ["Ending", "ending_by_journal"]

logger = logging.getLogger(__name__)


class Ending(enum.Enum):
    """How a mount's service ended."""

    ENDED = "unmounted or stopped, everything is uploaded"
    UNSENT = "unmounted or stopped, some files wait in the state directory"
    GAVE_UP = "no daemon lives long enough"
    LOST = "the daemon died and this kernel allows no successor"
    HANDED_ON = "this process becomes the newly installed program; the daemon serves on"

    @property
    def exit_code(self) -> int:
        """What a process answers that served the mount (exit_codes.py)."""
        return {Ending.ENDED: EXIT_ENDED, Ending.UNSENT: EXIT_UNSENT}.get(self, EXIT_FAILED)


def ending_by_journal(configuration: Mapping[str, Any]) -> Ending:
    """For a daemon that ended without a word: its journal knows whether everything is uploaded."""
    settings = configuration.get("settings") or {}
    if isinstance(settings, str):
        settings = json.loads(settings)
    if "state_dir" not in settings:
        return Ending.ENDED
    state_dir = Path(settings["state_dir"])
    try:
        unsent = unsent_paths(state_dir)
    except OSError as error:
        unsent = [f"? ({error.strerror})"]
    if not unsent:
        return Ending.ENDED
    logger.error(
        "the mount ends with bytes only here",
        extra={"state_dir": str(state_dir), "num_files": len(unsent), "files": unsent[:20]},
    )
    return Ending.UNSENT
