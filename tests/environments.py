"""Python environments beside the project's, for what needs other packages than it has. Made where
they are not there yet, and kept in the user's cache folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

__all__ = ["environment", "streaming_python", "uv"]

STREAMING = "mosaicml-streaming==0.13.0"
_LEFT_OUT = (
    "azure-identity",
    "azure-storage-blob",
    "azure-storage-file-datalake",
    "boto3",
    "google-cloud-storage",
    "matplotlib",
    "oci",
    "paramiko",
    "torch",
)
"""What the package asks for and a local dataset does not use; torch is the project's own."""


def uv(*arguments: str) -> None:
    """Run the one that installed this environment, or any other."""
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.exists() else shutil.which("uv")
    assert found is not None, "needs uv: pip install uv"
    subprocess.run([found, *arguments], check=True, timeout=900)


def environment(group: str, name: str, *installs: Sequence[str]) -> Path:
    """The folder of the environment `name`, for this version of Python; `installs` are what `uv pip
    install` is given, one call after another. Processes that want it at once make it once.
    """
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(home) / "trainmount" / group
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{name}-py{sys.version_info.major}.{sys.version_info.minor}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            # Relocatable: it moves to its place once it is whole.
            uv("venv", "--quiet", "--relocatable", "--python", sys.executable, str(partial))
            python = str(partial / "bin" / "python")
            for packages in installs:
                uv("pip", "install", "--quiet", "--python", python, *packages)
            partial.rename(folder)
    return folder


def streaming_python() -> str:
    """An interpreter that has MosaicML's streaming, whose numpy is older than the project's."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    with tempfile.NamedTemporaryFile("w") as overrides:
        overrides.writelines(f"{name}; python_version < '3'\n" for name in _LEFT_OUT)
        overrides.flush()
        packages = ["--overrides", overrides.name, STREAMING]
        folder = environment("programs", STREAMING.replace("==", "-"), packages)
    # Torch is the project's; it comes after what is installed here.
    site_packages = folder / f"lib/python{version}/site-packages"
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__path__[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    (site_packages / "project.pth").write_text(str(Path(torch.stdout.strip()).parent) + "\n")
    return str(folder / "bin/python")
