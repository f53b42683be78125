"""Whole trees up, down and across: every file or its name, over every kind of volume."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.files.conftest import MakeVolume, Request, Scripted

from trainmount_files import (
    Cancelled,
    FileStat,
    InvalidRequest,
    Page,
    Volume,
)
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.trees import (
    CopyOptions,
    LocalPlace,
    Report,
    VolumePlace,
    copy_file,
    copy_tree,
)
from trainmount_files.volume import ByteRange

ODD_NAMES = ["a b", "a+b", "a%20b", "100%", "a#b", "a?b=c", "[x]", "lit%2Fslash", "file[1].txt"]
COMPOSED, DECOMPOSED = "caf\u00e9.txt", "cafe\u0301.txt"


def write_tree(root: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def content_of(root: Path) -> dict[str, bytes | None]:
    """Every path below; None for a directory."""
    return {
        str(path.relative_to(root)): None if path.is_dir() else path.read_bytes()
        for path in root.rglob("*")
    }


def names_in(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def failed(report: Report) -> dict[str, str]:
    return {failure.path: failure.code for failure in report.failures}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Small files, one that is more than a request, an empty one, an empty directory."""
    files = {f"d{number}/e/f{number}": b"x" * number for number in range(12)}
    files |= {name: name.encode() for name in ODD_NAMES}
    files |= {COMPOSED: b"composed", DECOMPOSED: b"decomposed"}
    files |= {"big": os.urandom(2_500_000), "none": b""}
    write_tree(tmp_path / "source", files)
    (tmp_path / "source/empty/inside").mkdir(parents=True)
    return tmp_path / "source"


def test_a_tree_comes_back_as_it_went_over_every_kind_of_volume(
    volume: Volume, source: Path, tmp_path: Path
) -> None:
    up = copy_tree(LocalPlace(source), VolumePlace(volume, "to/here"))
    across = copy_tree(VolumePlace(volume, "to/here"), VolumePlace(volume, "and/there"))
    down = copy_tree(VolumePlace(volume, "and/there"), LocalPlace(tmp_path / "back"))

    assert [up.failures, across.failures, down.failures] == [[], [], []]
    assert content_of(tmp_path / "back") == content_of(source)
    sizes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    for report in (up, across, down):
        assert (report.num_found, report.num_done, report.num_bytes) == (25, 25, sizes)


def test_a_second_copy_replaces_files_and_touches_no_others(
    remote: FilesApiVolume, source: Path, tmp_path: Path
) -> None:
    copy_tree(LocalPlace(source), VolumePlace(remote, "t"))
    target = write_tree(tmp_path / "back", {"d1/e/f1": b"old", "mine": b"stays"})

    report = copy_tree(VolumePlace(remote, "t"), LocalPlace(target))

    assert report.failures == []
    assert content_of(target) == {**content_of(source), "mine": b"stays"}


def test_one_file_goes_to_exactly_its_place(volume: Volume, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"content")

    copy_file(LocalPlace(file), VolumePlace(volume, "new/name"))
    copy_file(VolumePlace(volume, "new/name"), VolumePlace(volume, "other"))
    report = copy_file(VolumePlace(volume, "other"), LocalPlace(tmp_path / "made/back"))

    assert (report.num_done, report.num_bytes, report.failures) == (1, 7, [])
    assert (tmp_path / "made/back").read_bytes() == b"content"


def test_a_listing_is_a_request_a_page_and_a_small_file_is_one_request(
    server: LocalServer, remote: FilesApiVolume, tmp_path: Path
) -> None:
    files = {f"d{number % 4}/f{number}": b"data" for number in range(200)}
    write_tree(tmp_path / "many", files)
    direct = FilesApiVolume(
        remote.url, remote._credentials, replace(remote._options, direct_read_max_bytes=1 << 20)
    )

    copy_tree(LocalPlace(tmp_path / "many"), VolumePlace(direct, "many"))
    up = server.statistics()["requests"]
    copy_tree(VolumePlace(direct, "many"), LocalPlace(tmp_path / "back"))
    down = server.statistics()["requests"]
    direct.close()

    assert up == {"put_file": 200}
    assert {name: count - up.get(name, 0) for name, count in down.items()} == {
        "put_file": 0,
        "list_directory": 5,
        "get_file": 200,
    }
    assert content_of(tmp_path / "back") == content_of(tmp_path / "many")


