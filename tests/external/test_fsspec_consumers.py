"""The libraries that take a path by fsspec, on a volume."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainmount_files import open_volume
from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.server import LocalServer, ServerSettings
from trainmount_files.transfer import open_reader, open_writer

TOKEN = "dapi-0123456789abcdef"
ROOT = "/Volumes/main/default/data"
URL = f"volumes://{ROOT}"


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalServer]:
    """What the environment names."""
    directory = tmp_path / "served"
    (directory / "main" / "default" / "data").mkdir(parents=True)
    with LocalServer(ServerSettings(directory=directory, token=TOKEN, fsync=False)) as running:
        monkeypatch.setenv("DATABRICKS_HOST", running.url)
        monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
        VolumesFileSystem.clear_instance_cache()
        yield running


def test_pandas_writes_and_reads_tables() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"number": range(1000), "text": [f"row {n}" for n in range(1000)]})
    table.to_parquet(f"{URL}/new/table.parquet")
    assert pandas.read_parquet(f"{URL}/new/table.parquet").equals(table)
    few = pandas.read_parquet(
        f"{URL}/new/table.parquet", columns=["text"], filters=[("number", "<", 2)]
    )
    assert list(few["text"]) == ["row 0", "row 1"]
    for name in ("table.csv", "table.csv.gz", "table.csv.xz"):
        table.to_csv(f"{URL}/{name}", index=False)
        assert pandas.read_csv(f"{URL}/{name}").equals(table)
    table.to_json(f"{URL}/table.jsonl", orient="records", lines=True)
    assert pandas.read_json(f"{URL}/table.jsonl", lines=True).equals(table)
    names = VolumesFileSystem().ls(ROOT, detail=False)
    assert [name.removeprefix(f"{ROOT}/") for name in names] == [
        "new",
        "table.csv",
        "table.csv.gz",
        "table.csv.xz",
        "table.jsonl",
    ]


def test_a_table_that_pandas_cannot_finish_leaves_the_old_one() -> None:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"a": ["old"]}).to_csv(f"{URL}/t.csv", index=False)

    class Unsayable:
        def __str__(self) -> str:
            raise LookupError

    broken = pandas.DataFrame({"a": ["x" * 1000] * 1000 + [Unsayable()]}, dtype=object)
    for name in ("t.csv", "t.csv.gz"):
        with pytest.raises(LookupError):
            broken.to_csv(f"{URL}/{name}", index=False, chunksize=100)
    assert VolumesFileSystem().find(ROOT) == [f"{ROOT}/t.csv"]
    assert VolumesFileSystem().cat_file(f"{ROOT}/t.csv") == b"a\nold\n"


def test_pyarrow_writes_and_reads_datasets_of_many_files() -> None:
    pa = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    parquet = pytest.importorskip("pyarrow.parquet")
    fs = VolumesFileSystem()
    table = pa.table({"part": ["a", "b", "c"] * 400, "number": list(range(1200))})
    for _ in range(2):
        dataset.write_dataset(
            table,
            f"{ROOT}/ds",
            format="parquet",
            partitioning=["part"],
            partitioning_flavor="hive",
            filesystem=fs,
            existing_data_behavior="delete_matching",
        )
    assert fs.find(f"{ROOT}/ds") == [f"{ROOT}/ds/part={p}/part-0.parquet" for p in "abc"]
    found = dataset.dataset(f"{ROOT}/ds", filesystem=fs, partitioning="hive")
    assert found.count_rows() == 1200
    one = found.to_table(filter=(dataset.field("part") == "b") & (dataset.field("number") < 10))
    assert sorted(one["number"].to_pylist()) == [1, 4, 7]
    metadata = parquet.read_metadata(f"{ROOT}/ds/part=a/part-0.parquet", filesystem=fs)
    assert metadata.num_rows == 400
    parquet.write_table(table, f"{ROOT}/one.parquet", filesystem=fs, row_group_size=100)
    with parquet.ParquetFile(f"{ROOT}/one.parquet", filesystem=fs) as file:
        assert file.read_row_group(7)["number"].to_pylist() == list(range(700, 800))
    arrow = pytest.importorskip("pyarrow.fs")
    wrapped = arrow.PyFileSystem(arrow.FSSpecHandler(fs))
    wrapped.move(f"{ROOT}/ds", f"{ROOT}/moved")
    wrapped.copy_file(f"{ROOT}/one.parquet", f"{ROOT}/two.parquet")
    wrapped.delete_dir(f"{ROOT}/moved/part=a")
    wrapped.delete_file(f"{ROOT}/one.parquet")
    assert fs.find(ROOT) == [
        f"{ROOT}/moved/part=b/part-0.parquet",
        f"{ROOT}/moved/part=c/part-0.parquet",
        f"{ROOT}/two.parquet",
    ]
    (info,) = wrapped.get_file_info([f"{ROOT}/two.parquet"])
    assert (info.size, info.is_file) == (fs.size(f"{ROOT}/two.parquet"), True)


def test_torch_saves_and_loads() -> None:
    torch = pytest.importorskip("torch")
    fs = VolumesFileSystem()
    weights = {"layer": torch.arange(300_000, dtype=torch.float32)}
    with fs.open(f"{ROOT}/checkpoint/model.pt", "wb") as file:
        torch.save(weights, file)
    with fs.open(f"{ROOT}/checkpoint/model.pt", "rb") as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["layer"], weights["layer"])


def test_torch_saves_into_a_writer_and_loads_from_a_reader_in_place() -> None:
    torch = pytest.importorskip("torch")
    tensors = {"weight": torch.arange(40_000.0), "bias": torch.ones(7)}
    volume = open_volume(ROOT)
    with open_writer(volume, "file") as writer:
        torch.save(tensors, writer)
    with io.BufferedReader(open_reader(volume, "file", block_bytes=16 << 10)) as reader:
        found = torch.load(reader, weights_only=True)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    volume.close()


def test_hugging_face_datasets_load_from_a_volume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    fs = VolumesFileSystem()
    rows = [{"number": n, "text": f"row {n}"} for n in range(50)]
    for part in range(2):
        pandas.DataFrame(rows[part * 25 : part * 25 + 25]).to_parquet(f"{URL}/p/{part}.parquet")
    fs.write_text(f"{ROOT}/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    pandas.DataFrame(rows).to_csv(f"{URL}/rows.csv", index=False)
    for kind, files in [("parquet", "p/*.parquet"), ("json", "rows.jsonl"), ("csv", "rows.csv")]:
        for streaming in (False, True):
            loaded = datasets.load_dataset(
                kind,
                data_files=f"{URL}/{files}",
                split="train",
                streaming=streaming,
                cache_dir=str(tmp_path / "cache"),
            )
            assert list(loaded) == rows
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for number in range(3):
            content = os.urandom(10)
            member = tarfile.TarInfo(f"{number}.bin")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    fs.pipe_file(f"{ROOT}/shard.tar", tar.getvalue())
    shards = datasets.load_dataset(
        "webdataset", data_files=f"{URL}/shard.tar", split="train", streaming=True
    )
    assert [example["__key__"] for example in shards] == ["0", "1", "2"]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(f"{URL}/saved")
    assert datasets.load_from_disk(f"{URL}/saved").to_list() == rows
