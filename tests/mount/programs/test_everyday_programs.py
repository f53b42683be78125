"""git, pip and sqlite on a mount."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

NUM_FILES = 400
NUM_WRITERS = 3
NUM_ROWS = 40

IDENTITY = {
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.com",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.com",
    "GIT_CONFIG_GLOBAL": os.devnull,
}


@pytest.fixture
def git(run):
    """`git(folder, *arguments)`; what it prints."""
    return lambda folder, *arguments: run("git", "-C", folder, *arguments, environment=IDENTITY)


@pytest.fixture
def repository(tmp_path, git) -> Path:
    """Many files and one pack of some size."""
    origin = tmp_path / "origin"
    origin.mkdir()
    git(origin, "init", "--quiet", "--initial-branch", "main")
    for number in range(NUM_FILES):
        path = origin / f"part-{number % 20}" / f"file-{number}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number}\n" * 50)
    (origin / "weights.bin").write_bytes(os.urandom(8 << 20))
    git(origin, "add", ".")
    git(origin, "commit", "--quiet", "--message", "everything")
    return origin


@pytest.mark.quotes(
    "git | clone, commit, gc, fsck, and a clean status after a remount",
)
def test_git_clones_commits_packs_and_checks_and_is_clean_after_a_remount(
    start_mount, files_server, repository, git
):
    mount = start_mount(files_server.source, environment=files_server.environment())
    clone = mount.mountpoint / "clone"
    git(repository, "clone", "--quiet", "--no-local", repository, clone)
    # git locks its configuration by a file whose mode it sets.
    git(clone, "config", "core.abbrev", "12")
    (clone / "added.txt").write_text("one more\n")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "--message", "one more")
    git(clone, "gc", "--quiet")
    assert git(clone, "fsck", "--full", "--strict") == ""
    head = git(clone, "rev-parse", "HEAD")
    assert git(clone, "status", "--porcelain") == ""
    assert mount.stop() == 0

    again = start_mount(files_server.source, environment=files_server.environment(), name="again")
    clone = again.mountpoint / "clone"
    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "rev-parse", "HEAD") == head
    assert git(clone, "fsck", "--full", "--strict") == ""
    assert len(git(clone, "ls-files").splitlines()) == NUM_FILES + 2


def test_a_file_that_is_rewritten_by_rename_is_never_read_short(places):
    """packed-refs is a file like this."""
    path = places.on_mount / "packed-refs"
    size = 1 << 18
    path.write_bytes(b"0" * size)
    ended = threading.Event()
    lengths: set[int] = set()
    mixed: list[bytes] = []

    def read() -> None:
        while not ended.is_set():
            data = path.read_bytes()
            lengths.add(len(data))
            if len(set(data)) != 1:
                mixed.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for number in range(20):
            lock = path.with_name("packed-refs.lock")
            lock.write_bytes(b"%d" % (number % 10) * size)
            lock.rename(path)
    finally:
        ended.set()
        reader.join()
    assert lengths == {size}
    assert mixed == []


@pytest.mark.quotes(
    "pip | `install --target`, and again with `--upgrade`",
)
def test_pip_installs_into_a_folder_and_python_imports_from_it(places, run, tmp_path):
    package = tmp_path / "package"
    (package / "mounted").mkdir(parents=True)
    (package / "mounted/__init__.py").write_text("VALUE = 7\n")
    for number in range(50):
        (package / f"mounted/part{number}.py").write_text(f"NUMBER = {number}\n")
    (package / "pyproject.toml").write_text(
        "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
        "[project]\nname = 'mounted'\nversion = '1'\n"
    )
    target = places.on_mount / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run(*pip, "--target", target, package)
    code = "import mounted, mounted.part49; print(mounted.VALUE, mounted.part49.NUMBER)"
    environment = {"PYTHONPATH": str(target), "PYTHONPYCACHEPREFIX": ""}
    assert run(sys.executable, "-c", code, environment=environment) == "7 49\n"
    run(*pip, "--upgrade", "--target", target, package)
    assert run(sys.executable, "-c", code, environment=environment) == "7 49\n"


WRITER = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
for number in range(int(sys.argv[3])):
    database.execute("INSERT INTO rows VALUES (?, ?)", (int(sys.argv[2]), number))
    print(number, flush=True)
"""

STUCK = """
import sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
database.execute("PRAGMA cache_size = 1")
database.execute("BEGIN IMMEDIATE")
database.executemany("INSERT INTO rows VALUES (99, ?)", [(n,) for n in range(2000)])
print("in a transaction", flush=True)
time.sleep(600)
"""


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.mark.quotes(
    "sqlite | rollback journal, several writers, one of them killed in a transaction",
)
def test_sqlite_keeps_every_committed_row_of_three_writers_and_a_killed_one(places):
    path = places.on_mount / "study.db"
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
        database.execute("CREATE TABLE rows (writer INTEGER, number INTEGER)")
    database.close()
    killed = start(STUCK, path)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "in a transaction\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()

    writers = [start(WRITER, path, number, NUM_ROWS) for number in range(NUM_WRITERS)]
    for writer in writers:
        output, _ = writer.communicate(timeout=240)
        assert writer.returncode == 0
        assert len(output.splitlines()) == NUM_ROWS
    database = sqlite3.connect(path)
    assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    counts = database.execute("SELECT writer, COUNT(*) FROM rows GROUP BY writer").fetchall()
    assert counts == [(number, NUM_ROWS) for number in range(NUM_WRITERS)]
    database.close()
    assert not path.with_name("study.db-journal").exists()


@pytest.mark.quotes(
    "sqlite, write-ahead log | one process of one node; its index is memory of that node",
)
def test_a_write_ahead_log_works_for_one_process(places):
    """Its index is memory shared through a file, which a mount can give to one node."""
    path = places.on_mount / "wal.db"
    database = sqlite3.connect(path, isolation_level=None)
    mode = database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    assert mode == "wal"
    database.execute("CREATE TABLE rows (number INTEGER)")
    database.executemany("INSERT INTO rows VALUES (?)", [(n,) for n in range(100)])
    database.close()
    again = sqlite3.connect(path)
    assert again.execute("SELECT SUM(number) FROM rows").fetchone() == (4950,)
    assert again.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    again.close()