def test_the_first_file_moves_before_the_second_page_is_there(
    scripted: MakeVolume, tmp_path: Path
) -> None:
    first_is_read = threading.Event()

    def entry(name: str) -> str:
        return f'{{"path": "/{name}", "name": "{name}", "is_directory": false, "file_size": 1}}'

    def script(request: Request) -> Scripted:
        if "/directories/" not in request.target:
            first_is_read.set()
            headers = {"Content-Range": "bytes 0-0/1", "Content-Length": "1"}
            return Scripted(status=206, headers=headers, body=b"x")
        if "page_token" not in request.target:
            return Scripted(body=f'{{"contents": [{entry("a")}], "next_page_token": "t"}}'.encode())
        assert first_is_read.wait(20), "the whole plan was wanted first"
        return Scripted(body=f'{{"contents": [{entry("b")}]}}'.encode())

    _, volume = scripted(script)

    report = copy_tree(
        VolumePlace(volume, "t"), LocalPlace(tmp_path / "t"), CopyOptions(parallelism=2)
    )

    assert (report.failures, report.num_done) == ([], 2)


def test_a_thousand_times_more_files_than_threads_wait_in_no_list(tmp_path: Path) -> None:
    write_tree(tmp_path / "many", {f"f{number}": b"" for number in range(1000)})
    (tmp_path / "volume").mkdir()
    report = Report()
    most = 0

    class Watched(DirectoryVolume):
        def upload(self, *arguments: Any, **named: Any) -> FileStat:
            nonlocal most
            most = max(most, report.num_found - report.num_done)
            return file(str(arguments[0]))

    copy_tree(
        LocalPlace(tmp_path / "many"),
        VolumePlace(Watched(tmp_path / "volume"), ""),
        CopyOptions(parallelism=2),
        report=report,
    )

    assert report.num_done == 1000
    assert most < 200


def test_what_fails_is_named_and_the_rest_goes_on(
    server: LocalServer, remote: FilesApiVolume, tmp_path: Path
) -> None:
    write_tree(tmp_path / "src", {f"f{number:02}": b"data" for number in range(100)})
    copy_tree(LocalPlace(tmp_path / "src"), VolumePlace(remote, "t"))
    server.inject(
        Fault(path="*/f17", status=403, error_code="PERMISSION_DENIED"),
        Fault(path="*/f42", status=404, error_code="NOT_FOUND"),
    )

    report = copy_tree(VolumePlace(remote, "t"), LocalPlace(tmp_path / "dst"))

    assert failed(report) == {"f17": "PERMISSION_DENIED", "f42": "NOT_FOUND"}
    assert report.num_done == 98
    assert names_in(tmp_path / "dst") == sorted(
        {f"f{number:02}" for number in range(100)} - {"f17", "f42"}
    )


def test_a_source_that_is_not_there_makes_no_directory(volume: Volume, tmp_path: Path) -> None:
    report = copy_tree(VolumePlace(volume, "gone"), LocalPlace(tmp_path / "dst"))

    assert failed(report) == {"": "NOT_FOUND"}
    assert not (tmp_path / "dst").exists()


def test_no_file_is_started_after_the_first_failure_where_that_is_wanted(
    server: LocalServer, remote: FilesApiVolume, tmp_path: Path
) -> None:
    write_tree(tmp_path / "src", {f"f{number:03}": b"" for number in range(300)})
    server.inject(Fault(route="put_file", status=403, error_code="PERMISSION_DENIED"))

    report = copy_tree(
        LocalPlace(tmp_path / "src"),
        VolumePlace(remote, "t"),
        CopyOptions(parallelism=2, fail_fast=True),
    )

    assert 1 <= len(report.failures) <= 2
    assert report.num_done == 0


