"""Files are loaded ahead by threads, in order, within a bound, and only where that is faster."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from trainmount.data import sources
from trainmount.data.manifest import Entry
from trainmount.data.read_ahead import ReadAhead
from trainmount.errors import DamagedFile, MissingFile

DEADLINE_SECONDS = 30.0


class Files:
    """Loads numbers as strings, remembers who did, and can be held up."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.loaded: list[int] = []
        self.by: dict[int, str] = {}
        self.dropped: list[str] = []
        self.may_load = threading.Event()
        self.may_load.set()
        self._seconds = seconds

    def load(self, number: int, _reads: bool) -> str:
        assert self.may_load.wait(DEADLINE_SECONDS)
        time.sleep(self._seconds)
        self.by[number] = threading.current_thread().name
        self.loaded.append(number)
        if number < 0:
            raise ValueError(f"no file {number}")
        return str(number)

    def ahead(self, limit_bytes: int = 30, *, is_always_slow: bool = True) -> ReadAhead[str]:
        return ReadAhead(
            self.load,
            lambda _number: 10,
            self.dropped.append,
            limit_bytes=limit_bytes,
            is_always_slow=is_always_slow,
        )

    def wait_loaded(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(self.loaded) < count:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_the_next_files_are_loaded_before_they_are_asked_for() -> None:
    files = Files()
    ahead = files.ahead()
    ahead.expect(range(10))
    files.wait_loaded(3)
    assert sorted(files.loaded) == [0, 1, 2]
    assert ahead.take(0) == "0"
    files.wait_loaded(4)
    assert sorted(files.loaded) == [0, 1, 2, 3]
    assert [ahead.take(number) for number in range(1, 10)] == [str(n) for n in range(1, 10)]
    assert set(files.by.values()) == {"trainmount-read-ahead"}


def test_several_are_on_their_way_at_once() -> None:
    files = Files()
    together = threading.Barrier(3)
    ahead: ReadAhead[str] = ReadAhead(
        lambda number, _: f"{number} of {together.wait(DEADLINE_SECONDS) >= 0}",
        lambda _number: 1,
        files.dropped.append,
        limit_bytes=100,
        is_always_slow=True,
    )
    ahead.expect([7, 8, 9])
    assert ahead.take(7) == "7 of True"


def test_a_file_larger_than_the_bound_is_loaded_ahead_alone() -> None:
    files = Files()
    ahead = files.ahead(limit_bytes=5)
    ahead.expect(range(4))
    assert ahead.take(0) == "0"
    files.wait_loaded(2)
    assert [ahead.take(number) for number in (1, 2, 3)] == ["1", "2", "3"]


def test_an_error_comes_with_its_file_and_the_others_go_on() -> None:
    ahead = Files().ahead()
    ahead.expect([1, -2, 3])
    assert ahead.take(1) == "1"
    with pytest.raises(ValueError, match="no file -2"):
        ahead.take(-2)
    assert ahead.take(3) == "3"


def test_what_was_loaded_in_vain_is_given_back() -> None:
    files = Files()
    files.may_load.clear()
    ahead = files.ahead()
    ahead.expect(range(3))
    ahead.forget()
    files.may_load.set()
    ahead.expect([5])
    assert ahead.take(5) == "5"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while sorted(files.dropped) != sorted(str(n) for n in files.loaded if n != 5):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_file_that_nobody_expected_is_loaded_by_who_takes_it() -> None:
    files = Files()
    ahead = files.ahead()
    assert ahead.take(4) == "4"
    assert files.by == {4: threading.current_thread().name}


def test_threads_begin_with_a_slow_file_and_end_with_many_fast_ones() -> None:
    files = Files()
    ahead = files.ahead(is_always_slow=False)
    ahead.expect(range(200))
    # Fast ones are loaded by who takes them; a busy machine may make one slow.
    assert ahead.take(0) == "0"
    slow = Files(seconds=0.02)
    behind = slow.ahead(is_always_slow=False)
    behind.expect(range(6))
    assert [behind.take(number) for number in range(6)] == list("012345")
    assert slow.by[0] == threading.current_thread().name
    assert {slow.by[number] for number in range(1, 6)} == {"trainmount-read-ahead"}


def test_without_bytes_nothing_is_read_ahead() -> None:
    files = Files(seconds=0.02)
    ahead = files.ahead(limit_bytes=0, is_always_slow=False)
    ahead.expect(range(3))
    assert [ahead.take(number) for number in range(3)] == ["0", "1", "2"]
    assert set(files.by.values()) == {threading.current_thread().name}


def test_on_a_mount_that_reads_ahead_the_names_of_paths_are_looked_up_and_no_file_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").write_bytes(b"12345")
    opened: list[str] = []
    real = os.open

    def note(path: str, flags: int) -> int:
        opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(sources.os, "open", note)
    for kind, expected in (("ext4", [f"{tmp_path}/here"]), ("fuse.trainmount", [])):
        monkeypatch.setattr(sources, "_mount_type", lambda _directory, kind=kind: kind)
        source = sources.DirectorySource(tmp_path)
        opened.clear()
        assert source.path(Entry("here", 5), reads=True) == f"{tmp_path}/here"
        assert opened == expected
        with pytest.raises(MissingFile, match="gone"):
            source.path(Entry("gone", 5), reads=True)
        with pytest.raises(DamagedFile, match="here"):
            source.path(Entry("here", 6), reads=True)
