"""A volume in other processes, forked or spawned, and configured by environment or profile."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN

from trainmount_files import ByteRange, Unauthenticated, Volume, open_volume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.server.embedded import LocalServer

# Run in the children; a module of a test cannot be imported by name in a spawned one.
READ = """
import pickle, sys
from trainmount_files import ByteRange
volume = pickle.load(sys.stdin.buffer)
buffer = bytearray(7)
volume.read_into("file", ByteRange(0, 7), buffer)
print(buffer.decode())
"""

WORKERS = """
import multiprocessing, os, pickle, sys, threading, time
from trainmount_files import ByteRange, open_volume
from trainmount_files.transfer import open_reader

NUM_WORKERS = 2


def connections(port):
    # Inodes of this process' sockets that are connected to the server.
    lines = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
    connected = {f"socket:[{f[9]}]" for f in lines if int(f[2].partition(":")[2], 16) == port}
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            pass
    return found & connected


def read(volume):
    buffer = bytearray(7)
    volume.read_into("file", ByteRange(0, 7), buffer)
    with open_reader(volume, "file") as reader:
        return bytes(buffer) + reader.read(7)


def work(given, port, parents, results):
    began = time.monotonic()
    volume = pickle.loads(given) if isinstance(given, bytes) else given
    content = read(volume)
    own = connections(port)
    results.put((content, time.monotonic() - began < 30, bool(own), sorted(own & parents)))
    volume.close()


def main():
    method, port, token = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    volume = open_volume("/Volumes/main/default/data")
    assert read(volume) == b"contentcontent"
    pickled = pickle.dumps(pickle.loads(pickle.dumps(volume)))
    assert token.encode() not in pickled
    done = threading.Event()

    def keep_reading():
        # Locks are held, and requests are under way, whenever a child is forked.
        while not done.is_set():
            read(volume)

    readers = [threading.Thread(target=keep_reading) for _ in range(3)]
    for reader in readers:
        reader.start()
    context = multiprocessing.get_context(method)
    results = context.SimpleQueue()
    parents = connections(port)
    assert parents
    given = [volume if method == "fork" and n % 2 else pickled for n in range(NUM_WORKERS)]
    children = [
        context.Process(target=work, args=(each, port, parents, results)) for each in given
    ]
    for child in children:
        child.start()
    found = [results.get() for _ in children]
    for child in children:
        child.join()
    done.set()
    for reader in readers:
        reader.join()
    assert read(volume) == b"contentcontent"
    assert [child.exitcode for child in children] == [0] * NUM_WORKERS
    for each in found:
        print(*each)


if __name__ == "__main__":
    main()
