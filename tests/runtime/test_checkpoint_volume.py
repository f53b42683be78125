"""Stores of checkpoints: what goes up from where, what a lost answer comes to, who is stopped."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.runtime.small_volume import OPTIONS, TOKEN, VOLUME, Served, serving
from torch.distributed.checkpoint.api import CheckpointException

from trainmount.checkpoint import volume_store
from trainmount.checkpoint.stores import DirectoryStore, GivenUp, read_bytes
from trainmount.checkpoint.volume_store import VolumeStore, _parts
from trainmount.data import UCVolumeReader, UCVolumeWriter
from trainmount_files.errors import Unsupported
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.multipart import MultipartUpload
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.faults import Fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(tmp_path / "served") as running:
        monkeypatch.setattr(volume_store, "open_volume", running.open)
        yield running


@pytest.fixture
def store(served: Served) -> VolumeStore:
    return VolumeStore(VOLUME)


def written(store: Any, name: str, pieces: list[bytes], **options: Any) -> bytes:
    store.write(
        name,
        [memoryview(piece) for piece in pieces],
        threading.Event(),
        num_writers=1,
        is_synced=True,
        **options,
    )
    size = store.size(name)
    assert size == sum(map(len, pieces))
    return bytes(read_bytes(store, name, size))


# Parts


@pytest.mark.parametrize(
    ("lengths", "parts"),
    [
        ([], []),
        ([3], [3]),
        ([100, 100, 7], [100, 100, 7]),
        ([3, 100, 100], [10, 93, 100]),
        ([100, 3, 4], [100, 7]),
        ([4] * 12, [20, 20, 8]),
        ([100, 3, 100, 9], [100, 10, 93, 9]),
        ([12, 9, 12], [12, 10, 11]),
    ],
)
def test_large_pieces_are_parts_themselves_and_small_ones_are_joined(
    lengths: list[int], parts: list[int]
) -> None:
    content = bytes(number % 251 for number in range(sum(lengths)))
    pieces, start = [], 0
    for length in lengths:
        pieces.append(memoryview(content)[start : start + length])
        start += length
    found = [bytes(part) for part in _parts(pieces, 10, 20)]
    assert [len(part) for part in found] == parts
    assert b"".join(found) == content


def test_parts_go_up_from_the_memory_of_the_tensors(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.arange(400_000, dtype=torch.int32)
    sent = []
    put_part = MultipartUpload.put_part

    def noted(upload: MultipartUpload, number: int, data: memoryview) -> None:
        address = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
        sent.append((address - tensor.data_ptr(), len(data)))
        put_part(upload, number, data)

    monkeypatch.setattr(MultipartUpload, "put_part", noted)
    dcp.save({"tensor": tensor}, storage_writer=UCVolumeWriter(f"{VOLUME}/direct"))
    offsets, lengths = zip(*sorted(sent), strict=True)
    assert sum(lengths) == tensor.nbytes
    assert list(offsets) == [sum(lengths[:number]) for number in range(len(lengths))]
    assert len(sent) == 7


@pytest.mark.parametrize("sizes", [[], [0], [10], [300_000] * 2, [40_000] * 9, [350_000, 5]])
def test_a_file_of_any_pieces_is_stored_as_it_is(
    sizes: list[int], store: VolumeStore, tmp_path: Path
) -> None:
    pieces = [os.urandom(size) for size in sizes]
    assert written(store, "some/file", pieces) == b"".join(pieces)
    (tmp_path / "some").mkdir()
    assert written(DirectoryStore(tmp_path), "some/file", pieces) == b"".join(pieces)


def test_a_store_that_takes_no_parts_gets_the_file_by_one_request(
    store: VolumeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise Unsupported("upload", "some/file", "no parts here")

    monkeypatch.setattr(FilesApiVolume, "start_upload", refuse)
    pieces = [os.urandom(150_000), os.urandom(220_000)]
    assert written(store, "some/file", pieces) == b"".join(pieces)


def test_a_part_that_fails_fails_the_file_and_leaves_nothing(
    served: Served, store: VolumeStore
) -> None:
    served.server.inject(Fault(route="presigned_put", skip=3, status=403))
    with pytest.raises(Exception, match=r"some/file: part \d"):
        written(store, "some/file", [os.urandom(300_000)] * 5)
    served.server.inject()
    assert store.size("some/file") is None


def test_a_file_whose_save_was_given_up_is_not_stored(store: VolumeStore, tmp_path: Path) -> None:
    stop = threading.Event()

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(OPTIONS.part_size_bytes))
        yield memoryview(bytes(OPTIONS.part_size_bytes))
        stop.set()
        yield memoryview(bytes(OPTIONS.part_size_bytes))

    for one in (store, DirectoryStore(tmp_path)):
        stop.clear()
        with pytest.raises(GivenUp):
            one.write("file", pieces(), stop, num_writers=1, is_synced=True)
        assert one.size("file") is None


# Answers that were lost


def test_a_rename_or_removal_whose_answer_was_lost_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = []

    def losing(name: str) -> None:
        call = getattr(os, name)

        def carried_out(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            lost.append(name)
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, name, carried_out)

    store = DirectoryStore(tmp_path)
    (tmp_path / "g").mkdir()
    for name in ("rename", "unlink", "rmdir"):
        losing(name)
    store.publish("g/record", b"whole")
    assert read_bytes(store, "g/record", 5) == b"whole"
    store.remove_directory("g", first="record")
    assert not (tmp_path / "g").exists()
    assert lost == ["rename", "unlink", "rmdir"]


def test_a_rename_that_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    store = DirectoryStore(tmp_path)
    store.publish("record", b"old")
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.publish("record", b"new")
    assert read_bytes(store, "record", 3) == b"old"


def test_an_fsync_that_was_cut_off_is_done_again_and_one_that_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [OSError(errno.ENOTCONN, "not connected")]
    fsync = os.fsync

    def sync(descriptor: int) -> None:
        fsync(descriptor)
        if answers:
            raise answers.pop()

    monkeypatch.setattr(os, "fsync", sync)
    store = DirectoryStore(tmp_path)
    assert written(store, "file", [b"bytes"]) == b"bytes"
    answers.append(OSError(errno.EIO, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        written(store, "other", [b"bytes"])
    assert store.size("other") is None


@pytest.mark.parametrize("route", ["put_file", "complete_upload", "delete_file", "presigned_put"])
def test_a_request_whose_answer_was_lost_has_succeeded(
    route: str, served: Served, store: VolumeStore
) -> None:
    content = os.urandom(350_000)
    served.server.inject(Fault(route=route, lose_reply=True, count=1))
    assert written(store, "g/file", [content, content]) == content * 2
    store.publish("g/record", b"whole")
    assert read_bytes(store, "g/record", 5) == b"whole"
    store.remove_directory("g", first="record")
    assert store.names("g") == []


def test_an_entry_that_is_gone_already_does_not_keep_the_others(
    store: VolumeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        store.publish(f"g/{name}", b"x")
    names = store.names("g")
    store._volume.delete("g/a")
    monkeypatch.setattr(store, "names", lambda _directory: names)
    store.remove_directory("g", first="b")
    monkeypatch.undo()
    assert [store.size(f"g/{name}") for name in names] == [None] * 3


# Whole saves


def test_no_save_syncs_the_whole_machine_or_needs_a_descriptor(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_arguments: Any) -> None:
        raise AssertionError("called")

    monkeypatch.setattr(os, "sync", refuse)
    state = {"tensor": torch.arange(300_000.0), "object": [1, "text"]}
    for path in (str(tmp_path / "directory"), f"{VOLUME}/saved"):
        dcp.save(state, storage_writer=UCVolumeWriter(path))
        found: dict[str, Any] = {"tensor": torch.zeros(300_000), "object": None}
        dcp.load(found, storage_reader=UCVolumeReader(path))
        assert torch.equal(found["tensor"], state["tensor"])  # type: ignore[arg-type]
        assert found["object"] == [1, "text"]
        monkeypatch.setattr(os, "fsync", refuse)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "served"]


def test_a_save_takes_little_memory_beside_the_state(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    credentials = Credentials(host=served.server.url, token=TOKEN)
    monkeypatch.setattr(volume_store, "open_volume", lambda url: FilesApiVolume(url, credentials))
    state = {
        "large": torch.ones(24 << 20),
        "turned": torch.ones(4096, 4096).t(),
        **{f"small-{number}": torch.ones(10_000) for number in range(200)},
    }
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = memory("VmRSS")
    dcp.save(state, storage_writer=UCVolumeWriter(f"{VOLUME}/large", thread_count=2))
    # The state has 168 MiB. What the server in this process takes counts as well.
    assert memory("VmHWM") - before < 100 << 20


def memory(name: str) -> int:
    """In bytes, as the kernel counts it for this process."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:")) << 10


