"""The filesystem in other processes, and where its token is not."""

from __future__ import annotations

import copy
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import fsspec
import pytest
from tests.files.conftest import ROOT, TOKEN

from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault

# In a child that does not know this module.
READ = """
import os, pickle, sys
fs = pickle.load(sys.stdin.buffer)
print(fs.cat_file(sys.argv[1]).decode(), fs.ls(os.path.dirname(sys.argv[1]), detail=False))
"""


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "no-profiles"))
    VolumesFileSystem.clear_instance_cache()


@pytest.fixture
def by_environment(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> VolumesFileSystem:
    monkeypatch.setenv("DATABRICKS_HOST", server.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    return VolumesFileSystem()


@pytest.fixture
def by_profile(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> VolumesFileSystem:
    profiles = tmp_path / "profiles"
    profiles.write_text(f"[training]\nhost = {server.url}\ntoken = {TOKEN}\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(profiles))
    return VolumesFileSystem(profile="training")


@pytest.fixture
def own_forkserver() -> Iterator[None]:
    """The server of forks is one for the whole process and keeps the environment it began with: an
    earlier test's, which knows no server of ours.
    """
    # As CPython's own tests end it.
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("own_forkserver")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize(
    ("source", "method"),
    [
        ("by_environment", "fork"),
        ("by_environment", "spawn"),
        ("by_environment", "forkserver"),
        ("explicit", "fork"),
        ("explicit", "forkserver"),
    ],
)
def test_workers_of_every_kind_read_and_write(
    request: pytest.FixtureRequest, server: LocalServer, method: str, source: str
) -> None:
    if source == "explicit":
        fs = VolumesFileSystem(host=server.url, token=TOKEN)
    else:
        fs = request.getfixturevalue(source)
    fs.pipe_file(f"{ROOT}/file", b"content")
    assert fs.cat_file(f"{ROOT}/file") == b"content"
    context = multiprocessing.get_context(method)
    # A method, since a spawned process cannot import this module. The copy reads and writes.
    workers = [
        context.Process(target=fs.cp_file, args=(f"{ROOT}/file", f"{ROOT}/from-{number}"))
        for number in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * 2
    assert fs.cat(f"{ROOT}/from-*") == {f"{ROOT}/from-{n}": b"content" for n in range(2)}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_worker_has_connections_of_its_own(by_environment: VolumesFileSystem) -> None:
    fs = by_environment
    fs.pipe_file(f"{ROOT}/file", b"content")
    with fs.open(f"{ROOT}/file") as file:
        assert file.read(3) == b"con"
        answers = [in_child(lambda: read_both(fs, file)) for _ in range(2)]
        assert file.read() == b"tent"
    sockets_of_children = [set(answer.split()[2:]) for answer in answers]
    assert [answer.split()[:2] for answer in answers] == [["content", "tent"]] * 2
    assert all(sockets_of_children)
    # Numbers of sockets are the kernel's, of all processes.
    assert not set.intersection(*sockets_of_children)


def read_both(fs: VolumesFileSystem, file: Any) -> str:
    before = sockets()
    content = fs.cat_file(f"{ROOT}/file").decode()
    return " ".join([content, file.read().decode(), *(sockets() - before)])


def sockets() -> set[str]:
    descriptors = Path("/proc/self/fd").iterdir()
    found = {str(descriptor.readlink()) for descriptor in descriptors if descriptor.is_symlink()}
    return {each for each in found if each.startswith("socket:")}


def in_child(call: Callable[[], str]) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, call().encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return answer.read().decode()


@pytest.mark.parametrize("source", ["by_environment", "by_profile"])
def test_a_pickled_filesystem_holds_no_token(request: pytest.FixtureRequest, source: str) -> None:
    fs = request.getfixturevalue(source)
    fs.pipe_file(f"{ROOT}/file", b"content")
    pickled = pickle.dumps(pickle.loads(pickle.dumps(fs)))
    assert TOKEN.encode() not in pickled
    assert pickle.loads(pickled) == fs
    done = subprocess.run(
        [sys.executable, "-c", READ, f"{ROOT}/file"], input=pickled, capture_output=True, check=True
    )
    assert done.stdout.decode() == f"content ['{ROOT}/file']\n"


def test_an_explicit_token_is_not_pickled_but_refused(server: LocalServer) -> None:
    fs = VolumesFileSystem(host=server.url, token=TOKEN)
    with pytest.raises(pickle.PicklingError, match="set DATABRICKS_TOKEN, or a profile"):
        pickle.dumps(fs)
    assert copy.copy(fs) is copy.deepcopy(fs) is fs


def test_options_of_a_bucket_stay_in_the_process() -> None:
    keys = {"access_key_id": "AK", "secret_access_key": TOKEN}
    fs = VolumesFileSystem(root="s3://bucket/dir", options=keys)
    assert fs._locations.find("/file").volume._options.storage == keys
    assert TOKEN not in repr(fs) + fs.to_json() + repr(fs.storage_options)
    with pytest.raises(pickle.PicklingError, match="the variables of the cloud"):
        pickle.dumps(fs)
    assert fs is not VolumesFileSystem(root="s3://bucket/dir", options={"region": "eu-west-1"})


def test_a_token_is_shown_nowhere(server: LocalServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    fs = VolumesFileSystem(host=server.url, token=TOKEN)
    other = VolumesFileSystem(host=server.url, token="another")
    assert fs != other
    assert fs._fs_token != other._fs_token
    fs.pipe_file(f"{ROOT}/file", b"1")
    with fs.open(f"{ROOT}/file") as file:
        shown = [repr(file), repr(file.raw), repr(vars(file))]
    server.inject(Fault(status=403))
    with pytest.raises(PermissionError) as error:
        fs.cat_file(f"{ROOT}/file")
    shown += [
        repr(fs),
        str(fs.storage_options),
        str(fs.to_dict()),
        fs.to_json(),
        str(fs._fs_token),
        repr(fs._locations._identity),
        repr(error.value),
        "".join(traceback.format_exception(error.value)),
        caplog.text,
    ]
    assert all(TOKEN not in each for each in shown)
    assert json.loads(fs.to_json()) == {
        "cls": "trainmount_files.filesystem.volumes:VolumesFileSystem",
        "protocol": "volumes",
        "args": [],
        "host": server.url,
    }


def test_a_filesystem_comes_back_from_json(by_environment: VolumesFileSystem) -> None:
    by_environment.pipe_file(f"{ROOT}/file", b"content")
    again = fsspec.AbstractFileSystem.from_json(by_environment.to_json())
    assert again == by_environment
    assert again.cat_file(f"{ROOT}/file") == b"content"


def test_filesystems_of_one_identity_share_their_volumes(server: LocalServer) -> None:
    def volume(**options: Any) -> object:
        fs = VolumesFileSystem(host=server.url, skip_instance_cache=True, **options)
        volumes.append(fs._locations.find(f"{ROOT}/x").volume)
        return volumes[-1]

    volumes: list[object] = []
    assert volume(token=TOKEN) is volume(token=TOKEN, parallelism=2)
    assert volume(token=TOKEN) is not volume(token="another")
    assert volume(token=TOKEN) is not volume()


def test_fsspec_is_imported_by_who_uses_it_only() -> None:
    code = "import sys, trainmount_files; print({'fsspec', 'urllib3'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"
