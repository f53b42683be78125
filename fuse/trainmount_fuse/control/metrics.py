"""All numbers of a mount in one table: name, kind, help and where the value comes from.

Rendered as Prometheus' text format 0.0.4 for the control socket and `--metrics-port`, and as the
table in docs/METRICS.md. The format is a few lines, so that no library is needed for it. Counters
are those of one daemon: a successor begins at 0, which Prometheus takes for what it is.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from trainmount_fuse.blocks import CacheStatistics
from trainmount_fuse.control.mount_status import LocalFile
from trainmount_fuse.memory import MemoryStatistics
from trainmount_fuse.request_counts import BOUNDS_SECONDS, OperationCounts, RequestStatistics

__all__ = ["CONTENT_TYPE", "METRICS", "Metric", "Snapshot", "metrics_table", "metrics_text"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The numbers of every part at one moment."""

    source: str
    start_time_seconds: float
    """Since the epoch."""

    resident_bytes: int
    num_open_inodes: int
    num_hidden_names: int
    requests: RequestStatistics
    cache: CacheStatistics
    cache_limit_bytes: int
    memory: MemoryStatistics
    files: list[LocalFile]


_Labels = Mapping[str, str]
_Samples = Iterable[tuple[_Labels, float]]


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[Snapshot], _Samples]
    """Labels and values; of a histogram unused, since all of them are of requests."""


def _one(read: Callable[[Snapshot], float]) -> Callable[[Snapshot], _Samples]:
    return lambda snapshot: [({}, read(snapshot))]


def _errors(snapshot: Snapshot) -> _Samples:
    for (operation, code), count in sorted(snapshot.requests.num_errors.items()):
        name = errno.errorcode.get(code, str(code))
        yield {"operation": operation, "errno": name}, count


def _local_files(snapshot: Snapshot) -> _Samples:
    for state in ("dirty", "failed"):
        yield {"state": state}, sum(one.state == state for one in snapshot.files)


def _local_bytes(snapshot: Snapshot) -> _Samples:
    for state in ("dirty", "failed"):
        yield {"state": state}, sum(one.size_bytes for one in snapshot.files if one.state == state)


METRICS: Final = (
    Metric(
        "trainmount_info",
        "gauge",
        "1; the label says which volume is mounted.",
        lambda snapshot: [({"source": snapshot.source}, 1)],
    ),
    Metric(
        "trainmount_start_time_seconds",
        "gauge",
        "When the daemon started, in seconds since the epoch.",
        _one(lambda snapshot: snapshot.start_time_seconds),
    ),
    Metric(
        "trainmount_request_duration_seconds",
        "histogram",
        "How long requests of the kernel took, by operation.",
        lambda _snapshot: [],
    ),
    Metric(
        "trainmount_request_errors_total",
        "counter",
        "Requests answered with an error, by operation and errno. ENOENT and ENODATA are everyday.",
        _errors,
    ),
    Metric(
        "trainmount_requests_in_progress",
        "gauge",
        "Requests that are being answered.",
        _one(lambda snapshot: snapshot.requests.num_in_progress),
    ),
    Metric(
        "trainmount_cache_bytes",
        "gauge",
        "Blocks on disk.",
        _one(lambda snapshot: snapshot.cache.cached_bytes),
    ),
    Metric(
        "trainmount_cache_limit_bytes",
        "gauge",
        "Upper bound of the blocks on disk (--cache-size).",
        _one(lambda snapshot: snapshot.cache_limit_bytes),
    ),
    Metric(
        "trainmount_cache_fetched_bytes_total",
        "counter",
        "Bytes that the store sent into the cache.",
        _one(lambda snapshot: snapshot.cache.fetched_bytes),
    ),
    Metric(
        "trainmount_cache_evicted_bytes_total",
        "counter",
        "Bytes that were thrown out of the cache.",
        _one(lambda snapshot: snapshot.cache.evicted_bytes),
    ),
    Metric(
        "trainmount_cache_bad_blocks_total",
        "counter",
        "Blocks whose bytes on disk were not what had been written; each was fetched again.",
        _one(lambda snapshot: snapshot.cache.num_bad_blocks),
    ),
    Metric(
        "trainmount_memory_bytes",
        "gauge",
        "Memory for bytes on their way that is taken.",
        _one(lambda snapshot: snapshot.memory.used_bytes),
    ),
    Metric(
        "trainmount_memory_peak_bytes",
        "gauge",
        "The most that was taken at once.",
        _one(lambda snapshot: snapshot.memory.peak_bytes),
    ),
    Metric(
        "trainmount_memory_limit_bytes",
        "gauge",
        "Upper bound of it (--memory).",
        _one(lambda snapshot: snapshot.memory.limit_bytes),
    ),
    Metric(
        "trainmount_memory_waits_total",
        "counter",
        "Transfers that had to wait for memory.",
        _one(lambda snapshot: snapshot.memory.num_waits),
    ),
    Metric(
        "trainmount_resident_memory_bytes",
        "gauge",
        "Memory of the daemon as the kernel counts it (RSS).",
        _one(lambda snapshot: snapshot.resident_bytes),
    ),
    Metric(
        "trainmount_open_inodes",
        "gauge",
        "Files and directories that programs have open.",
        _one(lambda snapshot: snapshot.num_open_inodes),
    ),
    Metric(
        "trainmount_hidden_names",
        "gauge",
        "Names in the volume that no file system can show.",
        _one(lambda snapshot: snapshot.num_hidden_names),
    ),
    Metric(
        "trainmount_local_files",
        "gauge",
        "Files whose last bytes are only here: dirty ones are to be uploaded, failed ones could "
        "not be and are kept.",
        _local_files,
    ),
    Metric("trainmount_local_bytes", "gauge", "The bytes of these files.", _local_bytes),
)


def metrics_text(snapshot: Snapshot) -> str:
    """All metrics in Prometheus' text format."""
    return "".join(f"{line}\n" for metric in METRICS for line in _lines(metric, snapshot))


def _lines(metric: Metric, snapshot: Snapshot) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.help}"
    yield f"# TYPE {metric.name} {metric.kind}"
    if metric.kind == "histogram":
        for operation, counts in snapshot.requests.operations.items():
            yield from _histogram(metric.name, operation, counts)
        return
    for labels, value in metric.read(snapshot):
        yield f"{metric.name}{_labels(labels)} {_number(value)}"


def _histogram(name: str, operation: str, counts: OperationCounts) -> Iterator[str]:
    so_far = 0
    bounds = [*(f"{bound:g}" for bound in BOUNDS_SECONDS), "+Inf"]
    for bound, count in zip(bounds, counts.num_by_duration, strict=True):
        so_far += count
        yield f"{name}_bucket{_labels({'operation': operation, 'le': bound})} {so_far}"
    labels = _labels({"operation": operation})
    yield f"{name}_sum{labels} {counts.total_seconds:.9g}"
    yield f"{name}_count{labels} {counts.num_requests}"


def _labels(labels: _Labels) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3f}"


def metrics_table() -> str:
    """The table of docs/METRICS.md."""
    rows = [f"| `{one.name}` | {one.kind} | {one.help} |" for one in METRICS]
    return "\n".join(["| name | kind | what it is |", "|---|---|---|", *rows]) + "\n"