def test_files_that_are_there_stay_where_that_is_wanted(volume: Volume, tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {"a": b"new", "b": b"new"})
    volume.put("t/a", b"old")
    keep = CopyOptions(overwrite=False)

    up = copy_tree(LocalPlace(tmp_path / "src"), VolumePlace(volume, "t"), keep)
    target = write_tree(tmp_path / "dst", {"b": b"mine"})
    down = copy_tree(VolumePlace(volume, "t"), LocalPlace(target), keep)

    assert [(skip.path, skip.reason) for skip in up.skips] == [("a", "exists")]
    assert [(skip.path, skip.reason) for skip in down.skips] == [("b", "exists")]
    assert content_of(target) == {"a": b"old", "b": b"mine"}
    assert up.failures == down.failures == []


def test_links_and_special_files_of_this_machine_are_skipped_by_name(
    remote: FilesApiVolume, tmp_path: Path
) -> None:
    src = write_tree(tmp_path / "src", {"real": b"data"})
    (src / "loop").symlink_to(src, target_is_directory=True)
    (src / "link").symlink_to("real")
    os.mkfifo(src / "pipe")

    report = copy_tree(LocalPlace(src), VolumePlace(remote, "t"))

    assert {skip.path: skip.reason for skip in report.skips} == {
        "loop": "a symbolic link",
        "link": "a symbolic link",
        "pipe": "neither a file nor a directory",
    }
    assert [entry.path for entry in remote.list_page("t").entries] == ["t/real"]


def test_links_are_followed_where_that_is_wanted_and_never_round_and_round(
    remote: FilesApiVolume, tmp_path: Path
) -> None:
    src = write_tree(tmp_path / "src", {"real": b"data", "d/x": b"x"})
    write_tree(tmp_path / "aside", {"y": b"y"})
    (src / "d/up").symlink_to(src, target_is_directory=True)
    (src / "link").symlink_to("real")
    (src / "dir").symlink_to(tmp_path / "aside", target_is_directory=True)
    (src / "broken").symlink_to("nowhere")

    report = copy_tree(LocalPlace(src), VolumePlace(remote, "t"), CopyOptions(follow_links=True))
    copy_tree(VolumePlace(remote, "t"), LocalPlace(tmp_path / "back"))

    assert {skip.path: skip.reason for skip in report.skips} == {
        "d/up": "a link to a directory that it is in",
        "broken": "a symbolic link that leads nowhere",
    }
    assert content_of(tmp_path / "back") == {
        "real": b"data",
        "link": b"data",
        "d": None,
        "d/x": b"x",
        "dir": None,
        "dir/y": b"y",
    }


class Listed(DirectoryVolume):
    """A volume whose listings say what a test wants them to."""

    def __init__(self, root: Path, pages: dict[str, Page]) -> None:
        super().__init__(root)
        self._pages = pages

    def list_page(self, path: str, page_token: str | None = None) -> Page:
        found = self._pages.get(path)
        return found if found is not None else super().list_page(path, page_token)

    def read_into(self, path: str, byte_range: ByteRange, buffer: Any, **options: Any) -> None:
        memoryview(buffer)[: len(byte_range)] = b"e" * len(byte_range)


def file(path: str) -> FileStat:
    return FileStat(path, is_directory=False, size_bytes=4)


def directory(path: str) -> FileStat:
    return FileStat(path, is_directory=True)


