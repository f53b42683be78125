"""`trainmount ls`, `cp`, `rm` and `mkdir` on a volume of the local server."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainmount_cli import doctor
from trainmount_files.directory import DirectoryVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.server.settings import ServerSettings
from trainmount_files.trees import LocalPlace, Report, VolumePlace, copy_file

TOKEN = "dapi-0123456789abcdef"
ROOT = "/Volumes/main/default/data"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalServer]:
    (tmp_path / "served").mkdir()
    settings = ServerSettings(
        directory=tmp_path / "served", token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as running:
        yield running


@pytest.fixture
def served(server: LocalServer, tmp_path: Path) -> Path:
    return tmp_path / "served/main/default/data"


@pytest.fixture
def run(server: LocalServer, in_process: Run) -> Run:
    """A command with the server's address and token in its environment."""

    def call(*arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        return in_process(
            *arguments, status=status, DATABRICKS_HOST=server.url, DATABRICKS_TOKEN=TOKEN
        )

    return call


def paths_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def data_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document = json.loads(done.stdout)
    assert document["v"] == 1
    data = document["data"]
    assert isinstance(data, dict)
    return data


@pytest.mark.parametrize("way", ["up", "down", "across"])
def test_a_slash_behind_the_source_says_whether_its_name_is_kept(
    run: Run, served: Path, tmp_path: Path, way: str
) -> None:
    here, there = (tmp_path / "here"), served
    here.mkdir()
    source_root, target_root = {"up": (here, there), "down": (there, here)}.get(way, (there, there))
    (source_root / "src").mkdir()
    (source_root / "src/a").write_text("a")
    names = {here: str(here), there: ROOT}
    source, target = f"{names[source_root]}/src", names[target_root]

    for _ in range(2):
        run("cp", "-r", source, f"{target}/kept")
        run("cp", "-r", f"{source}/", f"{target}/merged")

    assert paths_below(target_root / "kept") == ["a", "src", "src/a"]
    assert paths_below(target_root / "merged") == ["a"]


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_file_for_a_directory_that_is_not_there_makes_nothing(
    run: Run, served: Path, tmp_path: Path, way: str
) -> None:
    (tmp_path / "f").write_text("f")
    (served / "f").write_text("f")
    source, target = (str(tmp_path / "f"), ROOT) if way == "up" else (f"{ROOT}/f", str(tmp_path))

    done = run("cp", source, f"{target}/new/", status=1)

    assert "there is no directory" in done.stderr
    assert not (served / "new").exists()
    assert not (tmp_path / "new").exists()


def test_a_file_goes_into_a_directory_or_to_a_name(run: Run, served: Path, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f")
    (served / "d").mkdir()

    run("cp", str(tmp_path / "f"), f"{ROOT}/d")
    run("cp", str(tmp_path / "f"), f"{ROOT}/d/")
    run("cp", str(tmp_path / "f"), f"dbfs:{ROOT}/d/g")
    run("cp", str(tmp_path / "f"), f"{ROOT}/deep/er/f")
    run("cp", f"{ROOT}/d/f", f"{ROOT}/d/g", str(tmp_path))

    assert paths_below(served) == ["d", "d/f", "d/g", "deep", "deep/er", "deep/er/f"]
    assert (tmp_path / "g").read_text() == "f"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("cp", "one"), 2, "a source and a destination"),
        (("cp", f"{ROOT}/d", "here"), 2, "is a directory; copy it with -r"),
        (("cp", f"{ROOT}/f/", "here"), 1, "is not a directory"),
        (("cp", "-r", f"{ROOT}/d", f"{ROOT}/f"), 1, "is a file"),
        (("cp", "-r", f"{ROOT}/d", f"{ROOT}/d/e"), 2, "the destination is inside the source"),
        (("cp", f"{ROOT}/f", f"{ROOT}/f2", "gone"), 1, "must be a directory, for 2 sources"),
        (("cp", f"{ROOT}/f", f"{ROOT}/f/"), 1, "is not a directory"),
        (("cp", "a", "b"), 1, "no such file or directory"),
        (("cp", "-r", f"{ROOT}/gone", "here"), 1, "no such file or directory"),
        (("cp", "", "b"), 2, "must not be empty"),
        (("cp", "s3://", "b"), 2, "must name a bucket"),
        (("cp", "dbfs:/tmp/x", "b"), 2, "only dbfs:/Volumes"),
        (("cp", "/Volumes/a/../b", "b"), 2, "must not contain '.' or '..'"),
        (("rm", f"{ROOT}/d"), 1, "is a directory; remove it with -r"),
        (("rm", "-r", ROOT), 2, "is a whole volume"),
        (("rm", "-r", f"{ROOT}/"), 2, "is a whole volume"),
        (("rm", "-r", "/Volumes/main"), 2, "only what is inside a volume"),
        (("rm", "-r", "/"), 2, "is not removed"),
        (("rm", "-r", "."), 2, "is not removed"),
        (("rm", "-r", "d/../.."), 2, "is not removed"),
        (("cp", "volumes:///Volumes/main", "b"), 2, "must be /Volumes/CATALOG"),
        (("cp", f"{ROOT}/f", "b", "--chunk-above", "5 GB"), 2, "write 500M or 5Gi"),
        (("cp", f"{ROOT}/f", "b", "--profile", "gone"), 1, "the profile gone is asked for"),
        (("mkdir", "/Volumes/main/default/gone/d"), 1, "there is no volume"),
        (("rm", f"{ROOT}/gone"), 1, "no such file or directory (HTTP 404)"),
        (("mkdir", f"{ROOT}/x/y"), 1, "its parent is not there"),
        (("mkdir", f"{ROOT}/d"), 1, "something is at the path"),
        (("ls", f"{ROOT}/gone"), 1, "gone"),
    ],
)
def test_what_cannot_be_is_one_line_and_changes_nothing(
    run: Run, served: Path, arguments: tuple[str, ...], status: int, words: str
) -> None:
    (served / "d/inner").mkdir(parents=True)
    (served / "d/inner/x").touch()
    (served / "f").write_text("f")
    before = paths_below(served)

    done = run(*arguments, status=status)

    assert words in done.stderr
    assert done.stderr.startswith("trainmount: ")
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert paths_below(served) == before
    assert not Path("here").exists()
    error = json.loads(run(*arguments, "-o", "json", status=status).stdout)["error"]
    assert words in error["message"]
    assert TOKEN not in done.stderr + error["message"]


