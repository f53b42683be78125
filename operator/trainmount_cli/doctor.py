"""`trainmount doctor`: what is missing on this machine, each with the one line that mends it.

`run --local` asks the same questions before it starts anything.
"""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import typer

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.options import OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["Check", "doctor", "require_local", "run_checks"]

_FUSE_DEVICE: Final = Path("/dev/fuse")

# The first kernel with FUSE_NOTIFY_RESEND: the next daemon gets the requests of a dead one.
_TAKEOVER_KERNEL: Final = (6, 9)

_PROBE: Final = "from trainmount_cli.local.namespaces import probe; probe()"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One thing that is needed."""

    name: str
    is_ok: bool
    detail: str
    """What was found, in a few words."""

    remedy: str = ""
    """The one line that mends it, if it is not well."""

    is_required: bool = True
    """False for what only makes it better."""


def doctor(output: OutputOption = Output.TEXT) -> None:
    """Say what is missing on this machine and how to get it."""
    select(output)
    checks = list(run_checks())
    if output is Output.JSON:
        print_data({"checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            mark = "ok  " if check.is_ok else ("MISS" if check.is_required else "warn")
            print(f"{mark}  {check.name}: {check.detail}")
            if not check.is_ok and check.remedy:
                print(f"      mend it: {check.remedy}")
    missing = any(check.is_required and not check.is_ok for check in checks)
    raise typer.Exit(EXIT_FAILED if missing else 0)


def run_checks() -> Iterator[Check]:
    """Every check, in the order in which a person would mend them."""
    questions: tuple[Callable[[], Check], ...] = (
        check_fuse_device,
        check_namespaces,
        check_fuse_library,
        check_torchrun,
        check_kernel,
        check_credentials,
        check_bucket_extra,
        check_fsspec_extra,
    )
    for question in questions:
        yield question()


def require_local(*, has_volumes: bool) -> None:
    """Raises CliError with the first thing that `run --local` cannot do without."""
    questions = [check_namespaces]
    if has_volumes:
        questions = [check_fuse_device, check_fuse_library, check_namespaces]
    for question in questions:
        check = question()
        if not check.is_ok:
            message = f"{check.name}: {check.detail}; mend it: {check.remedy}"
            raise CliError(message, exit_status=EXIT_FAILED)


def check_fuse_device() -> Check:
    name = str(_FUSE_DEVICE)
    if not _FUSE_DEVICE.exists():
        detail = "is missing, so nothing can be mounted"
        remedy = "sudo modprobe fuse  (in a container: docker run --device /dev/fuse)"
        return Check(name=name, is_ok=False, detail=detail, remedy=remedy)
    try:
        os.close(os.open(_FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        mode = _FUSE_DEVICE.stat().st_mode & 0o777
        detail = f"may not be opened by you ({error.strerror}, mode {mode:04o})"
        return Check(name=name, is_ok=False, detail=detail, remedy="sudo chmod 666 /dev/fuse")
    return Check(name=name, is_ok=True, detail="can be opened")


def check_namespaces() -> Check:
    """Whether a process of this user may have mounts and processes of its own."""
    name = "namespaces"
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True)
    if done.returncode == 0:
        return Check(name=name, is_ok=True, detail="a run can have mounts of its own")
    detail = "the machine refuses them to you"
    return Check(name=name, is_ok=False, detail=detail, remedy=_namespace_remedy())


def check_fuse_library() -> Check:
    name = "libfuse3"
    if importlib.util.find_spec("pyfuse3") is None:
        remedy = "pip install 'trainmount[fuse]'"
        return Check(name=name, is_ok=False, detail="pyfuse3 is not installed", remedy=remedy)
    if ctypes.util.find_library("fuse3") is None:
        remedy = "sudo apt-get install -y libfuse3-3 fuse3"
        return Check(name=name, is_ok=False, detail="the library is missing", remedy=remedy)
    return Check(name=name, is_ok=True, detail="is installed, with pyfuse3")


def check_torchrun() -> Check:
    name = "torchrun"
    found = (Path(sys.executable).parent / "torchrun").exists()
    if found or any(
        (Path(folder) / "torchrun").exists() for folder in os.get_exec_path() if folder
    ):
        return Check(name=name, is_ok=True, detail="is installed")
    detail = "is not installed; jobs that need no torch run without it"
    remedy = "pip install 'trainmount[runtime]'"
    return Check(name=name, is_ok=False, detail=detail, remedy=remedy, is_required=False)


def check_kernel() -> Check:
    release = os.uname().release
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version >= _TAKEOVER_KERNEL:
        detail = f"{release}: mounts survive their daemon"
        return Check(name="kernel", is_ok=True, detail=detail)
    detail = f"{release}: when a daemon dies, files that are open get an error"
    remedy = "a kernel from 6.9 on"
    return Check(name="kernel", is_ok=False, detail=detail, remedy=remedy, is_required=False)


def check_credentials() -> Check:
    """Whether a host and a token are configured; nobody is asked whether they are right."""
    from trainmount_files import VolumeError
    from trainmount_files.files_api import Credentials

    name = "Databricks"
    try:
        host = Credentials().host
    except VolumeError:
        detail = "no host and token are configured, which /Volumes paths need"
        remedy = (
            "export DATABRICKS_HOST=https://... DATABRICKS_TOKEN=..., or write them to "
            "~/.databrickscfg"
        )
        return Check(name=name, is_ok=False, detail=detail, remedy=remedy, is_required=False)
    return Check(name=name, is_ok=True, detail=f"{host} is configured")


def check_bucket_extra() -> Check:
    return _check_extra("bucket", "obstore", "s3://, gs:// and az:// paths")


def check_fsspec_extra() -> Check:
    return _check_extra("fsspec", "fsspec", "volumes:// paths of pandas, pyarrow and datasets")


def _check_extra(extra: str, package: str, purpose: str) -> Check:
    if importlib.util.find_spec(package) is not None:
        return Check(name=extra, is_ok=True, detail=f"is installed, for {purpose}")
    detail = f"is not installed; it is for {purpose}"
    remedy = f"pip install 'trainmount[{extra}]'"
    return Check(name=extra, is_ok=False, detail=detail, remedy=remedy, is_required=False)


def _namespace_remedy() -> str:
    switches = {
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),
        "/proc/sys/kernel/unprivileged_userns_clone": ("0", "1"),
        "/proc/sys/user/max_user_namespaces": ("0", "10000"),
    }
    for path, (bad, good) in switches.items():
        try:
            value = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if value == bad:
            setting = path.removeprefix("/proc/sys/").replace("/", ".")
            return f"sudo sysctl -w {setting}={good}"
    return "run as root, or in a container with --privileged"
