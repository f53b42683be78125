"""What can go wrong in the rig; `__main__` prints these as one line, tests see them as they are.

RigError
+-- SetupError      something that must be installed or built first is missing; the text says how
+-- NotReadyError   a part did not come up in time; the text names its log
+-- LeftoverError   `down` could not remove everything; the text lists what is left
+-- KubectlError    kubectl ended with an error; the text is its own
"""

from __future__ import annotations

__all__ = ["KubectlError", "LeftoverError", "NotReadyError", "RigError", "SetupError"]


class RigError(Exception):
    """Anything the rig reports to its user."""


class SetupError(RigError):
    """A package, program or module is missing and could not be installed."""


class NotReadyError(RigError):
    """A condition did not come true before its deadline."""


class LeftoverError(RigError):
    """A process, mount, group or file of the rig outlived `down`."""


class KubectlError(RigError):
    """kubectl exited with an error."""
