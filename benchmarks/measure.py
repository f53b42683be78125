"""How the benchmarks measure: sides in turn in one run, ratios, peak memory, cold page cache.

Every side is a function of `programs`, `loader`, ... that runs in a fresh process (`run_program`)
and times its own middle with `measured`, so that neither imports nor the other side's memory count.
Called by the topics.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

__all__ = [
    "MIB",
    "Comparison",
    "Program",
    "Sample",
    "Timing",
    "compare",
    "drop_page_cache",
    "finish_program",
    "measured",
    "peak_memory",
    "peak_mib_of",
    "processor_seconds_of",
    "reset_peak",
    "resident_mib_of",
    "run_program",
    "say",
    "shared_out_mib_of",
    "start_program",
    "take_turns",
]

MIB: Final = 1 << 20
PROGRAM_TIMEOUT_SECONDS: Final = 1800.0
_CHILD: Final = Path(__file__).with_name("child.py")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One side, once."""

    seconds: float
    peak_mib: float
    """Of the measured process, above what it held when the clock began."""
    daemon_mib: float = 0.0
    """Peak of the mount's daemon meanwhile, all of it; 0 where no mount took part."""
    daemon_seconds: float = 0.0
    """Processor time of the mount's daemon meanwhile. Others on the machine disturb it least."""


@dataclass
class Timing:
    """What `measured` found; filled in when its block ends."""

    seconds: float = 0.0
    peak_mib: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(
            {"seconds": self.seconds, "peak_mib": self.peak_mib, "details": self.details}
        )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A line of the table."""

    what: str
    against: str
    ratios: tuple[float, ...]
    """How many times as fast as the other side: its seconds over ours, one of each round."""
    here: str
    """Both sides in units, for orientation: another machine gives others."""
    memory: str

    @property
    def median(self) -> float:
        return median(self.ratios)


def say(line: str) -> None:
    """Progress, for the person who waits."""
    print(line, file=sys.stderr, flush=True)


# Inside the measured process


@contextmanager
def measured() -> Iterator[Timing]:
    """Time the block and find the peak of this process's memory in it."""
    timing = Timing()
    reset_peak("self")
    before = resident_mib_of("self")
    began = time.perf_counter()
    yield timing
    timing.seconds = time.perf_counter() - began
    timing.peak_mib = max(0.0, peak_mib_of("self") - before)


def reset_peak(process: int | str) -> None:
    """Let the kernel count a process's peak anew; where it may not, the old peak stands."""
    try:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    except OSError:
        say(f"the peak memory of process {process} cannot be reset and counts from its start")


def peak_mib_of(process: int | str) -> float:
    """Most memory that a process held in RAM since `reset_peak`."""
    return _status_mib(process, "VmHWM")


def resident_mib_of(process: int | str) -> float:
    """Memory that a process holds in RAM now."""
    return _status_mib(process, "VmRSS")


def shared_out_mib_of(process: int) -> float:
    """Memory of a process in RAM, each shared page divided among those who have it."""
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{process}/smaps_rollup has no Pss")


def processor_seconds_of(process: int) -> float:
    """Processor time of a process and its threads since it began, to hundredths."""
    # The name before it is in brackets and may hold anything.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _status_mib(process: int | str, field_name: str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{process}/status has no {field_name}")


# Outside


@dataclass(frozen=True, kw_only=True)
class Program:
    """A function `name(**arguments) -> Timing` of a module here, to run in a fresh process."""

    module: str
    name: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    python: str = sys.executable
    """The interpreter, of another environment for a peer."""


def start_program(program: Program) -> subprocess.Popen[str]:
    """Start it; it prints its Timing as JSON at the end, and sees the end of its input."""
    command = [program.python, str(_CHILD), program.module, program.name]
    return subprocess.Popen(
        [*command, json.dumps(dict(program.arguments))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **program.environment},
    )


def finish_program(program: Program, process: subprocess.Popen[str]) -> Timing:
    """Wait for a started program. Raises RuntimeError with what it said, if it failed."""
    try:
        output, errors = process.communicate(timeout=PROGRAM_TIMEOUT_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            # Not its outputs' end: a process of its own may have them open for longer.
            process.wait()
    if process.returncode != 0:
        ended = f"{program.module}.{program.name} ended with {process.returncode}"
        raise RuntimeError(f"{ended}:\n{errors or output}")
    return Timing(**json.loads(output.splitlines()[-1]))


def run_program(program: Program) -> Timing:
    """Run it to its end in a fresh process."""
    return finish_program(program, start_program(program))


def take_turns(
    sides: Mapping[str, Callable[[int], Sample]], repeats: int
) -> dict[str, list[Sample]]:
    """Every side once a round, in an order that turns around, so that whatever else the machine
    does meets all of them. Nothing of what one side wrote is left for the disk to do meanwhile:
    the kernel makes writers wait for it once there is enough of it.

    A side is called with the number of the round.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for number in range(repeats):
        names = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in names:
            os.sync()
            sample = sides[name](number)
            samples[name].append(sample)
            say(f"  {number + 1}/{repeats} {name}: {sample.seconds:.3f} s{_of_daemon(sample)}")
    return samples


def compare(
    what: str,
    against: str,
    ours: Sequence[Sample],
    theirs: Sequence[Sample],
    unit: Callable[[float], str],
) -> Comparison:
    """The line of two sides that took turns; `unit` says seconds in the table's units."""
    return Comparison(
        what=what,
        against=against,
        ratios=tuple(b.seconds / a.seconds for a, b in zip(ours, theirs, strict=True)),
        here=f"{unit(_median_seconds(ours))}; {unit(_median_seconds(theirs))}",
        memory=f"{peak_memory(ours)}; {peak_memory(theirs)}",
    )


def peak_memory(samples: Sequence[Sample]) -> str:
    """The largest peaks of a side, and the least processor time of its daemon."""
    text = f"+{max(sample.peak_mib for sample in samples):.0f} MiB"
    daemon = max(sample.daemon_mib for sample in samples)
    if not daemon:
        return text
    seconds = min(sample.daemon_seconds for sample in samples)
    return f"{text}, daemon {daemon:.0f} MiB, {seconds:.2f} s"


def drop_page_cache(*paths: Path) -> None:
    """Make the next read of these files, or of all below these directories, come from below.

    Only their pages go, not the machine's whole cache: the programs' own libraries would have to be
    read anew, and others on the machine would pay. A file on a mount and the blocks that the mount
    keeps of it are two files.
    """
    files = [file for path in paths for file in _files_of(path)]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # Dirty pages cannot be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files_of(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]


def _of_daemon(sample: Sample) -> str:
    if not sample.daemon_mib:
        return ""
    return f"; daemon {sample.daemon_seconds:.2f} s of processor, {sample.daemon_mib:.0f} MiB"


def _median_seconds(samples: Sequence[Sample]) -> float:
    return median(sample.seconds for sample in samples)
