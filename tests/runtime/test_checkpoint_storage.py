"""DCP storage on a directory: what is written, what is refused, what is removed. One process."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import json
import logging
import os
import resource
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat

from trainmount.checkpoint.checksums import CRC32
from trainmount.checkpoint.generations import SkippedGeneration, inspect_generations
from trainmount.checkpoint.layout import CommitRecord, StoredFile
from trainmount.checkpoint.stores import DirectoryStore
from trainmount.data import UCVolumeReader, UCVolumeWriter
from trainmount.errors import CheckpointError, DamagedCheckpoint, NoCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some_state(number: float = 1.0) -> dict[str, Any]:
    return {
        "weights": torch.full((300, 500), number),
        "half": torch.arange(70, dtype=torch.float32).to(torch.bfloat16) * number,
        "turned": torch.arange(12.0).reshape(3, 4).t() * number,
        "scalar": torch.tensor(number),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "nested": {"lr": 0.1 * number, "list": [torch.tensor([1, 2]), "text"]},
    }


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return all(map(is_same, one, other))
    return bool(one == other)


def blank(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None


def load(path: Path, **options: Any) -> dict[str, Any]:
    state = blank(some_state())
    dcp.load(state, storage_reader=UCVolumeReader(path, **options))
    return dict(state)


def save(path: Path, number: float = 1.0, **options: Any) -> str:
    writer = UCVolumeWriter(path, **options)
    dcp.save(some_state(number), storage_writer=writer)
    return writer.generation


@pytest.mark.parametrize(
    "options", [{}, {"thread_count": 3}, {"single_file_per_rank": False, "thread_count": 2}]
)
def test_what_was_saved_is_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path / "new" / "directory", **options)
    assert is_same(load(tmp_path / "new" / "directory"), some_state())


def test_the_commit_record_lists_every_file_with_its_size_and_is_written_last(
    tmp_path: Path,
) -> None:
    seen: list[set[str]] = []
    generation = save(
        tmp_path,
        thread_count=2,
        extra={"step": 7},
        before_commit=lambda: seen.append({path.name for path in tmp_path.glob("*/*")}),
    )
    assert seen == [{"r00000-000.bin", "r00000-001.bin"}]
    directory = tmp_path / generation
    record = CommitRecord.from_json((directory / "commit.json").read_bytes(), "here")
    assert record.extra == {"step": 7}
    assert {file.name: file.size_bytes for file in record.files} == {
        path.name: path.stat().st_size for path in directory.iterdir() if path.name != "commit.json"
    }


def test_one_writer_and_one_reader_see_each_save_anew(tmp_path: Path) -> None:
    writer, reader = UCVolumeWriter(tmp_path), UCVolumeReader(tmp_path)
    for number in (1.0, 2.0, 3.0):
        dcp.save(some_state(number), storage_writer=writer)
        state = blank(some_state())
        dcp.load(state, storage_reader=reader)
        assert is_same(state, some_state(number))


def test_the_newest_few_are_kept(tmp_path: Path) -> None:
    generations = [save(tmp_path, number, keep_last=2) for number in (1.0, 2.0, 3.0, 4.0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == generations[2:]
    assert is_same(load(tmp_path, generation=generations[2]), some_state(3.0))


def test_many_saves_leave_memory_and_disk_flat(tmp_path: Path) -> None:
    writer = UCVolumeWriter(tmp_path, keep_last=1)
    sizes = []
    logging.disable()  # pytest keeps every record, and DCP logs many
    tracemalloc.start()
    try:
        for number in range(50):
            dcp.save({"weights": torch.full((100, 100), float(number))}, storage_writer=writer)
            disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
            sizes.append((tracemalloc.get_traced_memory()[0], disk))
    finally:
        tracemalloc.stop()
        logging.disable(logging.NOTSET)
    assert sizes[-1][0] - sizes[9][0] < 200_000
    assert sizes[-1][1] == pytest.approx(sizes[0][1], rel=0.01)


def test_a_failed_writer_thread_fails_the_save_and_the_old_checkpoint_stands(
    tmp_path: Path,
) -> None:
    save(tmp_path, 1.0, thread_count=4)
    with file_size_limit(100_000), pytest.raises(CheckpointException, match="File too large"):
        save(tmp_path, 2.0, thread_count=4)
    assert len(list(tmp_path.iterdir())) == 2
    assert is_same(load(tmp_path), some_state(1.0))
    newest, oldest = inspect_generations(DirectoryStore(tmp_path))
    assert isinstance(newest, SkippedGeneration)
    assert newest.reason == "its save did not finish"
    assert isinstance(oldest, CommitRecord)
    # What the failed save left goes with the next one that is committed.
    save(tmp_path, 3.0)
    assert len(list(tmp_path.iterdir())) == 2
    found = inspect_generations(DirectoryStore(tmp_path))
    assert [type(one) for one in found] == [CommitRecord, CommitRecord]


def test_an_error_in_before_commit_fails_the_save(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointException, match="No space left"):
        save(tmp_path, before_commit=fail)
    with pytest.raises(
        CheckpointException, match=r"has no whole checkpoint .*its save did not finish"
    ):
        load(tmp_path)


def test_a_flipped_byte_is_refused_and_file_and_tensor_are_named(tmp_path: Path) -> None:
    generation = save(tmp_path)
    shard = tmp_path / generation / "r00000-000.bin"
    flip(shard, 400_000)
    with pytest.raises(CheckpointException) as failure:
        load(tmp_path)
    (cause, _) = failure.value.failures[0]
    assert isinstance(cause, DamagedCheckpoint)
    assert f"{shard} is damaged: weights does not match" in str(cause)
    assert "in the 8192 bytes from byte 393216" in str(cause)


@pytest.mark.parametrize("name", ["r00000-000.bin", "metadata"])
def test_a_cut_or_missing_file_is_refused_and_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / save(tmp_path) / name
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointException, match=f"{name} has {size - 1} bytes, {size} are recorded"
    ):
        load(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointException, match=f"{name} is missing"):
        load(tmp_path)


def test_damaged_metadata_and_records_are_refused(tmp_path: Path) -> None:
    generation = save(tmp_path)
    flip(tmp_path / generation / "metadata", 30)
    with pytest.raises(CheckpointException, match="metadata is damaged"):
        load(tmp_path)
    (tmp_path / generation / "commit.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(CheckpointException, match=r"commit.json: is not a commit record"):
        load(tmp_path)


def test_an_older_whole_checkpoint_is_taken_when_the_newest_is_not(tmp_path: Path) -> None:
    save(tmp_path, 1.0)
    newest = save(tmp_path, 2.0)
    (tmp_path / newest / "commit.json").unlink()
    assert is_same(load(tmp_path), some_state(1.0))
    with pytest.raises(CheckpointException, match="is not a committed checkpoint"):
        load(tmp_path, generation=newest)


def test_an_empty_or_missing_directory_has_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointException, match=r"has no whole checkpoint .nothing was saved there"
    ):
        load(tmp_path / "missing")


def test_overwrite_false_refuses_a_directory_with_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(CheckpointException, match="is committed and overwrite is False"):
        save(tmp_path, 2.0, overwrite=False)
    with pytest.raises(CheckpointError, match="use_collectives=False cannot be committed"):
        dcp.save(some_state(), storage_writer=UCVolumeWriter(tmp_path), use_collectives=False)


def test_saving_where_the_folder_was_removed_meanwhile_works(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    writer = UCVolumeWriter(path)
    dcp.save(some_state(), storage_writer=writer)
    for file in sorted(path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    path.rmdir()
    dcp.save(some_state(2.0), storage_writer=writer)
    assert is_same(load(path), some_state(2.0))


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in (1.0, 2.0, 3.0):
        save(tmp_path, number, keep_last=1)
    assert (tmp_path / "notes").exists()


def test_metadata_that_would_run_code_is_refused(tmp_path: Path) -> None:
    import pickle

    import xxhash

    generation = save(tmp_path)
    path = tmp_path / generation / "metadata"
    path.write_bytes(pickle.dumps(print))
    record_path = tmp_path / generation / "commit.json"
    record = CommitRecord.from_json(record_path.read_bytes(), "here")
    checksum = f"xxh3:{xxhash.xxh3_64_hexdigest(path.read_bytes())}"
    files = [file for file in record.files if file.name != "metadata"]
    files.append(StoredFile("metadata", path.stat().st_size, checksum))
    record_path.write_bytes(dataclasses.replace(record, files=tuple(files)).to_json())
    with pytest.raises(
        CheckpointException, match=r"builtins.print does not belong into checkpoint"
    ):
        load(tmp_path)


def test_the_arguments_of_torch_are_taken_or_refused_by_name(tmp_path: Path) -> None:
    taken: dict[str, Any] = {
        "single_file_per_rank": True,
        "sync_files": False,
        "thread_count": 2,
        "per_thread_copy_ahead": 0,
        "overwrite": True,
        "cache_staged_state_dict": False,
        "_extensions": [],
        "serialization_format": SerializationFormat.TORCH_SAVE,
    }
    arguments = set(inspect.signature(dcp.FileSystemWriter.__init__).parameters)
    assert arguments - {"self", "path"} == set(taken)
    save(tmp_path, **taken)
    assert is_same(load(tmp_path), some_state())
    with pytest.raises(ValueError, match=r"serialization_format: .*SAFETENSORS cannot be written"):
        UCVolumeWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)
    with pytest.raises(ValueError, match="_extensions: checkpoints store bytes as they are"):
        UCVolumeWriter(tmp_path, _extensions=[object()])
    with pytest.raises(ValueError, match="per_thread_copy_ahead must not be negative: -1"):
        UCVolumeWriter(tmp_path, per_thread_copy_ahead=-1)
    with pytest.raises(ValueError, match="_extension_registry: extensions are not read"):
        UCVolumeReader(tmp_path, _extension_registry=object())
    with pytest.raises(TypeError, match="unexpected keyword argument 'compression'"):
        UCVolumeWriter(tmp_path, compression="gzip")  # type: ignore[call-arg]
    reader_arguments = set(inspect.signature(dcp.FileSystemReader.__init__).parameters)
    assert reader_arguments <= set(inspect.signature(UCVolumeReader.__init__).parameters)


def test_a_checkpoint_of_the_first_layout_version_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainmount.checkpoint.writer.best_algorithm", lambda: CRC32)
    generation = save(tmp_path, thread_count=2)
    path = tmp_path / generation / "commit.json"
    record = json.loads(path.read_text())
    assert record["version"] == 2
    assert record["algorithm"] == "crc32"
    # As it was written then.
    del record["algorithm"], record["checksum"]
    path.write_text(json.dumps({**record, "version": 1}, indent=1) + "\n")
    assert is_same(load(tmp_path), some_state())
    flip(tmp_path / generation / "r00000-000.bin", 0)
    with pytest.raises(CheckpointException, match=r"r00000-000.bin is damaged"):
        load(tmp_path)
    path.write_text(json.dumps({**record, "version": 3}, indent=1) + "\n")
    with pytest.raises(CheckpointException, match="is not a commit record of version 1 to 2"):
        load(tmp_path)


def test_tensors_that_do_not_lie_as_they_are_stored_are_copied_in_small_pieces(
    tmp_path: Path,
) -> None:
    turned = torch.arange(6_000_000.0).reshape(2000, 3000).t()
    state = {
        "turned": turned,
        "every third": torch.arange(9_000_001)[::3],
        "conjugated": torch.full((5, 2), 1 + 2j).conj(),
        "broad": torch.arange(300_000.0).expand(4, 300_000),
    }
    tracemalloc.start()
    dcp.save(state, storage_writer=UCVolumeWriter(tmp_path, per_thread_copy_ahead=300_000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000
    found = {name: torch.zeros(one.shape, dtype=one.dtype) for name, one in state.items()}
    found["turned"] = torch.zeros(2000, 3000).t()
    dcp.load(found, storage_reader=UCVolumeReader(tmp_path))
    assert is_same(found, state)


def test_a_load_puts_values_into_another_dtype(tmp_path: Path) -> None:
    save(tmp_path)
    found = {"weights": torch.zeros(300, 500, dtype=torch.float64)}
    dcp.load(found, storage_reader=UCVolumeReader(tmp_path))
    assert torch.equal(found["weights"], torch.ones(300, 500, dtype=torch.float64))


def test_what_the_system_says_of_a_file_is_told_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / save(tmp_path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(os, "write", fail)
        with pytest.raises(CheckpointException, match=r"Input/output error: '.*/r00000-000.bin'"):
            save(tmp_path)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match=r"Input/output error: '.*/commit.json'") as told:
        list(inspect_generations(DirectoryStore(tmp_path)))
    assert told.value.filename == str(saved / "commit.json")


def test_a_checkpoint_of_more_files_than_a_process_may_open_is_loaded(tmp_path: Path) -> None:
    state = {f"t{number}": torch.tensor([number, 2.0]) for number in range(300)}
    dcp.save(state, storage_writer=UCVolumeWriter(tmp_path, single_file_per_rank=False))
    found = blank(state)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 50, before[1]))
    try:
        dcp.load(found, storage_reader=UCVolumeReader(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert is_same(found, state)


def test_wrong_arguments_are_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="thread_count must be at least 1, got 0"):
        UCVolumeWriter(tmp_path, thread_count=0)
    with pytest.raises(ValueError, match="keep_last must be at least 1, got 0"):
        UCVolumeWriter(tmp_path, keep_last=0)
    assert issubclass(NoCheckpoint, CheckpointError)


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


@contextlib.contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Writes past this size fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