def test_a_volume_that_is_not_there_is_told_once(run: Run, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for number in range(5):
        (tmp_path / f"src/f{number}").touch()

    for target in ("/Volumes/main/default/gone", "/Volumes/main/default/gone/inside"):
        done = run("cp", "-r", "src", target, status=1)
        words = "there is no volume /Volumes/main/default/gone"
        assert done.stderr == f"trainmount: {target}: {words}\n"


def test_a_local_name_that_is_no_text_is_that_file_s_failure(
    run: Run, served: Path, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / os.fsdecode(b"\xff")).touch()
    (tmp_path / "src/fine").touch()

    done = run("cp", "-r", "src", f"{ROOT}/t", status=1)

    assert done.stderr == ("trainmount: src/\\udcff: the name must be valid Unicode text\n")
    assert paths_below(served) == ["t", "t/fine"]


def test_names_are_letters_and_no_patterns(run: Run, served: Path, tmp_path: Path) -> None:
    names = ["file[1].txt", "file1.txt", "file?", "a*b", "axb", "fileX", "-dash", "~", "a%20b"]
    (tmp_path / "src").mkdir()
    for name in names:
        (tmp_path / "src" / name).write_text(name)

    run("cp", "-r", str(tmp_path / "src"), f"{ROOT}/up")
    for name in ("file[1].txt", "a*b", "file?"):
        run("cp", f"{ROOT}/up/{name}", f"{ROOT}/one/{name}")
        run("rm", f"{ROOT}/up/{name}")

    assert paths_below(served / "one") == sorted(["file[1].txt", "a*b", "file?"])
    assert all((served / "one" / name).read_text() == name for name in ("a*b", "file?"))
    assert paths_below(served / "up") == sorted(set(names) - {"file[1].txt", "a*b", "file?"})
    run("rm", "-r", f"{ROOT}/up")
    assert paths_below(served) == [
        "one",
        *(f"one/{n}" for n in sorted(["a*b", "file?", "file[1].txt"])),
    ]


def test_of_100_files_two_that_fail_are_named_at_the_end_and_in_json(
    run: Run, server: LocalServer, served: Path, tmp_path: Path
) -> None:
    (served / "t").mkdir()
    for number in range(100):
        (served / f"t/f{number:02}").write_text("data")
    server.inject(
        Fault(path="*/f17", status=403, error_code="PERMISSION_DENIED"),
        Fault(path="*/f42", status=404, error_code="NOT_FOUND"),
    )

    done = run("cp", "-r", f"{ROOT}/t", str(tmp_path / "dst"), status=1)
    data = data_of(run("cp", "-r", f"{ROOT}/t/", str(tmp_path / "two"), "-o", "json", status=1))

    assert len(paths_below(tmp_path / "dst")) == len(paths_below(tmp_path / "two")) == 98
    assert done.stdout == "98 files copied, 392 B; 2 failed\n"
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == [
        f"{ROOT}/t/f17",
        f"{ROOT}/t/f42",
    ]
    assert (data["copied"], data["bytes"], data["skipped"]) == (98, 392, [])
    assert [(entry["path"], entry["code"]) for entry in data["failed"]] == [
        (f"{ROOT}/t/f17", "PERMISSION_DENIED"),
        (f"{ROOT}/t/f42", "NOT_FOUND"),
    ]
    assert all(entry["message"] for entry in data["failed"])


def test_what_is_skipped_is_named_and_no_failure(run: Run, served: Path, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src/f").write_text("new")
    (tmp_path / "src/link").symlink_to("f")
    (served / "t").mkdir()
    (served / "t/f").write_text("old")

    source, target = f"{tmp_path}/src/", f"{ROOT}/t"
    data = data_of(run("cp", "-rn", source, target, "-o", "json"))
    done = run("cp", "-r", "--follow", source, target)

    assert data["failed"] == []
    assert data["skipped"] == [
        {"path": f"{tmp_path}/src/f", "reason": "exists"},
        {"path": f"{tmp_path}/src/link", "reason": "a symbolic link"},
    ]
    assert done.stdout == "2 files copied, 6 B\n"
    assert (served / "t/link").read_text() == "new"


def test_one_source_that_is_missing_does_not_stop_the_others(
    run: Run, served: Path, tmp_path: Path
) -> None:
    (served / "a").write_text("a")

    data = data_of(run("cp", f"{ROOT}/gone", f"{ROOT}/a", str(tmp_path), "-o", "json", status=1))

    assert data["copied"] == 1
    assert [(entry["path"], entry["code"]) for entry in data["failed"]] == [
        (f"{ROOT}/gone", "NOT_FOUND")
    ]
    assert (tmp_path / "a").read_text() == "a"


def test_a_tree_is_removed_and_what_is_denied_is_named(
    run: Run, server: LocalServer, served: Path
) -> None:
    for name in ("a/b/x", "a/b/c/y", "a/b2/z", "top"):
        (served / name).parent.mkdir(parents=True, exist_ok=True)
        (served / name).touch()
    server.inject(
        Fault(route="delete_file", path="*/y", status=403),
        Fault(route="delete_file", path="*/x", status=503, count=1),
    )

    data = data_of(run("rm", "-r", f"{ROOT}/a/b", "-o", "json", status=1))

    assert data["removed"] == 1
    assert [(entry["path"], entry["code"]) for entry in data["failed"]] == [
        (f"{ROOT}/a/b/c/y", "PERMISSION_DENIED")
    ]
    assert paths_below(served) == ["a", "a/b", "a/b/c", "a/b/c/y", "a/b2", "a/b2/z", "top"]
    server.inject()
    assert run("rm", "-r", f"{ROOT}/a", f"{ROOT}/top").stdout == "3 files removed\n"
    assert paths_below(served) == []


def test_a_whole_volume_is_emptied_only_when_that_is_said(run: Run, served: Path) -> None:
    (served / "d").mkdir()
    (served / "d/f").touch()

    run("rm", "-r", "--all-contents", ROOT)

    assert paths_below(served) == []
    assert served.is_dir()


def test_a_directory_is_made_once_and_its_parents_on_demand(run: Run, served: Path) -> None:
    run("mkdir", f"{ROOT}/a")
    run("mkdir", "-p", f"{ROOT}/a/b/c", f"{ROOT}/a")
    data = data_of(run("mkdir", f"{ROOT}/d", f"{ROOT}/a", "-o", "json", status=1))

    assert paths_below(served) == ["a", "a/b", "a/b/c", "d"]
    assert data["made"] == [f"{ROOT}/d"]
    assert [(entry["path"], entry["code"]) for entry in data["failed"]] == [
        (f"{ROOT}/a", "CONFLICT")
    ]


def test_a_listing_has_columns_and_a_slash_behind_directories(run: Run, served: Path) -> None:
    (served / "d").mkdir()
    (served / "d/inner").write_text("12345")
    (served / "big").write_bytes(b"x" * 1_234_567)

    assert run("ls", ROOT).stdout.splitlines() == ["big", "d/"]
    assert run("ls", "-r", f"{ROOT}/").stdout.splitlines() == ["big", "d/", "d/inner"]
    assert run("ls", f"{ROOT}/big").stdout.splitlines() == [f"{ROOT}/big"]
    long = run("ls", "-lr", ROOT).stdout.splitlines()
    assert [line.split()[0] for line in long] == ["1234567", "-", "5"]
    assert {
        line.index(name) for line, name in zip(long, ("big", "d/", "d/inner"), strict=True)
    } == {32}
    entries = data_of(run("ls", "-r", ROOT, "-o", "json"))["entries"]
    assert [(entry["path"], entry["size_bytes"], entry["is_directory"]) for entry in entries] == [
        (f"{ROOT}/big", 1_234_567, False),
        (f"{ROOT}/d", None, True),
        (f"{ROOT}/d/inner", 5, False),
    ]
    assert all((entry["modified_at"] is None) == entry["is_directory"] for entry in entries)


def test_what_is_above_a_volume_is_listed_too(run: Run, served: Path) -> None:
    assert run("ls", "/Volumes").stdout == "main/\n"
    assert run("ls", "/Volumes/main/default", ROOT).stdout == (
        f"/Volumes/main/default:\ndata/\n\n{ROOT}:\n"
    )


def test_a_local_directory_is_listed_and_removed_by_the_same_words(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "here/d").mkdir(parents=True)
    (tmp_path / "here/f").write_text("1")

    assert run("ls", "here").stdout.splitlines() == ["d/", "f"]
    assert run("ls", (tmp_path / "here").as_uri()).stdout.splitlines() == ["d/", "f"]
    run("cp", "-r", (tmp_path / "here").as_uri(), "copy")
    run("rm", "-r", "here")
    run("mkdir", "-p", "new/er")

    assert not (tmp_path / "here").exists()
    assert paths_below(tmp_path / "copy") == ["d", "f"]
    assert paths_below(tmp_path / "new") == ["er"]


def test_a_stream_goes_up_and_comes_down(
    run: Run, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = "line\n" * 1000
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))

    run("cp", "-", f"{ROOT}/stream")
    done = run("cp", f"{ROOT}/stream", "-")

    assert (served / "stream").read_text() == content
    assert done.stdout == content
    assert "'-' is one of two paths" in run("cp", "-", "-", status=2).stderr
    assert "must be on a volume" in run("cp", "-", "local", status=2).stderr
    assert "standard output" in run("cp", f"{ROOT}/stream", "-", "-o", "json", status=2).stdout


def test_a_profile_counts_before_the_environment(
    run: Run, server: LocalServer, served: Path, tmp_path: Path
) -> None:
    (served / "f").touch()
    text = f"[mine]\nhost = {server.url}\ntoken = another\n"
    (tmp_path / ".databrickscfg").write_text(text)

    assert run("ls", ROOT).stdout == "f\n"
    done = run("ls", ROOT, "--profile", "mine", status=1)

    assert "HTTP 401" in done.stderr


def test_a_file_above_the_size_is_kept_in_chunks_and_read_back(
    run: Run, served: Path, tmp_path: Path
) -> None:
    (tmp_path / "big").write_bytes(bytes(3000))
    option = ("--chunk-above", "1K")

    run("cp", "big", f"{ROOT}/big", *option)
    run("cp", f"{ROOT}/big", "back", *option)

    assert run("ls", ROOT, *option).stdout == "big\n"
    assert run("ls", ROOT).stdout == "big.chunks/\n"
    assert (tmp_path / "back").read_bytes() == bytes(3000)
    assert run("rm", f"{ROOT}/big", *option).stdout == "1 file removed\n"
    assert run("ls", ROOT, *option).stdout == ""


def test_what_is_wrong_at_a_local_destination_is_told_with_its_name(
    run: Run, served: Path, tmp_path: Path
) -> None:
    (served / "f").touch()
    (tmp_path / "file").touch()

    done = run("cp", f"{ROOT}/f", "file/inside", status=1)

    assert done.stderr == f"trainmount: {ROOT}/f: file/inside: a file is in the way\n"


def test_a_mount_names_itself_as_it_was_called(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    done = run("mount", "--help")

    assert done.stdout.startswith("usage: trainmount mount [-h]")
    assert "--profile NAME" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("ls", ROOT), ("mkdir", "-p", f"{ROOT}/d"), ("cp", f"{ROOT}/f", "here")]
)
def test_a_store_that_is_silent_is_told_of(
    run: Run,
    server: LocalServer,
    served: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
) -> None:
    (served / "f").touch()
    monkeypatch.setattr("trainmount_cli.transfers._SILENCE_SECONDS", 0.05)
    server.inject(Fault(latency_ms=500, count=1))

    done = run(*arguments)

    words = "no answer yet; it is tried for up to two minutes, Ctrl-C ends it"
    assert done.stderr == f"trainmount: {words}\n"


