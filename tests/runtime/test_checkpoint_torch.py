"""What torch itself wrote is read: checkpoints of its FileSystemWriter, and files of torch.save."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.runtime.small_volume import VOLUME, Served, serving
from torch.distributed.checkpoint.api import CheckpointException

from trainmount.checkpoint import load_file, volume_store
from trainmount.checkpoint.torch_format import load_file as load_file_itself
from trainmount.data import UCVolumeReader, UCVolumeWriter
from trainmount.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with serving(tmp_path / "served") as running:
        monkeypatch.setattr(volume_store, "open_volume", running.open)
        monkeypatch.setattr("trainmount_files.open_volume", running.open)
        yield running


def state(number: float = 1.0) -> dict[str, Any]:
    return {
        "weights": torch.arange(60_000.0).reshape(300, 200) * number,
        "half": torch.full((7,), number, dtype=torch.bfloat16),
        "nested": {"number": number, "list": [torch.tensor([1, 2]), "text"]},
    }


def load(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = {
        "weights": torch.zeros(300, 200),
        "half": torch.zeros(7, dtype=torch.bfloat16),
        "nested": {"number": None, "list": [torch.zeros(2, dtype=torch.int64), None]},
    }
    dcp.load(found, storage_reader=UCVolumeReader(path))
    return found


def save_by_torch(path: Path, **options: Any) -> None:
    dcp.save(state(), storage_writer=dcp.FileSystemWriter(path, **options))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert torch.equal(found["weights"], expected["weights"])
    assert torch.equal(found["half"], expected["half"])
    assert found["nested"]["number"] == expected["nested"]["number"]
    assert found["nested"]["list"][0].tolist() == [1, 2]
    assert found["nested"]["list"][1] == "text"


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}])
def test_a_checkpoint_of_torch_is_loaded_from_a_directory(
    options: dict[str, Any], tmp_path: Path
) -> None:
    save_by_torch(tmp_path, **options)
    assert_same(load(tmp_path), state())


def test_a_checkpoint_of_torch_is_loaded_from_a_volume(served: Served) -> None:
    save_by_torch(served.directory / "torch", thread_count=2)
    assert_same(load(f"{VOLUME}/torch"), state())


def test_generations_beside_a_checkpoint_of_torch_count_first(tmp_path: Path) -> None:
    save_by_torch(tmp_path)
    dcp.save(state(2.0), storage_writer=UCVolumeWriter(tmp_path))
    assert_same(load(tmp_path), state(2.0))


def test_a_cut_or_missing_file_of_torch_is_refused_with_file_and_tensor(tmp_path: Path) -> None:
    save_by_torch(tmp_path)
    shard = tmp_path / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(
        CheckpointException, match=rf"{shard} has {len(whole) - 1} bytes, \S+ in it"
    ):
        load(tmp_path)
    shard.write_bytes(bytes(len(whole)))
    with pytest.raises(CheckpointException, match=rf"{shard} is damaged: \S+ cannot be read"):
        load(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointException, match=rf"{shard} is missing; \S+ is in it"):
        load(tmp_path)


class Call:
    """Pickles as a call of something by its name."""

    def __init__(self, module: str, name: str) -> None:
        self.place = module, name

    def pickled(self) -> bytes:
        module, name = (part.encode() for part in self.place)
        # Protocol 4: the two names, STACK_GLOBAL, an empty tuple, REDUCE, STOP.
        names = b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name))
        return b"\x80\x04" + names + b"\x93)R."


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "getcwd"),
        ("builtins", "print"),
        ("torch.distributed.checkpoint.metadata", "os.getcwd"),
        ("torch.distributed.checkpoint.metadata", "field"),
        ("torch", "load"),
        ("pathlib", "Path.cwd"),
    ],
)
def test_metadata_of_torch_that_would_run_code_is_refused(
    module: str, name: str, tmp_path: Path
) -> None:
    save_by_torch(tmp_path)
    (tmp_path / ".metadata").write_bytes(Call(module, name).pickled())
    with pytest.raises(CheckpointException, match=f"{module}.{name} does not belong into"):
        load(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointException, match=r"\.metadata cannot be read"):
        load(tmp_path)


def test_a_file_of_torch_save_is_loaded_from_a_directory_and_from_a_volume(
    served: Served, tmp_path: Path
) -> None:
    weights = OrderedDict(a=torch.arange(400_000.0), b=torch.ones(3, dtype=torch.bfloat16))
    for path, directory in ((str(tmp_path), tmp_path), (VOLUME, served.directory)):
        torch.save(weights, directory / "model.pt")
        found = load_file(f"{path}/model.pt", map_location="cpu")
        assert list(found) == ["a", "b"]
        assert torch.equal(found["a"], weights["a"])
        assert torch.equal(found["b"], weights["b"])
        with pytest.raises(CheckpointError, match=r"other.pt (is no file|cannot be read)"):
            load_file(f"{path}/other.pt")
    assert load_file is load_file_itself


def test_a_file_of_torch_save_runs_no_code_unless_it_is_allowed_to(tmp_path: Path) -> None:
    path = tmp_path / "object.pt"
    torch.save({"buffer": io.BytesIO(b"x")}, path)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        load_file(path)
    assert load_file(path, weights_only=False)["buffer"].getvalue() == b"x"
