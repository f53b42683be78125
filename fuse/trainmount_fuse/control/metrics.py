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

from trainmount_fuse.cache.statistics import CacheStatistics
from trainmount_fuse.memory import MemoryStatistics
from trainmount_fuse.names.metadata import MetadataStatistics
from trainmount_fuse.reads.prefetch import PrefetchStatistics
from trainmount_fuse.request_counts import BOUNDS_SECONDS, OperationCounts, RequestStatistics
from trainmount_fuse.writes.staging import WritingStatistics

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
    requests: RequestStatistics
    metadata: MetadataStatistics
    cache: CacheStatistics
    prefetch: PrefetchStatistics
    memory: MemoryStatistics
    writing: WritingStatistics


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
    yield {"state": "dirty"}, snapshot.writing.num_dirty_files
    yield {"state": "failed"}, snapshot.writing.num_failed_files


def _local_bytes(snapshot: Snapshot) -> _Samples:
    yield {"state": "dirty"}, snapshot.writing.dirty_bytes
    yield {"state": "failed"}, snapshot.writing.failed_bytes


def _cache_reads(snapshot: Snapshot) -> _Samples:
    yield {"result": "hit"}, snapshot.cache.num_hits
    yield {"result": "miss"}, snapshot.cache.num_misses


def _name_lookups(snapshot: Snapshot) -> _Samples:
    metadata = snapshot.metadata
    yield {"result": "hit"}, metadata.num_hits
    yield {"result": "negative_hit"}, metadata.num_negative_hits
    yield {"result": "miss"}, metadata.num_lookups - metadata.num_hits - metadata.num_negative_hits


def _row(
    name: str, kind: Literal["counter", "gauge"], read: Callable[[Snapshot], float], text: str
) -> Metric:
    return Metric(f"trainmount_{name}", kind, text, _one(read))


METRICS: Final = (
    Metric(
        "trainmount_info",
        "gauge",
        "1; the label says which volume is mounted.",
        lambda snapshot: [({"source": snapshot.source}, 1)],
    ),
    _row(
        "start_time_seconds",
        "gauge",
        lambda snapshot: snapshot.start_time_seconds,
        "When the daemon started, in seconds since the epoch.",
    ),
    _row(
        "resident_memory_bytes",
        "gauge",
        lambda snapshot: snapshot.resident_bytes,
        "Memory of the daemon as the kernel counts it (RSS).",
    ),
    # Requests.
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
    _row(
        "requests_in_progress",
        "gauge",
        lambda snapshot: snapshot.requests.num_in_progress,
        "Requests that are being answered.",
    ),
    _row(
        "open_inodes",
        "gauge",
        lambda snapshot: snapshot.num_open_inodes,
        "Files and directories that programs have open.",
    ),
    # Names.
    Metric(
        "trainmount_name_lookups_total",
        "counter",
        "Names that were asked for; a hit is answered by what is known, as there or as not there.",
        _name_lookups,
    ),
    _row(
        "store_stats_total",
        "counter",
        lambda snapshot: snapshot.metadata.num_stats,
        "Single names that the store was asked for.",
    ),
    _row(
        "store_list_pages_total",
        "counter",
        lambda snapshot: snapshot.metadata.num_pages,
        "Pages of directories that the store was asked for.",
    ),
    _row(
        "hidden_names",
        "gauge",
        lambda snapshot: snapshot.metadata.num_hidden,
        "Names in the volume that no file system can show.",
    ),
    # Reading.
    Metric(
        "trainmount_cache_reads_total",
        "counter",
        "Reads of the block cache; a hit needed nothing from the store.",
        _cache_reads,
    ),
    _row(
        "cache_bytes",
        "gauge",
        lambda snapshot: snapshot.cache.cached_bytes,
        "Blocks on disk, of all mounts that share the directory.",
    ),
    _row(
        "cache_space_bytes",
        "gauge",
        lambda snapshot: snapshot.cache.space_bytes,
        "Space that they take.",
    ),
    _row(
        "cache_limit_bytes",
        "gauge",
        lambda snapshot: snapshot.cache.limit_bytes,
        "Upper bound of that space (--cache-size).",
    ),
    _row(
        "cache_fetched_bytes_total",
        "counter",
        lambda snapshot: snapshot.cache.fetched_bytes,
        "Bytes that the store sent into the cache.",
    ),
    _row(
        "cache_evicted_bytes_total",
        "counter",
        lambda snapshot: snapshot.cache.evicted_bytes,
        "Bytes that this mount threw out of the cache.",
    ),
    _row(
        "cache_dropped_bytes_total",
        "counter",
        lambda snapshot: snapshot.cache.dropped_bytes,
        "Bytes fetched and not kept, since the disk was too slow, too full or broken.",
    ),
    _row(
        "cache_bad_blocks_total",
        "counter",
        lambda snapshot: snapshot.cache.num_bad_blocks,
        "Blocks whose bytes on disk were not what had been written; each was fetched again.",
    ),
    _row(
        "prefetched_bytes_total",
        "counter",
        lambda snapshot: snapshot.prefetch.prefetched_bytes,
        "Bytes asked for ahead of any read.",
    ),
    _row(
        "prefetch_used_bytes_total",
        "counter",
        lambda snapshot: snapshot.prefetch.used_bytes,
        "Of those, the ranges that a read reached.",
    ),
    _row(
        "prefetch_wasted_bytes_total",
        "counter",
        lambda snapshot: snapshot.prefetch.wasted_bytes,
        "Of those, the ranges that no read had reached when their file was closed.",
    ),
    _row(
        "pushed_bytes_total",
        "counter",
        lambda snapshot: snapshot.prefetch.pushed_bytes,
        "Bytes put into the kernel's pages ahead of any read.",
    ),
    # Memory.
    _row(
        "memory_bytes",
        "gauge",
        lambda snapshot: snapshot.memory.used_bytes,
        "Memory for bytes on their way that is taken.",
    ),
    _row(
        "memory_peak_bytes",
        "gauge",
        lambda snapshot: snapshot.memory.peak_bytes,
        "The most that was taken at once.",
    ),
    _row(
        "memory_limit_bytes",
        "gauge",
        lambda snapshot: snapshot.memory.limit_bytes,
        "Upper bound of it (--memory).",
    ),
    _row(
        "memory_waits_total",
        "counter",
        lambda snapshot: snapshot.memory.num_waits,
        "Transfers that had to wait for memory.",
    ),
    # Writing.
    Metric(
        "trainmount_local_files",
        "gauge",
        "Files whose last bytes are only here: dirty ones are to be uploaded, failed ones could "
        "not be and are kept.",
        _local_files,
    ),
    Metric("trainmount_local_bytes", "gauge", "The bytes of these files.", _local_bytes),
    _row(
        "uploads_total",
        "counter",
        lambda snapshot: snapshot.writing.num_uploads,
        "Uploads that ended well.",
    ),
    _row(
        "upload_errors_total",
        "counter",
        lambda snapshot: snapshot.writing.num_upload_errors,
        "Uploads that failed.",
    ),
    _row(
        "uploaded_bytes_total",
        "counter",
        lambda snapshot: snapshot.writing.uploaded_bytes,
        "Bytes of uploads that ended well.",
    ),
    _row(
        "streamed_bytes_total",
        "counter",
        lambda snapshot: snapshot.writing.streamed_bytes,
        "Bytes sent while their files were still being written.",
    ),
    _row(
        "conflicts_total",
        "counter",
        lambda snapshot: snapshot.writing.num_conflicts,
        "Files put beside a later version of the store.",
    ),
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
