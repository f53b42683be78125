"""Local copies: bounded, shared by processes, never lost while in use, gone after their owners."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainmount.data.cache import FileCache


def opened(root: Path, limit_bytes: int) -> FileCache:
    cache = FileCache(limit_bytes, root)
    cache.open()
    return cache


def store(cache: FileCache, key: str, size_bytes: int = 10) -> Path:
    """A copy of a new file, kept as an object too where there is room."""
    copy = cache.new_path("name.png")
    copy.write_bytes(b"." * size_bytes)
    cache.keep(copy, key)
    return copy


def keys(cache: FileCache, *names: str) -> list[str]:
    return [name for name in names if cache.has(name)]


def object_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in (root / "objects").iterdir())


def test_an_object_is_found_by_all_who_have_the_directory(tmp_path: Path) -> None:
    one, other = opened(tmp_path, 100), opened(tmp_path, 100)
    store(one, "k")
    assert other.read("k") == b"." * 10
    copy = other.take("k", "photo.jpg")
    assert copy is not None
    assert copy.name.endswith("-photo.jpg")
    assert other.take("absent", "x") is None
    assert other.read("absent") is None


def test_what_was_handed_out_outlives_its_object(tmp_path: Path) -> None:
    cache = opened(tmp_path, 20)
    used = cache.hand_out(str(store(cache, "k")), "run-1")
    cache.drop("k")
    assert not cache.has("k")
    assert Path(used).read_bytes() == b"." * 10
    cache.release([used])
    assert not Path(used).exists()


def test_an_iteration_that_is_abandoned_leaves_no_copies(tmp_path: Path) -> None:
    cache = opened(tmp_path, 0)
    left = [cache.hand_out(str(store(cache, f"k{number}")), "run-1") for number in range(3)]
    going_on = cache.hand_out(str(store(cache, "k")), "run-2")
    cache.abandon("run-1")
    assert [Path(path).exists() for path in (*left, going_on)] == [False, False, False, True]


def test_objects_stay_within_the_bound_whoever_stores_them(tmp_path: Path) -> None:
    caches = [opened(tmp_path, 55), opened(tmp_path, 55)]
    for number in range(20):
        store(caches[number % 2], f"k{number}").unlink()
        assert object_bytes(tmp_path) <= 55
    assert object_bytes(tmp_path) == 50


def test_epochs_longer_than_the_bound_find_again_what_is_stored(tmp_path: Path) -> None:
    cache = opened(tmp_path, 50)
    hits = []
    for _ in range(3):
        cache.begin_epoch()
        found = keys(cache, *(f"k{number}" for number in range(10)))
        for name in (f"k{number}" for number in range(10)):
            copy = cache.take(name, "x") or store(cache, name)
            copy.unlink()
        hits.append(len(found))
    assert hits == [0, 5, 5]


def test_what_no_epoch_uses_any_more_makes_room_the_longest_unused_first(tmp_path: Path) -> None:
    cache = opened(tmp_path, 30)
    for number, name in enumerate(("a", "b", "c")):
        store(cache, name).unlink()
        os.utime(tmp_path / "objects" / name, (number, number))
    cache.begin_epoch()
    store(cache, "d").unlink()
    assert keys(cache, "a", "b", "c", "d") == ["b", "c", "d"]
    assert cache.read("b") is not None  # used now
    cache.begin_epoch()
    store(cache, "e").unlink()
    store(cache, "f").unlink()
    assert keys(cache, "b", "c", "d", "e", "f") == ["b", "d", "e"]


def test_an_object_with_a_copy_in_use_is_not_evicted_for_nothing(tmp_path: Path) -> None:
    cache = opened(tmp_path, 20)
    used = store(cache, "a")
    store(cache, "b").unlink()
    for name in ("a", "b"):
        os.utime(tmp_path / "objects" / name, (1, 1))
    store(cache, "c").unlink()
    assert keys(cache, "a", "b", "c") == ["a", "c"]
    assert used.exists()


def test_with_a_limit_of_nothing_nothing_is_kept(tmp_path: Path) -> None:
    cache = opened(tmp_path, 0)
    store(cache, "k")
    cache.keep_bytes(b"...", "other")
    assert keys(cache, "k", "other") == []


def test_a_full_disk_gives_up_objects_for_what_is_needed_now(tmp_path: Path) -> None:
    cache = opened(tmp_path, 100)
    store(cache, "old").unlink()
    attempts = []

    def write() -> None:
        attempts.append(cache.has("old"))
        if attempts[-1]:
            raise OSError(errno.ENOSPC, "No space left on device")

    cache.making_room(10, write)
    assert attempts == [True, False]
    with pytest.raises(OSError, match="No space left"):
        cache.making_room(10, lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))


def _store_many(cache: FileCache, number: int) -> None:
    for index in range(50):
        store(cache, f"{number}-{index}", 7).unlink()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_that_store_at_once_count_rightly(method: str, tmp_path: Path) -> None:
    cache = opened(tmp_path, 1000)
    context = multiprocessing.get_context(method)
    processes = [context.Process(target=_store_many, args=(cache, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    # 150 files of 7 bytes were stored, and 142 of them are the most that fit.
    assert object_bytes(tmp_path) == 142 * 7
    assert int.from_bytes((tmp_path / ".total").read_bytes(), "little") == 142 * 7


KILLED = """
import os, sys
from pathlib import Path
from trainmount.data.cache import FileCache
cache = FileCache(1000, Path(sys.argv[1]))
cache.open()
copy = cache.new_path("x")
copy.write_bytes(b"12345")
cache.keep(copy, "k")
cache.hand_out(str(copy), "run-1")
os.kill(os.getpid(), 9)
"""


def test_a_process_forked_in_the_midst_of_storing_keeps_nobody_waiting(tmp_path: Path) -> None:
    """It has the lock's descriptor too, and for as long as it lives."""
    cache = opened(tmp_path, 100)
    until, end = os.pipe()
    with cache._total():
        child = os.fork()
        if child == 0:
            os.close(end)
            os.read(until, 1)
            os._exit(0)
    try:
        with (tmp_path / ".total").open("rb") as total:
            # Raises where somebody has it.
            fcntl.flock(total, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store(cache, "a")
        assert cache.has("a")
    finally:
        os.close(end)
        os.close(until)
        os.waitpid(child, 0)


def test_the_next_start_takes_over_what_a_killed_job_left(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    abandoned = list(tmp_path.glob("owner-*"))
    assert len(abandoned) == 1
    (tmp_path / ".total").unlink()
    cache = opened(tmp_path, 1000)
    assert not abandoned[0].exists()
    assert cache.read("k") == b"12345"
    assert int.from_bytes((tmp_path / ".total").read_bytes(), "little") == 5


def test_objects_go_with_the_last_one_who_uses_them(tmp_path: Path) -> None:
    one, other = opened(tmp_path, 100), opened(tmp_path, 100)
    store(one, "k")
    del one
    assert other.has("k")
    assert len(list(tmp_path.glob("owner-*"))) == 1
    del other
    assert sorted(path.name for path in tmp_path.iterdir()) == [".total", ".users"]


def test_a_directory_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a directory away")
    os.chown(tmp_path, 1, 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        FileCache(10, tmp_path).open()


def test_who_starts_at_the_same_moment_does_not_take_an_owner_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[FileCache] = []
    lock = fcntl.flock

    def lock_late(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not others:
            others.append(FileCache(100, tmp_path))
            others[0].open()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    cache = opened(tmp_path, 100)
    assert len(others) == 1
    assert Path(cache.hand_out(str(store(cache, "k")), "run-1")).read_bytes() == b"." * 10


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}", "\udcff"])
def test_a_copy_of_a_file_with_a_long_name_has_a_name_that_fits(
    letter: str, tmp_path: Path
) -> None:
    name = letter * ((255 - 4) // len(os.fsencode(letter))) + ".png"
    cache = opened(tmp_path, 100)
    copy = cache.new_path(name)
    copy.write_bytes(b".")
    assert copy.name.endswith(f"{letter}.png")


def test_where_there_is_no_room_for_another_name_a_file_is_delivered_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened(tmp_path, 100)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(full))
    assert store(cache, "k").read_bytes() == b"." * 10
    assert keys(cache, "k") == []
    assert object_bytes(tmp_path) == 0


def test_copies_are_found_wherever_the_program_has_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache = opened(Path("copies"), 100)
    monkeypatch.chdir("/")
    assert Path(cache.hand_out(str(store(cache, "k")), "run-1")).read_bytes() == b"." * 10
