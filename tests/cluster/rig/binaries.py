"""Builds the programs of a Kubernetes cluster from their Go modules, once, into the cache.

The versions stand here and in `../modules/kubernetes/go.mod`, nowhere else. `cluster.py` asks for
the folder; tests/external asks for csi-sanity.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rig.errors import SetupError
from rig.locations import PROJECT, Progress, cache_folder, digest_of, locked

__all__ = ["KUBERNETES_VERSION", "Binaries", "ensure_binaries"]

KUBERNETES_VERSION = "1.36.3"
_MODULE = PROJECT / "tests" / "cluster" / "modules" / "kubernetes"


@dataclass(frozen=True, kw_only=True)
class _Program:
    """One thing to build."""

    packages: tuple[str, ...]
    """What `go install` takes, or nothing for our own module."""

    minutes: str
    """How long a cold build takes on two cores, for the person who waits."""

    folder: str = ""
    """Below the folder of binaries."""


_PROGRAMS: dict[str, _Program] = {
    f"Kubernetes {KUBERNETES_VERSION} and etcd": _Program(packages=(), minutes="5 minutes"),
    "containerd": _Program(
        packages=tuple(
            f"github.com/containerd/containerd/v2/cmd/{name}@v2.2.9"
            for name in ("containerd", "ctr", "containerd-shim-runc-v2")
        ),
        minutes="1 minute",
    ),
    "CoreDNS": _Program(packages=("github.com/coredns/coredns@v1.13.1",), minutes="75 s"),
    "the network plugins": _Program(
        packages=tuple(
            f"github.com/containernetworking/plugins/plugins/{name}@v1.9.1"
            for name in ("main/bridge", "main/loopback", "ipam/host-local", "meta/portmap")
        ),
        minutes="5 s",
        folder="cni",
    ),
    "csi-sanity": _Program(
        packages=("github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity@v5.4.0",), minutes="35 s"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Binaries:
    """A folder with `kube` (control plane, kubelet, kubectl), containerd, coredns, cni/ and so
    on."""

    folder: Path

    @property
    def kube(self) -> str:
        """The program whose first argument says which part of Kubernetes to be."""
        return str(self.folder / "kube")


def _key() -> str:
    parts: list[str | bytes] = [platform.machine(), KUBERNETES_VERSION]
    for program in _PROGRAMS.values():
        parts += [*program.packages, program.folder]
    parts += [(_MODULE / name).read_bytes() for name in ("go.mod", "go.sum", "main.go")]
    return digest_of(parts)


def ensure_binaries(progress: Progress) -> Binaries:
    """The folder of this version of everything, built if it is not in the cache.

    Raises:
        SetupError: Go is missing or a build failed; the text has the compiler's last lines.
    """
    folder = cache_folder() / f"binaries-{_key()}"
    if folder.is_dir():
        return Binaries(folder=folder)
    with locked("binaries", progress):
        if not folder.is_dir():  # another run may have built them meanwhile
            if shutil.which("go") is None:
                raise SetupError(
                    "the test cluster is built from source: install Go 1.26 or newer, https://go.dev/dl/"
                )
            partial = folder.with_suffix(".partial")
            partial.mkdir(
                exist_ok=True
            )  # a build that was cut off goes on: Go's cache has its work
            for name, program in _PROGRAMS.items():
                _build(name, program, partial, progress)
            partial.rename(folder)
    return Binaries(folder=folder)


def _build(name: str, program: _Program, folder: Path, progress: Progress) -> None:
    progress(f"building {name} (about {program.minutes} the first time)")
    started = time.monotonic()
    target = folder / program.folder
    target.mkdir(exist_ok=True)
    environment = os.environ | {
        # Static programs: CoreDNS runs in an image with no C library.
        "CGO_ENABLED": "0",
        "GOBIN": str(target),
    }
    if program.packages:
        commands = [["go", "install", package] for package in program.packages]
    else:
        major, minor, _ = KUBERNETES_VERSION.split(".")
        # Without a version every client that checks for one sees v0.0.0.
        stamp = "-X k8s.io/component-base/version.git"
        flags = (
            f"-s -w {stamp}Version=v{KUBERNETES_VERSION} {stamp}Major={major} {stamp}Minor={minor}"
        )
        commands = [
            ["go", "build", "-trimpath", f"-ldflags={flags}", "-o", str(target / "kube"), "."]
        ]
    for command in commands:
        done = subprocess.run(command, cwd=_MODULE, env=environment, capture_output=True, text=True)
        if done.returncode:
            tail = " | ".join(done.stderr.strip().splitlines()[-5:])
            raise SetupError(f"`{' '.join(command)}` failed: {tail}")
    progress(f"built {name} in {time.monotonic() - started:.0f} s")
