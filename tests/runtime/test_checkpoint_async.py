"""`dcp.async_save` with this project's writer: by thread and by process, one at a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from trainmount.checkpoint.layout import CommitRecord
from trainmount.checkpoint.stores import DirectoryStore
from trainmount.data import UCVolumeReader, UCVolumeWriter


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    # torch's process for checkpoints ends with the group that it was made for.
    _async_process_executor._CHECKPOINT_PROCESS = None
    dist.destroy_process_group()


def state(number: float) -> dict[str, Any]:
    return {
        "tensor": torch.full((1000,), number),
        "objects": {"list": [number], "text": f"{number}"},
    }


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tensor": torch.zeros(1000),
        "objects": {"list": [None], "text": None},
    }
    dcp.load(found, storage_reader=UCVolumeReader(path))
    return found


def change(state: dict[str, Any]) -> None:
    state["tensor"].zero_()
    state["objects"]["list"][0] = -1.0
    state["objects"]["text"] = "changed"


@pytest.mark.parametrize("kind", [AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS])
def test_an_asynchronous_save_has_the_values_as_of_the_call(
    kind: AsyncCheckpointerType, group: None, tmp_path: Path
) -> None:
    values = state(4.0)
    expected = copy.deepcopy(values)
    writer = UCVolumeWriter(tmp_path, extra={"step": 3})
    saving: Any = dcp.async_save(values, storage_writer=writer, async_checkpointer_type=kind)
    change(values)
    metadata = saving.result()
    found = load(tmp_path)
    assert torch.equal(found["tensor"], expected["tensor"])
    assert found["objects"] == expected["objects"]
    # On every rank, and out of the other process as well.
    record = (tmp_path / metadata.storage_meta.save_id / "commit.json").read_bytes()
    assert CommitRecord.from_json(record, "here").extra == {"step": 3}


class SlowStore(DirectoryStore):
    """Tells how many files are written at a time; each waits until it may go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_go_on = threading.Event()
        self.is_writing = threading.Event()
        self.running = self.most_running = 0
        self._lock = threading.Lock()

    def write(self, name: str, *arguments: Any, **options: Any) -> None:
        with self._lock:
            self.running += name.endswith(".bin")
            self.most_running = max(self.most_running, self.running)
        self.is_writing.set()
        assert self.may_go_on.wait(60)
        super().write(name, *arguments, **options)
        with self._lock:
            self.running -= name.endswith(".bin")


def test_a_second_asynchronous_save_waits_for_the_first(
    group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SlowStore(tmp_path)
    writer = UCVolumeWriter(tmp_path, keep_last=3)
    monkeypatch.setattr(writer, "_open", lambda: store)
    first: Any = dcp.async_save(state(1.0), storage_writer=writer)
    assert store.is_writing.wait(60)
    # The second call returns only when the first save has ended.
    seconds: list[Any] = []
    values = state(2.0)
    call = threading.Thread(
        target=lambda: seconds.append(dcp.async_save(values, storage_writer=writer))
    )
    call.start()
    assert not first.done()
    store.may_go_on.set()
    call.join()
    assert first.done()
    seconds[0].result()
    assert store.most_running == 1
    assert len(list(tmp_path.iterdir())) == 2
    assert load(tmp_path)["objects"]["list"] == [2.0]


def test_a_failed_asynchronous_save_is_told_and_the_next_one_goes_on(
    group: None, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    writer = UCVolumeWriter(blocked)
    saving: Any = dcp.async_save(state(1.0), storage_writer=writer)
    with pytest.raises(CheckpointException, match="Not a directory"):
        saving.result()
    blocked.unlink()
    saving = dcp.async_save(state(2.0), storage_writer=writer)
    saving.result()
    assert load(blocked)["objects"]["list"] == [2.0]
