"""Editors and whatever else remembers the numbers and times of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NUM_FILES = 100

SAVE_LIKE_AN_EDITOR = """
import os, sys, time
name = sys.argv[1]
path, backup = name, name + "~"
seen = os.stat(path)
for text in (b"first\\n", b"second\\n"):
    now = os.stat(path)
    # An editor asks its user here, where somebody else has changed the file.
    assert (now.st_mtime_ns, now.st_size) == (seen.st_mtime_ns, seen.st_size), "changed"
    os.rename(path, backup)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(file, text)
    os.fsync(file)
    os.fchmod(file, 0o644)
    os.close(file)
    seen = os.stat(path)
    os.unlink(backup)
    time.sleep(0.3)
"""


@pytest.fixture(params=["files-api", "directory"])
def mount(request: Any, start_mount: Callable[..., Any], files_server: Any) -> Any:
    (files_server.volume / "d").mkdir()
    for number in range(NUM_FILES):
        (files_server.volume / f"d/f{number}").write_bytes(b"x" * number)
    if request.param == "directory":
        return start_mount(files_server.volume.as_uri(), "--metadata-timeout", "0.05")
    return start_mount(
        files_server.source, "--metadata-timeout", "0.05", environment=files_server.environment()
    )


def _numbers(folder: Path) -> dict[str, int]:
    """What `stat` and the listing say, which is the same."""
    with os.scandir(folder) as entries:
        listed = {one.name: one.inode() for one in entries}
    assert {name: (folder / name).stat().st_ino for name in listed} == listed
    return listed


def test_numbers_of_files_stay_over_listings_renames_and_deaths(mount: Any) -> None:
    folder = mount.mountpoint / "d"
    first = _numbers(folder)
    assert len(set(first.values())) == NUM_FILES
    command = [sys.executable, "-m", "trainmount_fuse", "refresh", "--mount", mount.mountpoint]
    for number in range(3):
        # What the kernel and the mount believe is too old now.
        subprocess.run(command, check=True, timeout=60)
        assert _numbers(folder) == first
        old, new = f"f{number}", f"renamed-{number}"
        (folder / old).rename(folder / new)
        first[new] = first.pop(old)
        assert _numbers(folder) == first
        mount.kill_daemon()
        assert _numbers(folder) == first


def test_an_editor_saves_twice_without_being_warned(mount: Any) -> None:
    editor = shutil.which("vim")
    if editor is None:
        pytest.skip("needs vim")
    folder = mount.mountpoint / "d"
    script = mount.folder / "script"
    # Two saves within the second in which the store keeps one time.
    script.write_text("Gofirst\x1b:w\n:sleep 300m\nGosecond\x1b:w\n:q\n")
    for backup in ("auto", "no", "yes"):
        path = folder / f"{backup}.txt"
        path.write_text("begun\n")
        settings = f"set backup backupcopy={backup} backupskip= fsync"
        plain = ["-N", "-u", "NONE", "-i", "NONE", "--not-a-term"]
        done = subprocess.run(
            [editor, *plain, "-s", script, "-c", settings, path],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "TERM": "dumb", "LC_ALL": "C"},
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stdout + done.stderr
        assert path.read_text() == "begun\nfirst\nsecond\n"
        assert (folder / f"{backup}.txt~").read_text() == "begun\nfirst\n"


def test_files_that_are_replaced_as_editors_do_it_show_no_change_by_others(mount: Any) -> None:
    path = mount.mountpoint / "d/f7"
    for _ in range(3):
        subprocess.run([sys.executable, "-c", SAVE_LIKE_AN_EDITOR, path], check=True, timeout=60)
        assert path.read_text() == "second\n"
    subprocess.run(["sed", "-i", "s/second/third/", path], check=True, timeout=60)
    assert path.read_text() == "third\n"
    assert sorted(_numbers(path.parent)) == sorted(f"f{number}" for number in range(NUM_FILES))