def test_one_thread_that_is_throttled_for_good_ends_the_others(served: Served) -> None:
    served.server.inject(Fault(route="initiate_upload", path="*-001.bin", status=503))
    state = {f"tensor-{number}": torch.full((200_000,), float(number)) for number in range(4)}
    with pytest.raises(CheckpointException, match=r"upload \S+r00000-001.bin"):
        dcp.save(state, storage_writer=UCVolumeWriter(f"{VOLUME}/slow", thread_count=4))
    names = {path.name for path in served.directory.rglob("*") if path.is_file()}
    assert not names & {"r00000-001.bin", "metadata", "commit.json"}


def test_a_download_that_breaks_off_goes_on_and_is_verified(served: Served) -> None:
    state = {"tensor": torch.arange(400_000, dtype=torch.int32)}
    dcp.save(state, storage_writer=UCVolumeWriter(f"{VOLUME}/saved"))
    served.server.inject(Fault(route="presigned_get", cut_after_bytes=700_000, count=1))
    found = {"tensor": torch.zeros(400_000, dtype=torch.int32)}
    dcp.load(found, storage_reader=UCVolumeReader(f"{VOLUME}/saved"))
    assert torch.equal(found["tensor"], state["tensor"])


def test_an_upload_that_breaks_off_is_sent_again_whole(served: Served) -> None:
    state = {"tensor": torch.arange(400_000, dtype=torch.int32)}
    served.server.inject(Fault(route="presigned_put", cut_after_bytes=60_000, count=3))
    dcp.save(state, storage_writer=UCVolumeWriter(f"{VOLUME}/saved"))
    found = {"tensor": torch.zeros(400_000, dtype=torch.int32)}
    dcp.load(found, storage_reader=UCVolumeReader(f"{VOLUME}/saved"))
    assert torch.equal(found["tensor"], state["tensor"])
