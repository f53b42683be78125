"""The places where volumes are published. Called by the node with what the kubelet sent."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trainmount_csi.errors import InvalidArgument

__all__ = ["TargetPath"]

# <kubelet>/pods/<pod uid>/volumes/kubernetes.io~csi/<volume>/mount
_KUBELET: Final = re.compile(
    r"/pods/(?P<pod_uid>[^/]+)/volumes/kubernetes\.io~csi/(?P<volume>[^/]+)/mount$"
)


@dataclass(frozen=True, slots=True)
class TargetPath:
    """Where one pod sees one volume."""

    path: Path
    """Absolute and without symbolic links above the last name, as /proc/self/mountinfo writes it.
    """

    pod_uid: str = ""
    """Empty where the caller is not a kubelet."""

    pod_volume: str = ""
    """Name of the volume or of the PersistentVolume; empty where the caller is not a kubelet."""

    @classmethod
    def parse(cls, field: str, text: str) -> TargetPath:
        """Check and resolve a path of a request; `field` is its name there.

        Only the parent is resolved: the last name may be a mount whose daemon is dead, which must
        not be looked at.

        Raises:
            InvalidArgument: empty, relative or with `.` or `..` names.
        """
        if not text:
            raise InvalidArgument(f"{field} must be set")
        if not text.startswith("/") or any(name in (".", "..") for name in text.split("/")):
            raise InvalidArgument(f"{field} must be an absolute path without '.' and '..': {text}")
        path = Path(text)
        if path == Path("/"):
            raise InvalidArgument(f"{field} must not be /")
        match = _KUBELET.search(str(path))
        resolved = Path(os.path.realpath(path.parent)) / path.name
        if match is None:
            return cls(resolved)
        return cls(resolved, match["pod_uid"], match["volume"])
