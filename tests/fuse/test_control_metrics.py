"""The table of metrics: its text format, and its page in the documents."""

from __future__ import annotations

import re
from pathlib import Path

from trainmount_fuse.cache.statistics import CacheStatistics
from trainmount_fuse.control.metrics import METRICS, Snapshot, metrics_table, metrics_text
from trainmount_fuse.memory import MemoryStatistics
from trainmount_fuse.names.metadata import MetadataStatistics
from trainmount_fuse.reads.prefetch import PrefetchStatistics
from trainmount_fuse.request_counts import RequestCounter
from trainmount_fuse.writes.staging import WritingStatistics

PAGE = Path(__file__).resolve().parents[2] / "docs" / "METRICS.md"

SAMPLE = re.compile(r'^(\w+)(\{(\w+="(\\.|[^"\\])*",?)+\})? -?[0-9.]+(e[+-]?\d+)?$')


def _numbered(kind: type, start: int):
    names = kind.__dataclass_fields__
    return kind(**{name: start + number for number, name in enumerate(names)})


def _text() -> str:
    counter = RequestCounter()
    for seconds in (0.00005, 0.002, 50.0):
        counter.note("read", int(seconds * 1e9))
    counter.note_error("lookup", 2)
    return metrics_text(
        Snapshot(
            source='/Volumes/a"b\\c\n',
            start_time_seconds=12.5,
            resident_bytes=7,
            num_open_inodes=3,
            requests=counter.statistics(),
            metadata=_numbered(MetadataStatistics, 100),
            cache=_numbered(CacheStatistics, 200),
            prefetch=_numbered(PrefetchStatistics, 300),
            memory=_numbered(MemoryStatistics, 400),
            writing=_numbered(WritingStatistics, 500),
        )
    )


def test_every_line_is_one_that_prometheus_takes() -> None:
    text = _text()
    assert text.endswith("\n")
    for line in text.splitlines():
        assert line.startswith(("# HELP ", "# TYPE ")) or SAMPLE.match(line), line
    for metric in METRICS:
        assert text.count(f"# TYPE {metric.name} {metric.kind}\n") == 1
        assert metric.kind != "counter" or metric.name.endswith("_total")


def test_a_histogram_is_cumulative_and_ends_with_all() -> None:
    text = _text()
    name = "trainmount_request_duration_seconds"
    assert f'{name}_bucket{{operation="read",le="0.0001"}} 1\n' in text
    assert f'{name}_bucket{{operation="read",le="0.003"}} 2\n' in text
    assert f'{name}_bucket{{operation="read",le="30"}} 2\n' in text
    assert f'{name}_bucket{{operation="read",le="+Inf"}} 3\n' in text
    assert f'{name}_count{{operation="read"}} 3\n' in text
    assert f'{name}_sum{{operation="read"}} 50.00205\n' in text


def test_labels_are_escaped_and_errors_have_their_names() -> None:
    text = _text()
    assert 'trainmount_info{source="/Volumes/a\\"b\\\\c\\n"} 1\n' in text
    assert 'trainmount_request_errors_total{operation="lookup",errno="ENOENT"} 1\n' in text


def test_the_page_of_the_metrics_has_the_table() -> None:
    assert metrics_table() in PAGE.read_text(encoding="utf-8")
