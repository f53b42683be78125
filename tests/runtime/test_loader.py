"""The loader over real files: batches, resuming, workers, changed directories, missing files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader

from trainmount.data import Checkpointable, DataLoader, UCVolumeDataset
from trainmount.data.position import Position
from trainmount.data.state import Skipped
from trainmount.errors import (
    DamagedFile,
    DataError,
    ManifestChanged,
    MissingFile,
    StateMismatch,
    TooManySkipped,
)

MakeFiles = Callable[[Path, int], list[str]]


def loader_over(directory: Path, batch_size: int | None = 4, **options: Any) -> DataLoader:
    dataset_options = {
        name: options.pop(name)
        for name in ("shuffle", "seed", "pattern", "item", "on_error", "max_skipped")
        if name in options
    }
    dataset = UCVolumeDataset(str(directory), **dataset_options)
    return DataLoader(dataset, batch_size, **{"num_workers": 0, **options})


def names(batch: list[str]) -> list[str]:
    return [Path(path).name for path in batch]


def all_names(batches: list[list[str]]) -> list[str]:
    return [name for batch in batches for name in names(batch)]


def test_batches_are_local_paths_in_the_order_of_the_listing(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 10)
    loader = loader_over(tmp_path)
    batches = list(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert all_names(batches) == expected
    assert len(loader) == loader.num_batches == 3
    assert batches[0][0] == str(tmp_path / "f000")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_every_start_method_give_what_no_worker_gives(
    method: str, tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 21)
    alone = loader_over(tmp_path, shuffle=True)
    with_workers = loader_over(
        tmp_path, shuffle=True, num_workers=1, multiprocessing_context=method
    )
    assert list(with_workers) == list(alone)


def test_every_stop_with_prefetching_workers_resumes_at_the_next_batch(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 21)
    loader = loader_over(tmp_path, shuffle=True, num_workers=2)
    undisturbed = [list(loader), list(loader)]
    for stop in range(1, 7):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "delivered": 0})
        batches = iter(loader)
        delivered = [next(batches) for _ in range(stop)]
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = loader_over(tmp_path, shuffle=True)
        resumed.load_state_dict(state)
        if stop == 6:  # the epoch is complete: the next one begins
            assert (resumed.epoch, delivered) == (1, undisturbed[0])
        else:
            assert delivered + list(resumed) == undisturbed[0]
        assert list(resumed) == undisturbed[1]


def test_resuming_in_place_again_and_again_delivers_each_file_once(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 13)
    loader = loader_over(tmp_path, 2, num_workers=1)
    delivered: list[str] = []
    while loader.epoch == 0:
        delivered += names(next(iter(loader)))
        loader.load_state_dict(loader.state_dict())
    assert delivered == expected


def test_an_epoch_left_early_begins_anew_and_set_epoch_goes_on(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 8)
    loader = loader_over(tmp_path, shuffle=True)
    first = next(iter(loader))
    assert loader.position == Position(0, 4)
    assert next(iter(loader)) == first
    loader.set_epoch(0)
    assert loader.position == Position(0, 4)
    loader.set_epoch(5)
    assert loader.position == Position(5, 0)
    assert next(iter(loader)) != first


def test_single_items_without_batches_resume_too(tmp_path: Path, make_files: MakeFiles) -> None:
    expected = make_files(tmp_path, 5)
    loader = loader_over(tmp_path, None)
    items = iter(loader)
    delivered = [next(items), next(items)]
    resumed = loader_over(tmp_path, None)
    resumed.load_state_dict(loader.state_dict())
    assert names(delivered + list(resumed)) == expected


def test_bytes_are_given_to_the_collate_function(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 6)
    loader = loader_over(
        tmp_path, 3, item="bytes", collate_fn=lambda items: [len(item) for item in items]
    )
    assert list(loader) == [[9, 10, 11], [12, 13, 14]]


def test_the_global_random_numbers_are_left_alone(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 6)
    before = torch.get_rng_state()
    list(loader_over(tmp_path, shuffle=True, num_workers=1))
    assert torch.equal(before, torch.get_rng_state())


def test_drop_last_leaves_the_short_batch_out(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 10)
    loader = loader_over(tmp_path, drop_last=True)
    assert [len(batch) for batch in loader] == [4, 4]
    assert loader.position == Position(1, 0)
    with pytest.raises(ValueError, match="10 files, fewer than a global batch of 11"):
        loader_over(tmp_path, 11, drop_last=True)


def test_torch_s_own_loader_delivers_each_file_once_from_its_workers(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 11)
    dataset = UCVolumeDataset(str(tmp_path))
    delivered = list(TorchDataLoader(dataset, num_workers=2, batch_size=None))
    assert sorted(names(delivered)) == expected


def test_a_stream_resumes_where_it_was_and_after_its_end_begins_anew(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 5)
    dataset = UCVolumeDataset(str(tmp_path))
    assert isinstance(dataset, Checkpointable)
    stream = iter(dataset)
    delivered = [next(stream), next(stream)]
    state = dataset.state_dict()
    assert state["delivered"] == 2
    other = UCVolumeDataset(str(tmp_path))
    other.load_state_dict(state)
    assert names(delivered + list(other)) == expected
    assert names(list(other)) == expected
    abandoned = iter(other)
    assert names([next(abandoned), next(abandoned)]) == expected[:2]
    assert names(list(other)) == expected, "an iteration that is left early begins anew"
    with pytest.raises(StateMismatch, match="rank 1, worker 0, but this is rank 0, worker 0"):
        other.load_state_dict({**state, "rank": 1})
    with pytest.raises(ValueError, match="version"):
        other.load_state_dict({**state, "version": 9})


# The directory


def test_hidden_files_and_bookkeeping_are_not_data_and_directories_are_entered(
    tmp_path: Path,
) -> None:
    for name in (
        "a.png",
        "_SUCCESS",
        ".hidden",
        "sub/b.png",
        "sub/c.txt",
        "sub/.d.png",
        "_delta_log/0.json",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    assert [entry.path for entry in UCVolumeDataset(str(tmp_path)).manifest.entries] == [
        "a.png",
        "sub/b.png",
        "sub/c.txt",
    ]
    only = UCVolumeDataset(str(tmp_path), pattern="**/*.png")
    assert [entry.path for entry in only.manifest.entries] == ["a.png", "sub/b.png"]
    flat = UCVolumeDataset(str(tmp_path), pattern="*")
    assert [entry.path for entry in flat.manifest.entries] == ["a.png"]


def test_a_directory_without_files_or_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches '\*\*/\*'"):
        UCVolumeDataset(str(tmp_path))
    with pytest.raises(DataError, match=r"cannot list .*missing: No such file or directory"):
        UCVolumeDataset(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda root: (root / "a_new").write_bytes(b"x"), "a_new was added"),
        (lambda root: (root / "f000").unlink(), "f000 is gone"),
        (
            lambda root: (root / "f003").write_bytes(b"longer than before"),
            "f003 had 12 bytes, now 18",
        ),
    ],
)
def test_a_changed_directory_is_refused_and_the_first_file_that_differs_named(
    change: Callable[[Path], Any], message: str, tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 20)
    loader = loader_over(tmp_path)
    next(iter(loader))
    state = loader.state_dict()
    change(tmp_path)
    with pytest.raises(ManifestChanged, match=message) as failure:
        loader_over(tmp_path).load_state_dict(state)
    assert str(tmp_path) in str(failure.value)
    assert isinstance(failure.value, ValueError)


def test_a_state_of_another_directory_version_or_order_is_refused(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path / "one", 20)
    make_files(tmp_path / "other", 14)
    state = loader_over(tmp_path / "one").state_dict()
    with pytest.raises(ManifestChanged, match="20 files then, 14 now"):
        loader_over(tmp_path / "other").load_state_dict(state)
    with pytest.raises(StateMismatch, match="version 2, or 1, got 3"):
        loader_over(tmp_path / "one").load_state_dict({**state, "version": 3})
    with pytest.raises(StateMismatch, match="taken with seed=0, the dataset has seed=5"):
        loader_over(tmp_path / "one", seed=5).load_state_dict(state)
    with pytest.raises(StateMismatch, match="delivered must be from 0 to 20, got 21"):
        loader_over(tmp_path / "one").load_state_dict({**state, "delivered": 21})


def test_the_same_files_elsewhere_are_the_same_directory(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path / "one", 9)
    make_files(tmp_path / "other", 9)
    loader_over(tmp_path / "one").load_state_dict(loader_over(tmp_path / "other").state_dict())


# Files that are not as they were listed


def test_a_missing_or_cut_file_is_an_error_by_name(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 8)
    for item in ("path", "bytes"):
        loader = loader_over(tmp_path, item=item)
        (tmp_path / "f005").rename(tmp_path / "f005.away")
        with pytest.raises(MissingFile, match="f005 was listed and is gone"):
            list(loader)
        (tmp_path / "f005.away").rename(tmp_path / "f005")
        loader = loader_over(tmp_path, item=item)
        os.truncate(tmp_path / "f005", 3)
        with pytest.raises(DamagedFile, match="f005 had 14 bytes when it was listed, now 3"):
            list(loader)
        (tmp_path / "f005").write_bytes(b"." * 14)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_skipping_keeps_the_other_batches_and_counts(
    num_workers: int, tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 10)
    loader = loader_over(tmp_path, on_error="skip", num_workers=num_workers)
    for name in ("f001", "f008", "f009"):
        (tmp_path / name).unlink()
    batches = list(loader)
    assert [names(batch) for batch in batches] == [
        ["f000", "f002", "f003"],
        ["f004", "f005", "f006", "f007"],
    ]
    assert (loader.num_skipped, loader.skipped) == (3, ("f001", "f008", "f009"))
    assert loader.position == Position(1, 0)


def test_the_state_says_which_files_were_left_out(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 10)
    loader = loader_over(tmp_path, on_error="skip")
    resumed = loader_over(tmp_path, on_error="skip")
    (tmp_path / "f001").unlink()
    batches = iter(loader)
    next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["skipped"] == {"count": 1, "names": ["f001"]}
    (tmp_path / "f005").unlink()
    resumed.load_state_dict(state)
    next(iter(resumed))
    assert resumed.state_dict()["skipped"] == {"count": 2, "names": ["f001", "f005"]}
    assert (resumed.num_skipped, resumed.skipped) == (1, ("f005",)), "in this process"
    many = Skipped(3, ("a",)).plus(Skipped(200, tuple(f"f{number}" for number in range(200))))
    assert (many.count, many.names[:2], len(many.names)) == (203, ("a", "f0"), 100)
    del state["skipped"]
    resumed.load_state_dict(state)
    assert resumed.state_dict()["skipped"] == {"count": 0, "names": []}
    with pytest.raises(StateMismatch, match="skipped must have a count and names, got 3"):
        resumed.load_state_dict({**state, "skipped": 3})


def test_skipping_has_a_limit(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 10)
    loader = loader_over(tmp_path, on_error="skip", max_skipped=1)
    (tmp_path / "f001").unlink()
    (tmp_path / "f005").unlink()
    with pytest.raises(
        TooManySkipped, match=r"2 files of .* were skipped, max_skipped is 1; the last: .*f005"
    ):
        list(loader)


# Arguments


def test_wrong_arguments_are_told_in_one_line(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 4)
    with pytest.raises(ValueError, match="item must be 'path', 'bytes' or 'file', got 'tensor'"):
        UCVolumeDataset(str(tmp_path), item="tensor")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_error must be"):
        UCVolumeDataset(str(tmp_path), on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pattern must be a relative glob"):
        UCVolumeDataset(str(tmp_path), pattern="/x")
    dataset = UCVolumeDataset(str(tmp_path))
    with pytest.raises(ValueError, match="shuffle is not for a UCVolumeDataset"):
        DataLoader(dataset, num_workers=0, shuffle=True)


def test_other_datasets_load_as_in_torch_but_have_no_position() -> None:
    loader = DataLoader([1, 2, 3], 2, num_workers=0)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[1, 2], [3]]
    assert len(loader) == 2
    assert not loader.has_position
    for call in (loader.state_dict, lambda: loader.load_state_dict({}), lambda: loader.position):
        with pytest.raises(TypeError, match=r"progress of a UCVolumeDataset, .* not of list"):
            call()


def test_defaults_are_those_of_a_node_of_loaders(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 4)
    loader = DataLoader(UCVolumeDataset(str(tmp_path)))
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (48, 4, True)
    assert (loader.batch_size, loader.drop_last) == (1, False)