def test_names_that_lead_out_are_refused_by_name_and_the_rest_is_copied(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    outside = write_tree(tmp_path / "outside", {"kept": b"kept"})
    dst = tmp_path / "dst"
    dst.mkdir()
    (dst / "link").symlink_to(outside, target_is_directory=True)
    (dst / "leaf").symlink_to(outside / "kept")
    volume = Listed(
        tmp_path / "volume",
        {
            "": Page(
                (
                    *(
                        file(name)
                        for name in ("../x", "/abs", "a/../../dst-evil/x", "n\0l", "leaf")
                    ),
                    *(directory(name) for name in ("..", ".", "link")),
                    file("good"),
                ),
                None,
                refused=("..", "a//b"),
            ),
            "link": Page((file("link/kept"), file("link/new")), None),
        },
    )

    report = copy_tree(VolumePlace(volume, ""), LocalPlace(dst))

    assert sorted(failed(report).items()) == sorted(
        {
            "../x": "INVALID_REQUEST",
            "/abs": "INVALID_REQUEST",
            "a/../../dst-evil/x": "INVALID_REQUEST",
            "n\0l": "INVALID_REQUEST",
            "leaf": "INVALID_REQUEST",
            "..": "INVALID_REQUEST",
            ".": "INVALID_REQUEST",
            "a//b": "INVALID_REQUEST",
            "link": "NOT_A_DIRECTORY",
        }.items()
    )
    assert report.num_done == 1
    assert names_in(tmp_path) == ["dst", "outside", "volume"]
    assert content_of(outside) == {"kept": b"kept"}
    assert (dst / "good").read_bytes() == b"eeee"


def test_a_link_that_appears_in_the_middle_leads_nowhere(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "outside").mkdir()
    dst = tmp_path / "dst"

    class Swaps(Listed):
        def list_page(self, path: str, page_token: str | None = None) -> Page:
            if path == "d" and not (dst / "d").is_symlink():
                (dst / "d").mkdir(parents=True)
                (dst / "d").rename(dst / "moved")
                (dst / "d").symlink_to(tmp_path / "outside", target_is_directory=True)
            return super().list_page(path, page_token)

    pages = {
        "": Page((directory("d"), file("good")), None),
        "d": Page((file("d/x"),), None),
    }
    volume = Swaps(tmp_path / "volume", pages)

    report = copy_tree(VolumePlace(volume, ""), LocalPlace(dst))

    assert failed(report) == {"d": "NOT_A_DIRECTORY"}
    assert names_in(tmp_path / "outside") == []
    assert (dst / "good").exists()


def test_of_a_file_and_a_directory_with_one_name_one_is_copied_and_the_other_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "volume").mkdir()
    volume = Listed(
        tmp_path / "volume",
        {
            "": Page((file("p"), directory("p"), file("q")), None),
            "p": Page((file("p/f"),), None),
        },
    )

    report = copy_tree(VolumePlace(volume, ""), LocalPlace(tmp_path / "dst"))

    assert [failure.path for failure in report.failures] == ["p"]
    assert failed(report)["p"] in ("NOT_A_DIRECTORY", "IS_A_DIRECTORY")
    assert (tmp_path / "dst/q").read_bytes() == b"eeee"
    assert report.num_done == 2


def test_a_name_that_the_disk_takes_for_another_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a folding disk does: the file is found by a name that no listing of it has.
    (tmp_path / "volume").mkdir()
    dst = write_tree(tmp_path / "dst", {"File": b"theirs", "Dir/x": b"x"})
    volume = Listed(
        tmp_path / "volume",
        {"": Page((file("File"), file("other"), directory("Dir")), None), "Dir": Page((), None)},
    )
    stored = os.listdir

    def folding(place: Any = ".") -> list[str]:
        return [name.lower() if name in ("File", "Dir") else name for name in stored(place)]

    monkeypatch.setattr("os.listdir", folding)

    report = copy_tree(VolumePlace(volume, ""), LocalPlace(dst))

    assert failed(report) == {"File": "ALREADY_EXISTS", "Dir": "ALREADY_EXISTS"}
    monkeypatch.undo()
    assert content_of(dst) == {"File": b"theirs", "Dir": None, "Dir/x": b"x", "other": b"eeee"}


