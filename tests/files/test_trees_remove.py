"""Whole trees gone, and nothing but them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_files import InvalidRequest, NotFound, Page, Volume
from trainmount_files.directory import DirectoryVolume
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.trees import remove_tree


def test_a_tree_is_gone_and_its_siblings_are_not(volume: Volume) -> None:
    for path in ("a/b/f", "a/b/c/d/f", "a/b2/f", "a/f"):
        volume.put(path, b"")
    volume.make_directory("a/b/empty")

    report = remove_tree(volume, "a/b")

    assert (report.num_done, report.failures) == (2, [])
    assert sorted(entry.path for entry in volume.list_page("a").entries) == ["a/b2", "a/f"]
    with pytest.raises(NotFound):
        volume.stat("a/b")


def test_of_2500_files_all_go_but_those_that_are_denied(
    server: LocalServer, remote: FilesApiVolume, served: Path
) -> None:
    for number in range(2500):
        path = served / f"a/b/{number % 5}/f{number:04}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (served / "a/b2").mkdir()
    denied = [f"{number % 5}/f{number:04}" for number in (7, 500, 2049)]
    server.inject(
        Fault(route="delete_file", path="*/f0001", status=503, count=1),
        *(Fault(route="delete_file", path=f"*/{path}", status=403) for path in denied),
    )

    report = remove_tree(remote, "a/b")

    assert sorted(failure.path for failure in report.failures) == sorted(denied)
    assert {failure.code for failure in report.failures} == {"PERMISSION_DENIED"}
    assert report.num_done == 2497
    left = sorted(str(p.relative_to(served)) for p in served.rglob("*") if p.is_file())
    assert left == sorted(f"a/b/{path}" for path in denied)
    assert sorted(p.name for p in (served / "a").iterdir()) == ["b", "b2"]
    # Emptied directories are gone, those with a file left are not.
    assert sorted(p.name for p in (served / "a/b").iterdir()) == ["0", "2", "4"]


def test_the_root_of_a_volume_is_emptied_only_on_demand_and_stays(volume: Volume) -> None:
    volume.put("a/f", b"")

    with pytest.raises(InvalidRequest, match="root cannot be removed"):
        remove_tree(volume, "")
    report = remove_tree(volume, "", keep_root=True)

    assert (report.num_done, report.failures) == (1, [])
    assert volume.list_page("").entries == ()


def test_a_tree_that_is_not_there_is_a_failure(volume: Volume) -> None:
    report = remove_tree(volume, "gone")

    assert [(failure.path, failure.code) for failure in report.failures] == [("", "NOT_FOUND")]


def test_files_that_a_listing_passed_over_go_too(tmp_path: Path) -> None:
    # Pages that are counted from the start skip as many entries as have been removed meanwhile.
    class Counted(DirectoryVolume):
        def list_page(self, path: str, page_token: str | None = None) -> Page:
            entries = super().list_page(path).entries
            start = int(page_token or 0)
            more = start + 10 < len(entries)
            return Page(entries[start : start + 10], str(start + 10) if more else None)

    volume = Counted(tmp_path)
    for number in range(60):
        volume.put(f"a/f{number:02}", b"")

    report = remove_tree(volume, "a", parallelism=1)

    assert (report.num_done, report.failures) == (60, [])
    with pytest.raises(NotFound):
        volume.stat("a")


def test_a_directory_that_others_fill_again_is_named_and_not_fought_over(tmp_path: Path) -> None:
    class Busy(DirectoryVolume):
        def delete(self, path: str) -> None:
            super().delete(path)
            self.put(path + "x", b"")

    volume = Busy(tmp_path)
    volume.put("a/f", b"")

    report = remove_tree(volume, "a", parallelism=1)

    assert [(failure.path, failure.code) for failure in report.failures] == [
        ("", "DIRECTORY_NOT_EMPTY")
    ]
