"""What the documentation of `databricks.air.data` says its classes do, sentence by sentence, and
the tests that fail where it is not so here. Where the behaviour here is meant to be another, and is
more, the sentence stands under INSTEAD.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset

from trainmount.data import (
    Checkpointable,
    DataLoader,
    UCVolumeDataset,
    UCVolumeReader,
    UCVolumeWriter,
)

MakeFiles = Callable[[Path, int], list[str]]

HERE = Path(__file__).parent

KEPT = {
    # UCVolumeDataset
    "IterableDataset that streams files from a UC FUSE directory as local paths.": [
        "test_the_example_of_the_documentation_yields_each_path_once",
    ],
    "If torch.distributed is initialised, files are first split across ranks.": [
        "test_workers_of_torch_s_own_loader_know_the_rank_that_they_work_for",
        "test_the_same_streams_have_the_same_files_in_the_same_order",
    ],
    "Within each rank, if multiple DataLoader workers are active the rank's slice is further "
    "divided across those workers.": [
        "test_direct_iteration_gives_each_worker_the_files_that_version_1_says",
    ],
    "With R ranks and W DataLoader workers per rank there are R * W independent streams, each "
    "covering 1 / (R * W) of the files.": [
        "test_the_same_streams_have_the_same_files_in_the_same_order",
    ],
    "The workers each take a disjoint slice of the same shard and so never download the same file "
    "twice.": ["test_workers_and_ranks_share_one_cache"],
    "The cache evicts old files to bound disk usage.": [
        "test_objects_stay_within_the_bound_whoever_stores_them",
    ],
    "A yielded path is only guaranteed valid until the next item is pulled from the stream.": [
        "test_every_path_can_be_read_when_it_is_delivered_however_small_the_cache",
        "test_a_stream_needs_no_more_than_two_copies",
    ],
    "The dataset implements Checkpointable.": [
        "test_whatever_has_both_methods_is_checkpointable",
    ],
    "Progress is tracked per (rank, worker) stream as the number of files that stream has "
    "delivered.": ["test_a_stream_s_state_is_its_count_with_its_rank_and_worker"],
    "state_dict() reports the calling stream's count (stamped with its (rank, worker_id)).": [
        "test_a_stream_s_state_is_its_count_with_its_rank_and_worker",
    ],
    "Called inside a DataLoader worker, it describes just that stream.": [
        "test_classes_around_the_files_of_a_volume_are_iterated_and_resumed_by_worker",
    ],
    "The returned dict is JSON-serialisable and safe to fold into a larger training checkpoint.": [
        "test_a_stream_s_state_is_its_count_with_its_rank_and_worker",
        "test_a_loader_s_state_is_json_and_part_of_a_larger_checkpoint",
    ],
    "The next __iter__ skips delivered files at the head of this stream's slice.": [
        "test_the_next_iteration_alone_skips_what_was_delivered",
    ],
    "Raises ValueError on an unrecognised version, a negative count, or a stream-identity "
    "mismatch.": ["test_states_that_are_not_this_stream_s_are_value_errors"],
    "The dataset methods are the primitive that wrapper datasets delegate to.": [
        "test_classes_around_the_files_of_a_volume_are_iterated_and_resumed_by_worker",
    ],
    # DataLoader
    "When torch.distributed is initialised the default is 6 workers per rank; when it is not the "
    "default is 48.": ["test_defaults_of_workers_and_prefetching"],
    "prefetch_factor defaults to 4.": [
        "test_defaults_of_workers_and_prefetching",
    ],
    "An explicitly passed num_workers always wins.": [
        "test_defaults_of_workers_and_prefetching",
    ],
    "persistent_workers is forced on whenever num_workers > 0; it stays off when iterating in the "
    "main process.": ["test_workers_are_kept_between_epochs"],
    "__iter__ returns a wrapper that times each next() call and logs the timings to the active "
    "MLflow run, if one exists.": [
        "test_means_and_variances_are_logged_every_ten_seconds_and_at_the_end_of_an_epoch",
        "test_without_an_active_run_or_when_logging_fails_the_batches_come_all_the_same",
        "test_the_same_metrics_are_logged",
    ],
    "Metrics are namespaced by torch.distributed rank so multiple ranks can share a single MLflow "
    "run.": [
        "test_means_and_variances_are_logged_every_ten_seconds_and_at_the_end_of_an_epoch",
    ],
    "If the dataset is Checkpointable, the loader supports state_dict() / load_state_dict().": [
        "test_from_every_stop_the_batches_and_their_order_are_those_of_a_loader_that_went_on",
    ],
    "Each worker's dataset state rides back with its batches and is harvested as batches are "
    "delivered, so a resumed run continues from the next not-yet-delivered file per stream, not "
    "the next prefetched one.": [
        "test_the_state_counts_what_was_consumed_and_not_what_was_prefetched",
        "test_every_stop_with_prefetching_workers_resumes_at_the_next_batch",
    ],
    "Works with or without batching.": [
        "test_single_items_without_batches_resume_too",
        "test_from_every_stop_the_batches_and_their_order_are_those_of_a_loader_that_went_on",
    ],
    "Validates the loader-level version and asserts the checkpoint's grid matches this loader's "
    "(world_size and num_workers).": [
        "test_a_state_of_another_grid_rank_or_directory_is_refused",
        "test_a_state_of_another_version_grid_or_kind_is_refused",
    ],
    "It then arranges for each worker's dataset replica to skip its already-delivered files; the "
    "single-process case seeds the dataset directly.": [
        "test_from_every_stop_the_batches_and_their_order_are_those_of_a_loader_that_went_on",
    ],
    "Any existing worker pool is torn down here; the next __iter__ re-forks workers that inherit "
    "the restored state.": [
        "test_an_epoch_left_early_begins_anew_and_a_state_is_loaded_in_place",
    ],
    "Raises ValueError on an unrecognised version or a grid mismatch, and TypeError if the dataset "
    "is not Checkpointable.": [
        "test_a_state_of_another_version_grid_or_kind_is_refused",
        "test_datasets_without_a_state_load_as_in_torch_and_are_refused_by_name",
    ],
    "The grid (world_size, num_workers) is recorded.": [
        "test_a_position_is_given_out_as_counts_of_the_workers",
    ],
    # UCVolumeWriter, UCVolumeReader
    "StorageWriter that uploads checkpoint files to a UC volume.": [
        "test_checkpoints_are_streamed_committed_verified_and_removed",
    ],
    "StorageReader that downloads checkpoint files from a UC volume.": [
        "test_checkpoints_are_streamed_committed_verified_and_removed",
    ],
    "Inherits all of torch's FileSystemWriter behavior, including the BlockingAsyncStager mixin "
    "used by dcp.async_save.": [
        "test_the_writer_takes_torch_s_arguments_and_stages_for_async_save",
        "test_an_asynchronous_save_has_the_values_as_of_the_call",
    ],
    "kwargs: forwarded to FileSystemWriter (e.g. single_file_per_rank, thread_count, "
    "cache_staged_state_dict, serialization_format).": [
        "test_the_writer_takes_torch_s_arguments_and_stages_for_async_save",
    ],
    "classmethod validate_checkpoint_id(checkpoint_id) returns bool.": [
        "test_paths_of_checkpoints_are_valid",
    ],
    # Checkpointable
    "isinstance(obj, Checkpointable) is true for any object exposing both methods.": [
        "test_whatever_has_both_methods_is_checkpointable",
    ],
}
"""Sentences that hold here as they stand."""

INSTEAD = {
    "Files are cached locally on first access.": [
        # On a mount there is no second copy.
        "test_batches_are_local_paths_in_the_order_of_the_listing",
        "test_a_file_is_one_request_and_once_it_is_cached_a_question",
    ],
    "Independently constructed datasets do not share a cache.": [
        # They do, and a store's newer file is seen.
        "test_an_object_is_found_by_all_who_have_the_directory",
        "test_a_file_that_was_written_anew_is_read_anew",
    ],
    "UC FUSE directory to read from (must start with /Volumes).": [
        "test_the_example_of_the_documentation_yields_each_path_once",
    ],
    "The checkpoint pins world_size and num_workers; resuming on a different grid raises.": [
        # Of the loader over files; a state of version 1 does raise.
        "test_every_sample_is_delivered_once_and_in_the_seeded_order",
        "test_jobs_with_workers_that_are_killed_deliver_every_sample_once",
        "test_resumed_on_two_ranks_the_global_batches_are_the_same",
    ],
    "There is no single global cursor that describes them all.": [
        "test_a_position_continued_on_another_grid_delivers_every_sample_once",
    ],
    "Requires the fork multiprocessing start method when num_workers > 0 (a ValueError is raised "
    "otherwise).": [
        "test_workers_of_every_start_method_give_what_no_worker_gives",
        "test_workers_that_are_not_forked_are_given_their_states_too",
    ],
}
"""Sentences about limits that are not here, with the tests of what is instead."""


def _tests() -> set[str]:
    """Of this directory and of the one with programs of others."""
    found = set()
    for path in [*HERE.glob("test_*.py"), *(HERE.parent / "external").glob("test_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.add(node.name)
    return found


def test_every_sentence_has_tests_that_are_there() -> None:
    named = {test for tests in [*KEPT.values(), *INSTEAD.values()] for test in tests}
    assert named - _tests() == set()
    assert all(KEPT.values())
    assert all(INSTEAD.values())


# The sentences that no other module tests


def _names(paths: Any) -> list[str]:
    return [Path(path).name for path in paths]


def test_the_example_of_the_documentation_yields_each_path_once(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 9)
    dataset = UCVolumeDataset(str(tmp_path))
    assert isinstance(dataset, IterableDataset)
    loader = DataLoader(dataset, num_workers=2)
    seen = []
    for [local_path] in loader:
        assert Path(local_path).is_file()
        seen.append(Path(local_path).name)
    assert seen == expected


def test_whatever_has_both_methods_is_checkpointable(tmp_path: Path, make_files: MakeFiles) -> None:
    class Both:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            """Nothing to restore."""

    class One:
        def state_dict(self) -> dict[str, Any]:
            return {}

    make_files(tmp_path, 2)
    assert isinstance(Both(), Checkpointable)
    assert not isinstance(One(), Checkpointable)
    dataset = UCVolumeDataset(str(tmp_path))
    assert isinstance(dataset, Checkpointable)
    assert isinstance(DataLoader(dataset, num_workers=0), Checkpointable)


def test_a_stream_s_state_is_its_count_with_its_rank_and_worker(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    make_files(tmp_path, 5)
    dataset = UCVolumeDataset(str(tmp_path))
    fields = {"version": 1, "rank": 0, "worker_id": 0}
    assert dataset.state_dict().items() >= {**fields, "delivered": 0}.items()
    stream = iter(dataset)
    next(stream)
    next(stream)
    state = dataset.state_dict()
    assert state.items() >= {**fields, "delivered": 2}.items()
    assert json.loads(json.dumps(state)) == state


def test_the_next_iteration_alone_skips_what_was_delivered(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 5)
    dataset = UCVolumeDataset(str(tmp_path))
    dataset.load_state_dict({"version": 1, "delivered": 3, "rank": 0, "worker_id": 0})
    assert dataset.state_dict()["delivered"] == 3
    assert _names(dataset) == expected[3:]
    assert _names(dataset) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "must have version 1, got 2"),
        ({"version": None}, "must have version 1, got None"),
        ({"delivered": -1}, "delivered must be a number from 0, got -1"),
        ({"delivered": "3"}, "delivered must be a number from 0, got '3'"),
        ({"rank": 1}, "rank 1, worker 0, but this is rank 0, worker 0"),
        ({"worker_id": 4}, "rank 0, worker 4, but this is rank 0, worker 0"),
    ],
)
def test_states_that_are_not_this_stream_s_are_value_errors(
    changes: dict[str, Any], message: str, tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 5)
    dataset = UCVolumeDataset(str(tmp_path))
    state = {"version": 1, "delivered": 3, "rank": 0, "worker_id": 0, **changes}
    with pytest.raises(ValueError, match=message):
        dataset.load_state_dict(state)
    assert _names(dataset) == expected


def test_a_loader_s_state_is_json_and_part_of_a_larger_checkpoint(
    tmp_path: Path, make_files: MakeFiles
) -> None:
    expected = make_files(tmp_path, 6)
    loader = DataLoader(UCVolumeDataset(str(tmp_path)), 2, num_workers=0)
    next(iter(loader))
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    torch.save({"weights": torch.ones(2), "loader": state}, tmp_path / "checkpoint")
    saved = torch.load(tmp_path / "checkpoint", weights_only=True)
    (tmp_path / "checkpoint").unlink()
    resumed = DataLoader(UCVolumeDataset(str(tmp_path)), 2, num_workers=0)
    resumed.load_state_dict(saved["loader"])
    assert [name for batch in resumed for name in _names(batch)] == expected[2:]


def test_defaults_of_workers_and_prefetching(
    tmp_path: Path, make_files: MakeFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_files(tmp_path, 4)
    dataset = UCVolumeDataset(str(tmp_path))
    alone = DataLoader(dataset)
    assert (alone.num_workers, alone.prefetch_factor) == (48, 4)
    monkeypatch.setattr("trainmount.data.loader.is_distributed", lambda: True)
    assert DataLoader([1]).num_workers == 6  # type: ignore[arg-type]
    explicit = DataLoader(dataset, num_workers=1, prefetch_factor=3)
    assert (explicit.num_workers, explicit.prefetch_factor) == (1, 3)
    # Positional arguments are torch's, too.
    assert DataLoader(dataset, 3, False, None, None, 2).num_workers == 2
    torch_s = list(inspect.signature(TorchDataLoader).parameters)[:6]
    assert list(inspect.signature(DataLoader).parameters)[:6] == torch_s


def test_workers_are_kept_between_epochs(tmp_path: Path, make_files: MakeFiles) -> None:
    make_files(tmp_path, 4)
    dataset = UCVolumeDataset(str(tmp_path))
    loader = DataLoader(dataset, num_workers=1, persistent_workers=False)
    assert loader.persistent_workers
    list(loader)
    workers = loader._iterator
    list(loader)
    assert loader._iterator is workers
    for options in ({}, {"prefetch_factor": None}, {"prefetch_factor": 8}):
        in_main = DataLoader(dataset, num_workers=0, **options)
        assert (in_main.persistent_workers, in_main.prefetch_factor) == (False, None)
        assert len(list(in_main)) == 4


def test_the_writer_takes_torch_s_arguments_and_stages_for_async_save(tmp_path: Path) -> None:
    writer = UCVolumeWriter(
        tmp_path,
        single_file_per_rank=False,
        thread_count=2,
        cache_staged_state_dict=True,
        serialization_format=SerializationFormat.TORCH_SAVE,
    )
    assert isinstance(writer, BlockingAsyncStager)
    assert writer.cache_staged_state_dict
    with pytest.raises(ValueError, match="serialization_format"):
        UCVolumeWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS)


@pytest.mark.parametrize("storage", [UCVolumeWriter, UCVolumeReader])
def test_paths_of_checkpoints_are_valid(
    storage: type[UCVolumeWriter | UCVolumeReader], tmp_path: Path
) -> None:
    assert storage.validate_checkpoint_id("/Volumes/main/default/models/run-7") is True
    assert storage.validate_checkpoint_id(tmp_path) is True
    assert storage.validate_checkpoint_id("") is False


def test_the_names_are_those_of_the_other_library() -> None:
    module = sys.modules["trainmount.data"]
    assert set(module.__all__) == {
        "Checkpointable",
        "DataLoader",
        "UCVolumeDataset",
        "UCVolumeReader",
        "UCVolumeWriter",
    }
    assert next(iter(inspect.signature(UCVolumeDataset).parameters)) == "path"
