"""Checkpoints of Ray Data without Ray: names, and what its recovery does through the filesystem."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec.config
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import FileSelector, FileType, LocalFileSystem

from trainmount.errors import CheckpointError
from trainmount_files.server import LocalServer, ServerSettings

if importlib.util.find_spec("ray") is None:
    # What is tested here never calls it.
    sys.modules["ray"] = types.ModuleType("ray")
    sys.modules["ray"].__spec__ = importlib.machinery.ModuleSpec("ray", None)

from trainmount.ray import build_checkpoint_filesystem
from trainmount.ray.leftovers import claim, sweep
from trainmount.ray.names import owners, presented
from trainmount.ray.storage import BucketFileSystem, open_filesystem, path_in, scheme_of

TOKEN = "dapi-0123456789abcdef"
VOLUME = "/Volumes/main/default/data"


@pytest.fixture(params=["directory", "volume"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Any, str]]:
    """A filesystem with a run that has begun, and the checkpoint's path as Ray passes it."""
    if request.param == "directory":
        path = str(tmp_path / "ck")
        yield begun(build_checkpoint_filesystem(path), path), path
        return
    settings = ServerSettings(
        directory=tmp_path, token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as server:
        url = f"volumes://{VOLUME}/ck"
        options = {"volumes": {"host": server.url, "token": TOKEN}}
        yield begun(build_checkpoint_filesystem(url, options), f"{VOLUME}/ck"), f"{VOLUME}/ck"


def begun(filesystem: Any, path: str) -> Any:
    """As Ray plans a write."""
    filesystem.create_dir(path, recursive=True)
    return filesystem


def write_ids(filesystem: Any, path: str, ids: list[Any]) -> None:
    pq.write_table(pa.table({"uid": ids}), path, filesystem=filesystem)


def commit(filesystem: Any, folder: str, base: str, ids: list[Any]) -> None:
    write_ids(filesystem, f"{folder}/{base}.pending.parquet", ids)
    filesystem.move(f"{folder}/{base}.pending.parquet", f"{folder}/{base}.parquet")


def listed(filesystem: Any, folder: str) -> list[str]:
    found = filesystem.get_file_info(FileSelector(folder, allow_not_found=True))
    return sorted(info.base_name for info in found)


def recover_as_ray_does(filesystem: Any, folder: str, data: Path) -> None:
    """The steps of Ray's `_clean_pending_checkpoints_task`."""
    selector = FileSelector(folder, recursive=False, allow_not_found=True)
    pending = [
        info
        for info in filesystem.get_file_info(selector)
        if info.type == FileType.File and info.path.endswith(".pending.parquet")
    ]
    prefixes = tuple(info.base_name.removesuffix(".pending.parquet") for info in pending)
    local = LocalFileSystem()
    for info in local.get_file_info(FileSelector(str(data), recursive=True)):
        if info.type == FileType.File and prefixes and info.base_name.startswith(prefixes):
            local.delete_file(info.path)
    for info in pending:
        filesystem.delete_file(info.path)


def test_without_ray_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import trainmount.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: trainmount.ray needs Ray Data: pip install 'trainmount[ray]'"
    )


def test_recovering_part_1_leaves_part_10_and_part_11(
    place: tuple[Any, str], tmp_path: Path
) -> None:
    filesystem, folder = place
    data = tmp_path / "out"
    (data / "day=1").mkdir(parents=True)
    for base in ("part-10", "part-11"):
        commit(filesystem, folder, base, [base])
    write_ids(filesystem, f"{folder}/part-1.pending.parquet", ["a"])
    kept = ["part-10-0.parquet", "part-11.csv", "part-10_000000_000001.png", "part-12-0.parquet"]
    gone = ["part-1-0.parquet", "part-1.csv", "part-1_000000_000001.png", "day=1/part-1-3.parquet"]
    for name in kept + gone:
        (data / name).touch()

    recover_as_ray_does(filesystem, folder, data)

    left = sorted(str(path.relative_to(data)) for path in data.rglob("*") if path.is_file())
    assert left == sorted(kept)
    assert listed(filesystem, folder) == ["part-10.parquet", "part-11.parquet"]


def test_names_of_equal_length_are_shown_as_they_are() -> None:
    base = "0123456789abcdef0123456789abcdef_000001"
    names = [f"{base}.pending.parquet", "other.parquet"]
    assert presented(names) == {name: [name] for name in names}


