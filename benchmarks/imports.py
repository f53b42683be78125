"""What it costs a program to import the volume client, before it does anything with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from measure import Comparison, Sample, compare, take_turns
from topics import Setting

__all__ = ["run"]

_SIDES = {
    "bare": "pass",
    "client": "import trainmount_files",
    "sdk": "from databricks.sdk import WorkspaceClient",
}


def run(setting: Setting) -> list[Comparison]:
    repeats = max(setting.repeats, 7)
    samples = take_turns(
        {name: lambda _round, code=code: _start(code) for name, code in _SIDES.items()}, repeats
    )
    what = "`import trainmount_files`, a whole interpreter"
    return [
        compare(what, "an interpreter that imports nothing", *_of(samples, "bare"), _as_ms),
        compare(what, "`from databricks.sdk import WorkspaceClient`", *_of(samples, "sdk"), _as_ms),
    ]


def _start(code: str) -> Sample:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code])
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"exit status {process.returncode} of {code}")
    return Sample(seconds=seconds, peak_mib=usage.ru_maxrss / 1024)


def _of(samples: dict[str, list[Sample]], other: str) -> tuple[list[Sample], list[Sample]]:
    return samples["client"], samples[other]


def _as_ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"
