"""How a daemon process tells its supervisor why it ended, and `main` tells whoever started it."""

from __future__ import annotations

from typing import Final

__all__ = [
    "EXIT_AWAY",
    "EXIT_CONFIGURATION",
    "EXIT_ENDED",
    "EXIT_FAILED",
    "EXIT_REPLACED",
    "EXIT_UNSENT",
]

EXIT_ENDED: Final = 0
"""Unmounted or told to stop, and everything that was written is in the volume."""

EXIT_FAILED: Final = 1
"""It did not go well after the mount was made; the log says why."""

EXIT_CONFIGURATION: Final = 2
"""The arguments, settings, volume or mountpoint are wrong; nothing was mounted."""

EXIT_UNSENT: Final = 74
"""Ended in order, but some files could not be uploaded. They stay in the state directory."""

EXIT_REPLACED: Final = 75
"""Made room for a successor; nothing was flushed."""

EXIT_AWAY: Final = 76
"""Ended while the store was away; the journal tells whether something is unsent. Only between
daemon and supervisor."""