def test_a_copy_whose_original_was_not_yet_removed_is_committed(
    place: tuple[Any, str], tmp_path: Path
) -> None:
    filesystem, folder = place
    commit(filesystem, folder, "part-1", ["a"])
    filesystem.copy_file(f"{folder}/part-1.parquet", f"{folder}/part-1.pending.parquet")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "part-1-0.parquet").touch()

    recover_as_ray_does(filesystem, folder, tmp_path / "out")

    assert (tmp_path / "out" / "part-1-0.parquet").exists()
    assert listed(filesystem, folder) == ["part-1.parquet"]


def test_a_pending_file_is_whole_or_absent(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    path = f"{folder}/a.pending.parquet"
    stream = filesystem.open_output_stream(path)
    stream.write(b"PAR1")
    assert filesystem.get_file_info(path).type == FileType.NotFound
    with pytest.raises(pa.ArrowInvalid):
        stream.close()
    assert filesystem.get_file_info(path).type == FileType.NotFound
    write_ids(filesystem, path, ["x"])
    assert pq.read_table(path, filesystem=filesystem)["uid"].to_pylist() == ["x"]


def test_a_commit_that_was_made_is_not_missed_by_its_repetition(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    commit(filesystem, folder, "a", ["x"])
    filesystem.move(f"{folder}/a.pending.parquet", f"{folder}/a.parquet")
    with pytest.raises(FileNotFoundError):
        filesystem.move(f"{folder}/b.pending.parquet", f"{folder}/b.parquet")


class Killed(Exception):
    """The process is gone."""


class Dying:
    """An fsspec filesystem that is gone before its `num_calls`-th call."""

    def __init__(self, filesystem: Any, num_calls: int) -> None:
        self._filesystem = filesystem
        self.left = num_calls

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.left == 0:
                raise Killed
            self.left -= 1
            return getattr(self._filesystem, name)(*args, **kwargs)

        return call


def write_as_a_task(filesystem: Any, folder: str, data: Path, ids: list[str]) -> None:
    write_ids(filesystem, f"{folder}/part-1.pending.parquet", ids)
    file = data / "part-1-0.parquet"
    file.write_text("half")
    if not filesystem.handler.fs.exists(folder):
        raise Killed
    file.write_text("whole")
    filesystem.move(f"{folder}/part-1.pending.parquet", f"{folder}/part-1.parquet")


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_task_that_is_killed_at_any_call_has_committed_whole_data_or_left_none(
    place: tuple[Any, str], tmp_path: Path, repeats: int
) -> None:
    filesystem, folder = place
    data = tmp_path / "out"
    data.mkdir()
    num_calls, endings = 0, []
    while True:
        task = pickle.loads(pickle.dumps(filesystem))
        task.handler.fs = dying = Dying(task.handler.fs, num_calls)
        try:
            for _ in range(repeats):
                write_as_a_task(task, folder, data, ["a", "b"])
        except Killed:
            pass
        recover_as_ray_does(filesystem, folder, data)
        committed = listed(filesystem, folder)
        left = {path.name: path.read_text() for path in data.iterdir()}
        if committed:
            assert (committed, left) == (["part-1.parquet"], {"part-1-0.parquet": "whole"})
            filesystem.delete_file(f"{folder}/part-1.parquet")
            (data / "part-1-0.parquet").unlink()
        else:
            assert left == {}
        endings.append(bool(committed))
        if dying.left:
            break
        num_calls += 1
    assert set(endings) == {False, True}
    assert endings[-1]


def test_a_listing_sees_a_commit_of_another_process_at_once(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    assert listed(filesystem, folder) == []
    commit(pickle.loads(pickle.dumps(filesystem)), folder, "a", ["x"])
    assert listed(filesystem, folder) == ["a.parquet"]


def test_a_task_of_a_run_that_was_taken_over_commits_nothing(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    late = pickle.loads(pickle.dumps(filesystem))
    write_ids(late, f"{folder}/a.pending.parquet", ["x"])

    filesystem.create_dir(folder, recursive=True)

    with pytest.raises(CheckpointError, match="taken over"):
        late.move(f"{folder}/a.pending.parquet", f"{folder}/a.parquet")
    with pytest.raises(CheckpointError, match="taken over"):
        write_ids(late, f"{folder}/b.pending.parquet", ["y"])
    assert "a.parquet" not in listed(filesystem, folder)
    filesystem.delete_dir(folder)
    with pytest.raises(CheckpointError, match="or has finished"):
        write_ids(filesystem, f"{folder}/c.pending.parquet", ["z"])


def test_a_repeated_task_is_not_committed_until_it_is_done_again(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    commit(filesystem, folder, "u_000001", ["x", "y"])
    write_ids(filesystem, f"{folder}/u_000001.pending.parquet", ["y", "x"])
    assert listed(filesystem, folder) == ["u_000001.pending.parquet"]
    filesystem.move(f"{folder}/u_000001.pending.parquet", f"{folder}/u_000001.parquet")
    assert listed(filesystem, folder) == ["u_000001.parquet"]


def test_a_file_name_that_stood_for_other_rows_is_refused(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    commit(filesystem, folder, "part-0", ["x"])
    with pytest.raises(CheckpointError, match="write_uuid and task_index"):
        write_ids(filesystem, f"{folder}/part-0.pending.parquet", ["y"])
    assert listed(filesystem, folder) == ["part-0.parquet"]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (["a", "b", "a"], "the id 'a' of 'uid' stands for several"),
        (["a", None], "must not be null"),
    ],
)
def test_ids_that_do_not_tell_rows_apart_are_refused_before_the_data_are_written(
    place: tuple[Any, str], ids: list[Any], says: str
) -> None:
    filesystem, folder = place
    filesystem.handler.unique_ids = True
    with pytest.raises(CheckpointError, match=says):
        write_ids(filesystem, f"{folder}/a.pending.parquet", ids)
    assert listed(filesystem, folder) == []


def test_data_beside_the_checkpoint_are_written_as_they_are(place: tuple[Any, str]) -> None:
    filesystem, folder = place
    other = f"{folder}-out"
    filesystem.create_dir(other, recursive=True)
    with filesystem.open_output_stream(f"{other}/part-1-0.parquet") as stream:
        stream.write(b"any bytes")
    assert filesystem.open_input_file(f"{other}/part-1-0.parquet").read() == b"any bytes"
    filesystem.move(f"{other}/part-1-0.parquet", f"{other}/b")
    assert listed(filesystem, other) == ["b"]
    assert listed(filesystem, folder) == []


def test_data_that_a_task_of_the_run_before_still_writes_are_removed_in_the_end(
    place: tuple[Any, str], tmp_path: Path
) -> None:
    filesystem, folder = place
    data = tmp_path / "out"
    data.mkdir()
    late = pickle.loads(pickle.dumps(filesystem))
    commit(late, folder, "part-10", ["a"])
    commit(late, folder, "part-2", ["b"])
    filesystem.copy_file(f"{folder}/part-2.parquet", f"{folder}/part-2.pending.parquet")
    write_ids(late, f"{folder}/part-1.pending.parquet", ["c"])
    for name in ("part-10-0.parquet", "part-2-0.parquet", "part-1-0.parquet", "part-11-0.parquet"):
        (data / name).touch()

    filesystem.handler.take_over()
    claim(filesystem.handler)
    assert sweep(filesystem.handler, str(data), LocalFileSystem()) == 1
    (data / "part-1-1.parquet").touch()
    with pytest.raises(CheckpointError, match="taken over"):
        late.move(f"{folder}/part-1.pending.parquet", f"{folder}/part-1.parquet")
    with pytest.raises(FileNotFoundError):
        filesystem.move(f"{folder}/part-1.pending.parquet", f"{folder}/part-1.parquet")

    assert listed(filesystem, folder) == ["part-10.parquet", "part-2.parquet"]
    assert sweep(filesystem.handler, str(data), LocalFileSystem()) == 1
    left = sorted(path.name for path in data.iterdir())
    assert left == ["part-10-0.parquet", "part-11-0.parquet", "part-2-0.parquet"]


_SHAPES = ("{0}-0.parquet", "{0}-12.parquet", "{0}.csv", "{0}", "{0}_000000_000017.png")


@given(
    bases=st.sets(st.from_regex(r"[a-c]{1,2}[-_]?[0-9]{1,3}", fullmatch=True), min_size=1),
    shape=st.sampled_from(_SHAPES),
)
def test_each_data_file_belongs_to_the_task_that_wrote_it(bases: set[str], shape: str) -> None:
    names = {shape.format(base): base for base in bases}
    assert owners(bases, names) == names


def test_the_number_of_a_file_may_be_amid_its_name() -> None:
    names = ["part-0-u_1.parquet", "part-7-u_1.parquet", "part-0-u_10.parquet", "u_1.parquet"]
    assert owners(["part-{i}-u_1"], names) == dict.fromkeys(names[:2], "part-{i}-u_1")


@pytest.mark.parametrize(
    ("path", "scheme", "called"),
    [
        ("/mnt/shared/ck", "file", "/mnt/shared/ck"),
        ("file:///mnt/ck/", "file", "/mnt/ck"),
        ("volumes:///Volumes/a/b/c/ck", "volumes", "/Volumes/a/b/c/ck"),
        ("volumes://Volumes/a/b/c/ck", "volumes", "/Volumes/a/b/c/ck"),
        ("/Volumes/a/b/c/not-mounted", "volumes", "/Volumes/a/b/c/not-mounted"),
        ("dbfs:/Volumes/a/b/c/ck", "volumes", "/Volumes/a/b/c/ck"),
        ("s3a://bucket/ck", "s3", "bucket/ck"),
        ("cos://bucket/ck", "cos", "bucket/ck"),
        ("gcs://bucket/ck", "gs", "bucket/ck"),
    ],
)
def test_a_path_says_where_it_leads(path: str, scheme: str, called: str) -> None:
    assert (scheme_of(path), path_in(path)) == (scheme, called)


@pytest.mark.parametrize(
    ("path", "options", "says"),
    [
        ("relative/ck", None, "must be absolute"),
        ("hdfs://host/ck", None, "must be volumes://"),
        ("/mnt/ck", {"key": "k"}, "takes no storage options, got key"),
        ("cos://bucket/ck", {"cos": {"key": "k"}}, "needs endpoint_url"),
        ("s3://b/ck", {"client_kwargs": {"verify": False}}, "no meaning here: verify"),
    ],
)
def test_what_cannot_be_meant_is_refused_at_once(path: str, options: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build_checkpoint_filesystem(path, options)


S3FS = {
    "key": "AK",
    "secret": "SK",
    "client_kwargs": {"endpoint_url": "https://s3.example.com", "region_name": "eu-west-1"},
    "use_listings_cache": False,
}


def settings_of(path: str, options: Any) -> dict[str, str]:
    """What the volume of the bucket is opened with."""
    filesystem = open_filesystem(path, options)
    assert isinstance(filesystem, BucketFileSystem)
    return filesystem._locations._of("b")  # type: ignore[attr-defined]


def test_options_are_those_of_s3fs() -> None:
    keys = {"access_key_id": "AK", "secret_access_key": "SK", "region": "eu-west-1"}
    path_style = {"config_kwargs": {"s3": {"addressing_style": "path"}}}
    virtual = {"config_kwargs": {"s3": {"addressing_style": "virtual"}}}
    assert settings_of("s3://b/ck", S3FS) == keys | {"endpoint": "https://s3.example.com"}
    assert settings_of("s3://b/ck", {"s3": S3FS, "cos": {"key": "no"}}) == settings_of(
        "s3://b", S3FS
    )
    assert settings_of("s3://b/ck", S3FS | virtual) == keys | {
        "endpoint": "https://b.s3.example.com",
        "virtual_hosted_style_request": "true",
    }
    assert settings_of("cos://b/ck", S3FS) == settings_of("s3://b/ck", S3FS | virtual)
    assert settings_of("cos://b/ck", S3FS | path_style) == keys | {
        "endpoint": "https://s3.example.com",
        "virtual_hosted_style_request": "false",
    }
    local = {"access_key_id": "AK", "endpoint": "http://127.0.0.1:9000", "token": "T"}
    assert settings_of("s3://b", local) == {
        "access_key_id": "AK",
        "endpoint": "http://127.0.0.1:9000",
        "session_token": "T",
        "allow_http": "true",
    }


def test_what_is_not_given_is_taken_from_the_configuration_of_fsspec(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": "AK", "secret": "SK"})
    assert settings_of("s3://b", {"s3": {"secret": "other"}}) == {
        "access_key_id": "AK",
        "secret_access_key": "other",
    }


def test_explicit_options_reach_the_workers_and_are_not_shown() -> None:
    filesystem = build_checkpoint_filesystem("s3://b/ck", {"s3": S3FS})
    there = pickle.loads(pickle.dumps(filesystem))
    assert there.handler.fs._locations._of("b")["secret_access_key"] == "SK"
    assert "SK" not in repr(filesystem) + repr(there.handler) + repr(there.handler.fs)
