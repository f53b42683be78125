"""Which files a dataset has and how they come: listings, sizes, checksums, items, errors."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainmount.data import UCVolumeDataset
from trainmount.data.items import DataFile
from trainmount.data.manifest import Entry, Manifest, compile_pattern
from trainmount.data.walk import Found, walk
from trainmount.errors import DamagedFile, DataError, ManifestChanged, MissingFile

MakeFiles = Callable[[Path, int], list[str]]


def paths_of(dataset: UCVolumeDataset) -> list[str]:
    return [entry.path for entry in dataset.manifest]


# Listings


def test_a_pattern_enters_only_directories_that_can_match() -> None:
    tree = {
        "": ["train/", "test/", "d.png", "_delta_log/"],
        "train": ["a.png", "deep/"],
        "train/deep": ["b.png"],
        "test": ["c.png"],
        "_delta_log": ["0.json"],
    }
    entered: list[str] = []

    def pages_of(directory: str) -> Iterator[list[Found]]:
        entered.append(directory)
        for name in tree[directory]:  # a page each
            yield [Found(name.rstrip("/"), name.endswith("/"), 1)]

    def found(pattern: str) -> tuple[list[str], list[str]]:
        entered.clear()
        paths = sorted(e.path for e in walk(pages_of, pattern, compile_pattern(pattern)))
        return paths, sorted(entered)

    assert found("train/*") == (["train/a.png"], ["train"])
    assert found("train/**/*.png") == (["train/a.png", "train/deep/b.png"], ["train", "train/deep"])
    assert found("*.png") == (["d.png"], [""])
    assert found("**/c.png") == (["test/c.png"], ["", "test", "train", "train/deep"])
    assert found("_delta_log/*") == ([], ["", "test", "train"])


def test_a_long_listing_is_in_order_whatever_the_order_of_the_store() -> None:
    names = [f"d{number % 7}/f{number:04d}" for number in range(3000)]
    manifest = Manifest(Entry(name, len(name)) for name in names)
    assert [entry.path for entry in manifest] == sorted(names)
    assert manifest[0] == Entry("d0/f0000", 8)
    with pytest.raises(IndexError, match="file 3000 is not in a listing of 3000"):
        manifest[3000]


def test_a_listing_takes_few_objects_and_crosses_processes_whole() -> None:
    manifest = Manifest(
        Entry(f"f{number:06d}", number, f"v{number}" if number % 2 else "")
        for number in range(5000)
    )
    assert len(pickle.dumps(manifest)) < 5000 * 45
    copy = pickle.loads(pickle.dumps(manifest))
    assert copy.entries == manifest.entries
    assert (copy[7].version, copy[8].version) == ("v7", "")
    assert copy.fingerprint == manifest.fingerprint


def test_names_that_are_no_text_are_kept_as_they_are(tmp_path: Path) -> None:
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    (tmp_path / name).write_bytes(b"x")
    dataset = UCVolumeDataset(str(tmp_path), item="bytes")
    assert paths_of(dataset) == [name]
    assert list(dataset) == [b"x"]


def test_an_explicit_list_keeps_its_order(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 6)
    chosen = ["f004", "f001", str(tmp_path / "f003")]
    dataset = UCVolumeDataset(str(tmp_path), files=chosen)
    assert paths_of(dataset) == ["f004", "f001", "f003"]
    assert [entry.size_bytes for entry in dataset.manifest] == [13, 10, 12]
    assert [Path(path).name for path in dataset] == ["f004", "f001", "f003"]
    with pytest.raises(ManifestChanged, match="in another order"):
        dataset.manifest.check(
            UCVolumeDataset(str(tmp_path), files=[*sorted(chosen[:2]), "f003"]).manifest.summary(),
            "here",
        )


def test_given_sizes_are_not_asked_for_and_hold(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 3)
    dataset = UCVolumeDataset(str(tmp_path), files={"f000": 9, "f001": 99, "missing": 5})
    stream = iter(dataset)
    assert Path(next(stream)).name == "f000"
    with pytest.raises(DamagedFile, match="f001 had 99 bytes when it was listed, now 10"):
        next(stream)


def test_wrong_lists_are_told(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 2)
    root = str(tmp_path)
    with pytest.raises(MissingFile, match="missing is not there"):
        UCVolumeDataset(root, files=["f000", "missing"])
    with pytest.raises(ValueError, match="more than once"):
        UCVolumeDataset(root, files=["f000", "f000"])
    for path in ("/etc/passwd", "../f000", ""):
        with pytest.raises(ValueError, match="a path relative to"):
            UCVolumeDataset(root, files=[path])
    with pytest.raises(DataError, match="files is empty"):
        UCVolumeDataset(root, files=[])
    with pytest.raises(ValueError, match="give one of them"):
        UCVolumeDataset(root, files=["f000"], manifest="m.jsonl")


def test_a_recorded_listing_is_made_once_and_then_stands(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path / "data", 5)
    recorded = str(tmp_path / "listing" / "train.jsonl")
    first = UCVolumeDataset(str(tmp_path / "data"), manifest=recorded)
    (tmp_path / "data" / "a_new").write_bytes(b"x")
    again = UCVolumeDataset(str(tmp_path / "data"), manifest=recorded)
    assert again.manifest.entries == first.manifest.entries
    assert [path.name for path in (tmp_path / "listing").iterdir()] == ["train.jsonl"]
    with pytest.raises(DataError, match=r"by pattern '\*\*/\*', not '\*\.png'"):
        UCVolumeDataset(str(tmp_path / "data"), manifest=recorded, pattern="*.png")
    lines = Path(recorded).read_text().splitlines(keepends=True)
    Path(recorded).write_text("".join(lines[:-1]))
    with pytest.raises(DataError, match="has 4 files, and says it lists 5"):
        UCVolumeDataset(str(tmp_path / "data"), manifest=recorded)
    Path(recorded).write_text(lines[0] + '{"path": "x"}\n')
    with pytest.raises(DataError, match=r"train.jsonl, line 2, is no entry of a listing: 'size'"):
        UCVolumeDataset(str(tmp_path / "data"), manifest=recorded)


# Checksums


@pytest.mark.parametrize("item", ["path", "bytes", "file"])
@pytest.mark.parametrize("kind", ["crc32", "sha256"])
def test_a_file_with_other_bytes_than_its_checksum_is_damaged(
    kind: str, item: str, tmp_path: Path
) -> None:
    content = bytes(range(200))
    digits = (
        f"{zlib.crc32(content):08x}" if kind == "crc32" else hashlib.sha256(content).hexdigest()
    )
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "listing").write_text(
        "".join(
            json.dumps({"path": name, "size": 200, kind: digits, "label": 3}) + "\n"
            for name in ("a", "b")
        )
    )
    changed = bytearray(content)
    changed[77] ^= 1
    (tmp_path / "b").write_bytes(changed)
    for options in (
        {"manifest": str(tmp_path / "listing")},
        {
            "files": ["a", "b"],
            "checksums": {"b": f"{kind}:{digits.upper()}", "unknown": "md5:" + "0" * 32},
        },
    ):
        stream = iter(UCVolumeDataset(str(tmp_path), item=item, **options))  # type: ignore[arg-type]
        next(stream)
        with pytest.raises(DamagedFile, match=f"/b has other bytes than its {kind} says"):
            next(stream)


def test_a_checksum_that_is_none_is_refused(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 1)
    for text in ("crc32:123", "sha256:xyz", "1234abcd", "rot13:00", "crc32:"):
        with pytest.raises(ValueError, match="a checksum must be crc32: or a name of hashlib"):
            UCVolumeDataset(str(tmp_path), checksums={"f000": text})


# Items


def test_a_file_object_reads_seeks_and_goes_to_another_process(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 3)
    for file, name in zip(
        UCVolumeDataset(str(tmp_path), item="file"), ("f000", "f001", "f002"), strict=True
    ):
        assert isinstance(file, DataFile)
        assert file.name == str(tmp_path / name)
        content = (tmp_path / name).read_bytes()
        assert file.read() == content
        file.seek(2)
        assert file.read(3) == content[2:5]
        there = pickle.loads(pickle.dumps(file))
        assert file.closed
        assert there.read() == content
        there.close()


def test_empty_files_are_files(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    for item, read in (
        ("bytes", lambda data: data),
        ("path", lambda path: Path(path).read_bytes()),
        ("file", lambda file: file.read()),
    ):
        assert [read(each) for each in UCVolumeDataset(str(tmp_path), item=item)] == [b""]  # type: ignore[arg-type,no-untyped-call]


def test_the_dataset_tells_how_its_files_are_reached(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 1)
    assert UCVolumeDataset(str(tmp_path)).describe == f"directory {tmp_path}"


# Errors


def test_a_missing_file_is_told_at_once_also_when_damaged_ones_are_read_again(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 3)
    dataset = UCVolumeDataset(str(tmp_path), on_error="retry")
    (tmp_path / "f001").unlink()
    began = time.monotonic()
    with pytest.raises(MissingFile, match="f001 was listed and is gone"):
        list(dataset)
    assert time.monotonic() - began < 1.0


def test_a_file_that_is_whole_again_in_time_is_read(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 2)
    whole = (tmp_path / "f001").read_bytes()
    dataset = UCVolumeDataset(str(tmp_path), on_error="retry", item="bytes")
    (tmp_path / "f001").write_bytes(whole[:-1])
    repair = threading.Timer(0.05, (tmp_path / "f001").write_bytes, [whole])
    repair.start()
    assert list(dataset)[1] == whole
    repair.join()


def test_a_file_that_stays_damaged_is_an_error_after_some_tries(
    tmp_path: Path, make_files: MakeFiles, caplog: pytest.LogCaptureFixture
) -> None:
    make_files(tmp_path, 2)
    dataset = UCVolumeDataset(str(tmp_path), on_error="retry")
    (tmp_path / "f001").write_bytes(b"short")
    with pytest.raises(DamagedFile, match="f001 had 10 bytes when it was listed, now 5"):
        list(dataset)
    assert [record.message for record in caplog.records] == ["file is read again"] * 4


@pytest.mark.parametrize("item", ["path", "bytes", "file"])
def test_what_a_file_can_become_is_skipped_or_told(item: str, tmp_path: Path) -> None:
    for name in "abcde":
        (tmp_path / name).write_bytes(b"12345")
    dataset = UCVolumeDataset(str(tmp_path), item=item, on_error="skip")  # type: ignore[arg-type]
    (tmp_path / "a").unlink()
    (tmp_path / "b").write_bytes(b"123456")
    (tmp_path / "c").write_bytes(b"")
    (tmp_path / "d").unlink()
    (tmp_path / "d").mkdir()
    assert len(list(dataset)) == 1
    fetched = dataset.fetch(range(5), "here")
    assert (list(fetched.skipped), len(fetched.items)) == (["a", "b", "c", "d"], 1)


@pytest.mark.parametrize("item", ["path", "bytes", "file"])
def test_a_file_that_became_a_pipe_is_damaged_and_nobody_waits_for_it(
    item: str, tmp_path: Path
) -> None:
    for name, content in (("empty", b""), ("full", b"12345"), ("last", b"1")):
        (tmp_path / name).write_bytes(content)
    dataset = UCVolumeDataset(str(tmp_path), item=item, on_error="skip")  # type: ignore[arg-type]
    for name in ("empty", "full"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    fetched = dataset.fetch(range(3), "here")
    assert "full" in fetched.skipped
    assert "last" not in fetched.skipped
    # The bytes of an empty file are those of a pipe that nobody writes to.
    assert ("empty" in fetched.skipped) == (item != "bytes")


def test_links_that_lead_nowhere_do_not_hinder_the_listing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    for name, target in (("circle", "circle"), ("gone", "no/where"), ("through", "a/b")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "up").symlink_to(tmp_path)
    assert paths_of(UCVolumeDataset(str(tmp_path))) == ["a", "link"]