def test_one_file_that_goes_up_tells_its_size_to_whoever_shows_progress(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(3000))
    seen: list[int] = []

    class Seen(Report):
        def found(self, num_files: int, num_bytes: int = 0) -> None:
            seen.append(num_bytes)
            super().found(num_files, num_bytes)

    copy_file(
        LocalPlace(tmp_path / "f"),
        VolumePlace(DirectoryVolume(tmp_path), "copy"),
        report=Seen(),
    )

    assert seen == [3000]


def test_https_to_a_server_without_tls_is_told_at_once(
    in_process: Run, server: LocalServer
) -> None:
    host = server.url.replace("http:", "https:")

    done = in_process("ls", ROOT, status=2, DATABRICKS_HOST=host, DATABRICKS_TOKEN=TOKEN)

    assert "the server speaks no TLS" in done.stderr


def test_a_stream_leaves_what_is_there_with_no_clobber(
    run: Run, served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served / "f").write_text("old")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"new")))

    done = run("cp", "-n", "-", f"{ROOT}/f")

    assert done.stderr == f"trainmount: {ROOT}/f: skipped: exists\n"
    assert (served / "f").read_text() == "old"


def test_links_that_keep_a_local_directory_are_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here/link").symlink_to("nowhere")

    done = run("rm", "-r", "here", status=1)

    assert "links and special files are not removed" in done.stderr
    assert (tmp_path / "here/link").is_symlink()


def test_doctor_tells_of_credentials_and_extras(
    run: Run, in_process: Run, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checks(done: subprocess.CompletedProcess[str]) -> dict[str, tuple[bool, bool, str]]:
        return {
            check["name"]: (check["is_ok"], check["is_required"], check["detail"])
            for check in data_of(done)["checks"]
        }

    monkeypatch.setattr("trainmount_cli.doctor.check_namespaces", lambda: checked)
    checked = doctor.Check(name="namespaces", is_ok=True, detail="")
    for name in ("fuse_device", "fuse_library"):
        monkeypatch.setattr(f"trainmount_cli.doctor.check_{name}", lambda: checked)

    found = checks(run("doctor", "-o", "json"))
    assert found["Databricks"] == (True, True, f"{server.url} is configured")
    assert found["bucket"][0] and found["fsspec"][0]

    for name in ("DATABRICKS_HOST", "DATABRICKS_TOKEN"):
        monkeypatch.setenv(name, "")
    missing = checks(in_process("doctor", "-o", "json"))["Databricks"]
    assert missing == (False, False, "no host and token are configured, which /Volumes paths need")