"""


@pytest.fixture(autouse=True)
def no_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("DATABRICKS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "no-profiles"))


def read(volume: Volume) -> bytes:
    buffer = bytearray(7)
    volume.read_into("file", ByteRange(0, 7), buffer)
    return bytes(buffer)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_workers_read_with_connections_of_their_own(remote: FilesApiVolume) -> None:
    remote.put("file", b"content")
    assert read(remote) == b"content"
    transport = remote._here().transport
    # Held while the children are forked: they must not inherit it locked.
    with remote._process._lock, transport._managers._lock:
        results = [os.pipe() for _ in range(4)]
        children = []
        for _, write in results:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    os.write(write, read(remote))
                    status = int(remote._here().transport is transport)
                finally:
                    os._exit(status)
            children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    for descriptor, write in results:
        assert os.read(descriptor, 100) == b"content"
        os.close(descriptor)
        os.close(write)
    assert read(remote) == b"content"


def test_an_explicit_token_travels_to_a_child_that_is_being_spawned_only(
    remote: FilesApiVolume,
) -> None:
    remote.put("file", b"content")
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    child = context.Process(target=remote.put, args=("from-child", b"1234567"))
    child.start()
    child.join(60)
    queue.close()
    assert child.exitcode == 0
    assert remote.stat("from-child").size_bytes == 7
    with pytest.raises(Unauthenticated):
        pickle.loads(pickle.dumps(remote)).stat("file")


def test_a_volume_from_the_environment_is_pickled_without_the_token(
    remote: FilesApiVolume, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("file", b"content")
    monkeypatch.setenv("DATABRICKS_HOST", server.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    volume = open_volume(f"dbfs:{ROOT}")
    assert read(volume) == b"content"
    pickled = pickle.dumps(pickle.loads(pickle.dumps(volume)))
    assert TOKEN.encode() not in pickled
    done = subprocess.run(
        [sys.executable, "-c", READ], input=pickled, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == b"content\n"
    volume.close()


@pytest.mark.parametrize(
    ("method", "source"),
    [
        ("fork", "environment"),
        ("spawn", "environment"),
        ("forkserver", "environment"),
        ("fork", "profile"),
    ],
)
def test_workers_of_each_kind_read_by_connections_of_their_own(
    remote: FilesApiVolume, server: LocalServer, tmp_path: Path, method: str, source: str
) -> None:
    remote.put("file", b"content")
    program = tmp_path / "program.py"
    program.write_text(WORKERS)
    variables = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    if source == "environment":
        variables |= {"DATABRICKS_HOST": server.url, "DATABRICKS_TOKEN": TOKEN}
    else:
        profiles = tmp_path / "profiles"
        profiles.write_text(f"[training]\nhost = {server.url}\ntoken = {TOKEN}\n")
        variables |= {
            "DATABRICKS_CONFIG_FILE": str(profiles),
            "DATABRICKS_CONFIG_PROFILE": "training",
        }
    port = server.url.rpartition(":")[2]
    done = subprocess.run(
        [sys.executable, program, method, port, TOKEN],
        capture_output=True,
        text=True,
        timeout=60,
        env=variables,
    )
    assert done.stderr == ""
    assert done.stdout == "b'contentcontent' True True []\n" * 2


def test_a_profile_of_the_sdk_is_used(
    remote: FilesApiVolume, server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote.put("file", b"content")
    profiles = tmp_path / "profiles"
    profiles.write_text(f"[training]\nhost = {server.url}/\ntoken = {TOKEN}\n")
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(profiles))
    monkeypatch.setenv("DATABRICKS_CONFIG_PROFILE", "training")
    volume = open_volume(ROOT)
    assert read(volume) == b"content"
    volume.close()


def test_nothing_configured_is_told_with_what_to_do() -> None:
    with pytest.raises(Unauthenticated, match="set DATABRICKS_HOST and DATABRICKS_TOKEN") as caught:
        open_volume(ROOT).stat("file")

    text = str(caught.value)
    assert "timeout_seconds" not in text and "redacted" not in text and ".;" not in text


def test_a_wrong_token_is_told_once(server: LocalServer) -> None:
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token="wrong"), OPTIONS)
    with pytest.raises(Unauthenticated, match="stat file: HTTP 401"):
        volume.stat("file")
    volume.close()


def test_a_volume_may_be_used_by_many_threads_at_once(remote: FilesApiVolume) -> None:
    remote.put("file", b"content")
    wrong: list[bytes] = []

    def run() -> None:
        for _ in range(20):
            found = read(remote)
            if found != b"content":
                wrong.append(found)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_package_is_imported_without_what_only_some_need() -> None:
    code = (
        "import sys, trainmount_files; "
        "print({'urllib3', 'requests', 'databricks', 'aiohttp', 'ctypes.util'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"


def test_a_volume_with_host_and_token_needs_no_sdk(server: LocalServer) -> None:
    code = (
        "import sys; from trainmount_files import open_volume; "
        f"open_volume('{ROOT}', host='{server.url}', token='{TOKEN}').put('x', b'1'); "
        "print('databricks.sdk' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "False\n"


def write_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    profiles = tmp_path / "profiles"
    profiles.write_text(text)
    monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(profiles))


def test_a_profile_that_is_named_counts_before_the_environment(
    remote: FilesApiVolume, server: LocalServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    remote.put("file", b"content")
    text = f"[DEFAULT]\nhost = http://127.0.0.1:9\n[a b]\nhost = {server.url}\ntoken = {TOKEN}\n"
    write_profiles(tmp_path, monkeypatch, text)
    monkeypatch.setenv("DATABRICKS_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("DATABRICKS_TOKEN", "of-somebody-else")
    monkeypatch.setenv("DATABRICKS_CONFIG_PROFILE", "other")
    volume = open_volume(ROOT, profile="a b")
    assert read(volume) == b"content"
    pickled = pickle.dumps(volume)
    assert TOKEN.encode() not in pickled
    assert read(pickle.loads(pickled)) == b"content"
    volume.close()
    explicit = open_volume(ROOT, profile="a b", token="wrong")
    with pytest.raises(Unauthenticated, match="HTTP 401"):
        explicit.stat("file")
    explicit.close()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[other]\nhost = http://x\n", "has no profile training"),
        ("token = dapi-0123456789abcdef\n", "is no configuration file"),
        ("[training]\ntoken = dapi-0123456789abcdef\n", "no host is configured|default auth"),
    ],
)
def test_a_profile_that_is_incomplete_is_told_without_its_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, reason: str
) -> None:
    write_profiles(tmp_path, monkeypatch, text)
    with pytest.raises(Unauthenticated, match=reason) as refused:
        open_volume(ROOT, profile="training").stat("file")
    assert "0123456789abcdef" not in str(refused.value)


def test_a_profile_without_its_file_is_told() -> None:
    with pytest.raises(Unauthenticated, match=r"training is asked for, and .*No such file"):
        open_volume(ROOT, profile="training").stat("file")
