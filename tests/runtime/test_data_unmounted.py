"""Files through the volume client: requests, the cache over epochs and processes, full disks."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trainmount.data import DataLoader, UCVolumeDataset
from trainmount.errors import DamagedFile, DataError, MissingFile
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.server.settings import ServerSettings

VOLUME = "/Volumes/main/default/files"
DEADLINE_SECONDS = 30.0
LONG_AGO = 1_600_000_000

MakeFiles = Callable[[Path, int], list[str]]


@dataclass
class Served:
    """A local Files API server and the directory behind `VOLUME`."""

    server: LocalServer
    directory: Path

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """The requests of the block by route; complete when it has ended."""
        before = Counter(self.server.statistics()["requests"])
        counted: Counter[str] = Counter()
        yield counted
        counted.update(Counter(self.server.statistics()["requests"]) - before)

    def make_old(self, name: str) -> None:
        """Let the files of a directory have been written long ago."""
        for path in (self.directory / name).iterdir():
            os.utime(path, (LONG_AGO, LONG_AGO))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    settings = ServerSettings(directory=root, token="secret", volumes=("main.default.files",))
    with LocalServer(settings) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABRICKS_HOST", server.url)
        patch.setenv("DATABRICKS_TOKEN", "secret")
        patch.setenv("DATABRICKS_CONFIG_FILE", os.devnull)
        yield Served(server, root / "main" / "default" / "files")


@pytest.fixture
def files(served: Served, request: pytest.FixtureRequest, make_files: MakeFiles) -> Path:
    """A directory of ten old files, named after the test."""
    directory = served.directory / request.node.name.partition("[")[0]
    make_files(directory, 10)
    served.make_old(directory.name)
    return directory


def over(directory: Path, tmp_path: Path, **options: Any) -> UCVolumeDataset:
    return UCVolumeDataset(
        f"{VOLUME}/{directory.name}", **{"cache_dir": str(tmp_path / "cache"), **options}
    )


def contents(files: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(files.iterdir())]


def read_all(paths: list[list[str]]) -> list[bytes]:
    """What a worker does with the paths that it is given: reads them."""
    return [Path(path).read_bytes() for path in paths]


def test_a_file_is_one_request_and_once_it_is_cached_a_question(
    served: Served, files: Path, tmp_path: Path
) -> None:
    dataset = over(files, tmp_path)
    with served.counting() as requests:
        assert [Path(path).read_bytes() for path in dataset] == contents(files)
    assert requests == {"get_file": 10}
    with served.counting() as requests:
        assert [Path(path).read_bytes() for path in dataset] == contents(files)
    assert requests == {"head_file": 10}
    with served.counting() as requests:
        assert list(over(files, tmp_path, item="bytes")) == contents(files)
    assert requests == {"list_directory": 1, "head_file": 10}


def test_a_file_that_was_written_anew_is_read_anew(
    served: Served, files: Path, tmp_path: Path
) -> None:
    dataset = over(files, tmp_path, item="bytes")
    assert list(dataset) == contents(files)
    (files / "f004").write_bytes(b"other bytes.."[: (files / "f004").stat().st_size])
    with served.counting() as requests:
        assert list(dataset) == contents(files)
    assert requests["get_file"] == 1
    (files / "f004").write_bytes(b"longer than it was listed")
    with pytest.raises(DamagedFile, match="f004 had 13 bytes when it was listed, now 25"):
        list(dataset)


def test_a_change_within_the_second_of_the_stores_clock_is_seen(
    files: Path, tmp_path: Path
) -> None:
    os.utime(files / "f003")  # written just now: another write may get the same time
    dataset = over(files, tmp_path, item="bytes")
    assert list(dataset) == contents(files)
    found = (files / "f003").stat()
    (files / "f003").write_bytes(b"x" * found.st_size)
    os.utime(files / "f003", ns=(found.st_atime_ns, found.st_mtime_ns))
    assert list(dataset)[3] == b"x" * found.st_size


def test_the_position_does_not_depend_on_how_files_are_reached(files: Path, tmp_path: Path) -> None:
    loader = DataLoader(over(files, tmp_path, shuffle=True), 3, num_workers=1)
    batches = iter(loader)
    delivered = [Path(path).read_bytes() for _ in range(2) for path in next(batches)]
    mounted = DataLoader(UCVolumeDataset(str(files), shuffle=True), 3, num_workers=0)
    mounted.load_state_dict(loader.state_dict())
    delivered += [Path(path).read_bytes() for batch in mounted for path in batch]
    assert sorted(delivered) == sorted(contents(files))


def test_a_stream_needs_no_more_than_two_copies(files: Path, tmp_path: Path) -> None:
    for path in over(files, tmp_path, cache_size_bytes=0, read_ahead_bytes=0):
        assert Path(path).stat().st_size == len(Path(path).read_bytes())
        assert len(list((tmp_path / "cache").glob("owner-*/*/*-f*"))) <= 2


def test_a_file_that_is_gone_and_a_directory_that_never_was_are_told(
    files: Path, tmp_path: Path
) -> None:
    dataset = over(files, tmp_path)
    (files / "f001").unlink()
    with pytest.raises(MissingFile, match="/f001 was listed and is gone"):
        list(dataset)
    assert dataset.describe == f"volume client for {VOLUME}/{files.name}, not mounted here"
    with pytest.raises(DataError, match=f"cannot list {VOLUME}/never"):
        UCVolumeDataset(f"{VOLUME}/never")


def test_a_file_in_quarantine_is_asked_for_once_and_never_again(
    served: Served, files: Path, tmp_path: Path
) -> None:
    dataset = over(files, tmp_path, on_error="quarantine", cache_size_bytes=0, shuffle=True)
    (files / "f001").unlink()
    loader = DataLoader(dataset, 2, num_workers=2)
    with served.counting() as requests:
        assert sum(len(batch) for batch in loader) == 9
    assert requests == {"get_file": 10}
    for _ in range(2):
        with served.counting() as requests:
            assert sum(len(batch) for batch in loader) == 9
        assert requests == {"get_file": 9}
    assert list(loader.quarantined) == ["f001"]


# In a program of its own: a forkserver that was started before has the environment of that time.
STARTED = """
import sys
from pathlib import Path
from trainmount.data import DataLoader, UCVolumeDataset

