"""The Debian or Ubuntu packages whose programs the rig runs."""

from __future__ import annotations

import os
import shutil
import subprocess

from rig.errors import SetupError
from rig.locations import Progress

__all__ = ["ensure_packages", "missing_packages"]

_PROGRAMS = {
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "busybox": "busybox-static",
    "fusermount3": "fuse3",
    "nsenter": "util-linux",
    "openssl": "openssl",
}
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing_packages() -> list[str]:
    """Names of the packages to install, sorted."""
    return sorted(
        {
            package
            for program, package in _PROGRAMS.items()
            if not shutil.which(program, path=_SEARCH)
        }
    )


def ensure_packages(progress: Progress) -> None:
    """Install what is missing when we are root.

    Raises:
        SetupError: not root, or apt-get failed; says the line to run.
    """
    missing = missing_packages()
    if not missing:
        return
    line = f"apt-get install -y --no-install-recommends {' '.join(missing)}"
    if os.geteuid() != 0:
        raise SetupError(f"the test cluster needs packages; run: sudo {line}")
    progress(f"installing {' '.join(missing)}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in ("apt-get update -q", line):
        done = subprocess.run(command.split(), capture_output=True, text=True, env=environment)
        if done.returncode:
            raise SetupError(f"`{command}` failed: {done.stderr.strip().splitlines()[-1:]}")
