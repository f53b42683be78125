"""What every topic is given, and the units of the table. Called by `run` and the topics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from measure import MIB

__all__ = ["Setting", "as_files", "as_rate", "as_seconds"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is measured, and where. The defaults are those of the published table."""

    folder: Path
    """An empty folder on a disk; the benchmarks' own."""

    repeats: int = 5
    """Rounds of each comparison."""

    read_mib: int = 512
    write_mib: int = 256
    long_write_mib: int = 1024
    checkpoint_mib: int = 1024

    num_files: int = 2000
    file_bytes: int = 100_000
    """A photograph for training, about."""

    num_small_files: int = 10_000
    """Of 10 kB, a hundred in a directory: where each request counts."""

    open_file_mib: int = 16
    """Of each of the 200 files that are read at once."""

    num_listed: int = 100_000
    """Entries of the long directory."""

    latency_ms: float = 20.0
    """Of a store that is not on this machine; 20 ms is an object store in the same region."""

    volume: str | None = None
    """`/Volumes/...` of a real workspace, for the topics that can use one."""

    cluster: bool = False
    """Whether a Kubernetes may be used, or started."""

    def quick(self) -> Setting:
        """Sizes that show whether everything runs; the ratios mean little."""
        return replace(
            self,
            repeats=2,
            read_mib=64,
            write_mib=32,
            long_write_mib=64,
            checkpoint_mib=64,
            num_files=200,
            num_small_files=1000,
            open_file_mib=2,
            num_listed=5000,
        )


def as_rate(num_bytes: int) -> Callable[[float], str]:
    """Seconds for so many bytes, as MiB a second."""
    return lambda seconds: f"{num_bytes / MIB / seconds:,.0f} MiB/s"


def as_files(num_files: int) -> Callable[[float], str]:
    """Seconds for so many files, as files a second."""
    return lambda seconds: f"{num_files / seconds:,.0f} files/s"


def as_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"