def read_all(paths):
    return [Path(path).read_bytes() for path in paths]

if __name__ == "__main__":
    path, cache, method, content = sys.argv[1:]
    dataset = UCVolumeDataset(path, cache_dir=cache)
    assert next(iter(dataset)).endswith("-f000")
    loader = DataLoader(
        dataset, 4, num_workers=2, collate_fn=read_all, multiprocessing_context=method
    )
    for _ in range(2):
        assert b"".join(data for batch in loader for data in batch).hex() == content
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_client_that_the_parent_has_used_serves_workers_of_every_start_method(
    method: str, files: Path, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(STARTED)
    content = b"".join(contents(files)).hex()
    arguments = [f"{VOLUME}/{files.name}", str(tmp_path / "cache"), method, content]
    subprocess.run([sys.executable, str(program), *arguments], check=True, timeout=120)


def test_workers_and_ranks_share_one_cache(served: Served, files: Path, tmp_path: Path) -> None:
    loader = DataLoader(over(files, tmp_path, shuffle=True), 2, num_workers=2, collate_fn=read_all)
    with served.counting() as requests:
        assert sorted(data for batch in loader for data in batch) == sorted(contents(files))
    assert requests["get_file"] == 10
    other_rank = DataLoader(over(files, tmp_path), 5, num_workers=1, collate_fn=read_all)
    with served.counting() as requests:
        assert [data for batch in other_rank for data in batch] == contents(files)
        assert sorted(data for batch in loader for data in batch) == sorted(contents(files))
    assert requests["get_file"] == 0


@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_path_can_be_read_when_it_is_delivered_however_small_the_cache(
    num_workers: int, files: Path, tmp_path: Path
) -> None:
    loader = DataLoader(
        over(files, tmp_path, cache_size_bytes=15, shuffle=True), 3, num_workers=num_workers
    )
    for _ in range(2):
        delivered = [Path(path).read_bytes() for batch in loader for path in batch]
        assert sorted(delivered) == sorted(contents(files))
    stored = sum(path.stat().st_size for path in (tmp_path / "cache" / "objects").iterdir())
    assert stored <= 15
    handed_out = [*(tmp_path / "cache").glob("owner-*/run-*/*")]
    assert handed_out == []


def test_leaving_early_leaves_no_copies_behind(files: Path, tmp_path: Path) -> None:
    loader = DataLoader(over(files, tmp_path, cache_size_bytes=0), 2, num_workers=2)
    for _ in range(3):
        first = next(iter(loader))
        assert [Path(path).read_bytes() for path in first] == contents(files)[:2]
    assert sorted(Path(path).read_bytes() for batch in loader for path in batch) == sorted(
        contents(files)
    )
    assert [*(tmp_path / "cache").glob("owner-*/run-*/*")] == []


def test_torch_s_own_loader_can_read_what_its_workers_prefetched(
    files: Path, tmp_path: Path
) -> None:
    from torch.utils.data import DataLoader as TorchDataLoader

    loader = TorchDataLoader(over(files, tmp_path), num_workers=2, batch_size=None)
    assert sorted(Path(path).read_bytes() for path in loader) == sorted(contents(files))


def test_a_worker_reads_its_queued_batches_ahead(
    served: Served, files: Path, tmp_path: Path
) -> None:
    # The first file is slow to come: by then the worker has read the nine others ahead.
    served.server.inject(Fault(route="get_file", path="*/f000", latency_ms=1500))
    try:
        loader = DataLoader(
            over(files, tmp_path), 1, num_workers=1, prefetch_factor=10, collate_fn=read_all
        )
        with served.counting() as requests:
            batches = iter(loader)
            deadline = time.monotonic() + DEADLINE_SECONDS
            before = served.server.statistics()["requests"]["get_file"]
            first = next(batches)
            while served.server.statistics()["requests"]["get_file"] < before + 10:
                assert time.monotonic() < deadline
                time.sleep(0.005)
        assert requests["get_file"] == 10
        assert [first[0], *(batch[0] for batch in batches)] == contents(files)
    finally:
        served.server.inject()


def test_an_explicit_list_is_not_listed(served: Served, files: Path, tmp_path: Path) -> None:
    with served.counting() as requests:
        dataset = over(files, tmp_path, files=["f007", "f002"], item="bytes")
        assert list(dataset) == [contents(files)[7], contents(files)[2]]
    assert requests == {"head_file": 2, "get_file": 2}


def test_a_listing_is_recorded_in_the_volume_itself(
    served: Served, files: Path, tmp_path: Path
) -> None:
    recorded = f"{VOLUME}/listings/{files.name}.jsonl"
    first = over(files, tmp_path, manifest=recorded)
    (files / "zz").write_bytes(b"new")
    with served.counting() as requests:
        assert over(files, tmp_path, manifest=recorded).manifest.entries == first.manifest.entries
    assert requests["list_directory"] == 0


def test_with_an_inventory_the_first_sample_needs_no_listing_and_the_state_is_that_of_one(
    served: Served, files: Path, tmp_path: Path
) -> None:
    inventory = tmp_path / "inventory.jsonl"
    sizes = {path.name: path.stat().st_size for path in sorted(files.iterdir())}
    inventory.write_text(
        "".join(json.dumps({"path": name, "size": size}) + "\n" for name, size in sizes.items())
    )
    with served.counting() as requests:
        options = {"manifest": str(inventory), "shuffle": True, "read_ahead_bytes": 0}
        loader = DataLoader(over(files, tmp_path, **options), 1, num_workers=0)
        [first] = [Path(path).read_bytes() for path in next(iter(loader))]
    assert requests == {"head_file": 1, "get_file": 1}
    listed = DataLoader(over(files, tmp_path, shuffle=True), 1, num_workers=0)
    listed.load_state_dict(loader.state_dict())
    rest = [Path(path).read_bytes() for batch in listed for path in batch]
    assert sorted([first, *rest]) == sorted(contents(files))


def test_a_copy_that_the_disk_has_damaged_is_fetched_again(
    served: Served, files: Path, tmp_path: Path
) -> None:
    import zlib

    checksums = {
        path.name: f"crc32:{zlib.crc32(path.read_bytes()):08x}" for path in files.iterdir()
    }
    dataset = over(files, tmp_path, checksums=checksums)
    assert [Path(path).read_bytes() for path in dataset] == contents(files)
    for stored in (tmp_path / "cache" / "objects").iterdir():
        data = bytearray(stored.read_bytes())
        data[0] ^= 1
        stored.write_bytes(data)
    with served.counting() as requests:
        assert [Path(path).read_bytes() for path in dataset] == contents(files)
    assert requests["get_file"] == 10


def test_a_cache_directory_that_cannot_be_made_is_told(files: Path, tmp_path: Path) -> None:
    (tmp_path / "occupied").write_bytes(b"")
    with pytest.raises(DataError, match=r"have no place: .*; set cache_dir"):
        over(files, tmp_path, cache_dir=str(tmp_path / "occupied"))


KILLED = """
import json, multiprocessing, sys, time
from trainmount.data import DataLoader, UCVolumeDataset
dataset = UCVolumeDataset(sys.argv[1], cache_dir=sys.argv[2])
loader = DataLoader(dataset, 2, num_workers=2)
paths = next(iter(loader))
workers = [child.pid for child in multiprocessing.active_children()]
print(json.dumps([paths, workers]), flush=True)
time.sleep(600)
"""


def test_copies_of_a_job_that_was_killed_are_gone_and_its_files_are_found_again(
    served: Served, files: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    job = subprocess.Popen(
        [sys.executable, "-c", KILLED, f"{VOLUME}/{files.name}", str(cache)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    with job.stdout:
        copies, workers = json.loads(job.stdout.readline())
        for pid in (job.pid, *workers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait()
    assert all(Path(copy).exists() for copy in copies)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(Path(copy).exists() for copy in copies):
        assert time.monotonic() < deadline, "the workers' locks end with them"
        dataset = over(files, tmp_path)
    with served.counting() as requests:
        assert [Path(path).read_bytes() for path in dataset] == contents(files)
    assert requests["head_file"] >= 2
    assert requests["get_file"] + requests["head_file"] == 10
    del dataset
    assert list(cache.glob("o*")) == []


def test_a_full_disk_is_told_by_name(files: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=_read_on_full_disk, args=(files, tmp_path, answers))
    process.start()
    told = answers.get()
    process.join()
    assert "/f000 (9 bytes) cannot be copied to this machine: file too large" in told
    assert "make room or set cache_dir" in told


def _read_on_full_disk(files: Path, tmp_path: Path, answers: Any) -> None:
    import resource

    dataset = over(files, tmp_path)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, 8))  # of any file: the nearest to a full disk
    try:
        next(iter(dataset))
    except DataError as error:
        answers.put(str(error))
