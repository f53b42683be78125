"""Counting requests: how many, how long, and how they failed."""

from __future__ import annotations

import errno

from trainmount_fuse.request_counts import BOUNDS_SECONDS, OperationCounts, RequestCounter


def test_durations_fall_into_the_class_whose_upper_end_holds_them() -> None:
    counter = RequestCounter()
    for seconds in (BOUNDS_SECONDS[0], BOUNDS_SECONDS[0] * 1.01, 29.0, 31.0):
        counter.note("read", int(seconds * 1e9))
    counts = counter.statistics().operations["read"]
    assert counts.num_requests == 4
    assert counts.num_by_duration == (1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1)
    assert abs(counts.total_seconds - 60.000201) < 1e-9


def test_errors_are_counted_by_operation_and_number() -> None:
    counter = RequestCounter()
    for code in (errno.ENOENT, errno.ENOENT, errno.EIO):
        counter.note_error("lookup", code)
    assert counter.statistics().num_errors == {
        ("lookup", errno.ENOENT): 2,
        ("lookup", errno.EIO): 1,
    }


def test_a_snapshot_does_not_change() -> None:
    counter = RequestCounter()
    counter.note("open", 0)
    before = counter.statistics()
    counter.note("open", 0)
    counter.note_error("open", errno.EIO)
    assert before.operations == {"open": OperationCounts(1, 0.0, (1,) + (0,) * 12)}
    assert before.num_errors == {}