def test_a_file_that_changed_since_the_listing_is_copied_as_it_is_now(
    remote: FilesApiVolume, served: Path, tmp_path: Path
) -> None:
    remote.put("t/log", b"short")
    entries = remote.list_page("t").entries

    class Late(FilesApiVolume):
        def list_page(self, path: str, page_token: str | None = None) -> Page:
            return Page(entries, None)

    late = Late(remote.url, remote._credentials, remote._options)
    (served / "t/log").write_bytes(b"much longer now")

    report = copy_tree(VolumePlace(late, "t"), LocalPlace(tmp_path / "dst"))
    late.close()

    assert report.failures == []
    assert (tmp_path / "dst/log").read_bytes() == b"much longer now"


def test_a_name_that_the_disk_cannot_hold_is_that_file_s_failure(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    names = ("a" * 300, "\ud800", "b")
    volume = Listed(tmp_path / "volume", {"": Page(tuple(map(file, names)), None)})

    report = copy_tree(VolumePlace(volume, ""), LocalPlace(tmp_path / "dst"))

    assert sorted(failed(report).values()) == ["INVALID_REQUEST", "INVALID_REQUEST"]
    assert names_in(tmp_path / "dst") == ["b"]


def test_a_tree_is_not_copied_into_itself(remote: FilesApiVolume) -> None:
    remote.put("a/f", b"")

    with pytest.raises(InvalidRequest, match="inside the source"):
        copy_tree(VolumePlace(remote, "a"), VolumePlace(remote, "a/b"))
    with pytest.raises(InvalidRequest, match="inside the source"):
        copy_tree(VolumePlace(remote, ""), VolumePlace(remote, "b"))
    with pytest.raises(InvalidRequest, match="are the same"):
        copy_tree(VolumePlace(remote, "a"), VolumePlace(remote, "a"))
    assert copy_tree(VolumePlace(remote, "a"), VolumePlace(remote, "ab")).num_done == 1


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_copy_that_is_cancelled_ends_and_leaves_no_half_of_a_file(
    server: LocalServer, remote: FilesApiVolume, served: Path, tmp_path: Path, way: str
) -> None:
    src = write_tree(tmp_path / "src", {f"f{number}": b"x" * 1_200_000 for number in range(8)})
    dst = tmp_path / "dst"
    if way == "down":
        src.rename(served / "t")
    server.inject(Fault(latency_ms=1000))
    cancel = threading.Event()
    report = Report()
    threading.Timer(0.4, cancel.set).start()

    there = VolumePlace(remote, "t")
    places = (LocalPlace(src), there) if way == "up" else (there, LocalPlace(dst))

    with pytest.raises(Cancelled):
        copy_tree(*places, report=report, cancel=cancel)

    assert [t.name for t in threading.enumerate() if t.name.startswith("trainmount-tree")] == []
    assert report.failures == []
    assert report.num_done < 8
    server.inject()
    if way == "up":
        assert server.statistics()["open_uploads"] == 0
    else:
        whole = {path.name for path in dst.iterdir()} if dst.exists() else set()
        assert len(whole) == report.num_done
        assert all((dst / name).stat().st_size == 1_200_000 for name in whole)


def test_an_error_that_nobody_expected_ends_the_run_and_is_raised(tmp_path: Path) -> None:
    src = write_tree(tmp_path / "src", {f"f{number}": b"" for number in range(50)})
    (tmp_path / "volume").mkdir()

    class Broken(DirectoryVolume):
        def upload(self, *arguments: Any, **named: Any) -> FileStat:
            raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        copy_tree(LocalPlace(src), VolumePlace(Broken(tmp_path / "volume"), ""))


def test_a_large_file_replaces_one_that_another_copy_puts_there_meanwhile(
    volume: Volume, tmp_path: Path
) -> None:
    content = os.urandom(3_000_000)
    volume.put("big", content)
    destination = tmp_path / "back"

    class Meanwhile(Report):
        def moved(self, num_bytes: int) -> None:
            if not destination.exists():
                destination.write_bytes(b"another's")
            super().moved(num_bytes)

    report = copy_file(VolumePlace(volume, "big"), LocalPlace(destination), report=Meanwhile())

    assert (report.num_done, report.num_bytes, report.failures) == (1, len(content), [])
    assert destination.read_bytes() == content
    assert names_in(tmp_path).count("back") == 1
