"""The programs that move a tree of small files, each by another way, in a process of its own
(`measure.run_program`). Called for `many_files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measure import Timing, measured

__all__ = ["download_engine", "download_sdk", "upload_engine", "upload_sdk"]


def upload_engine(source: str, path: str) -> Timing:
    """`trees.copy_tree` of a local directory."""
    from trainmount_files import open_volume
    from trainmount_files.trees import LocalPlace, VolumePlace, copy_tree

    root, _, name = path.rpartition("/")
    volume = open_volume(root)
    volume.stat("")
    with measured() as timing:
        report = copy_tree(LocalPlace(Path(source)), VolumePlace(volume, name))
    volume.close()
    if report.failures:
        raise RuntimeError(str(report.failures[0].error))
    return timing


def download_engine(path: str, folder: str) -> Timing:
    """`trees.copy_tree` to a local directory."""
    from trainmount_files import open_volume
    from trainmount_files.trees import LocalPlace, VolumePlace, copy_tree

    root, _, name = path.rpartition("/")
    volume = open_volume(root)
    volume.stat("")
    with measured() as timing:
        report = copy_tree(VolumePlace(volume, name), LocalPlace(Path(folder)))
    volume.close()
    if report.failures:
        raise RuntimeError(str(report.failures[0].error))
    return timing


def upload_sdk(source: str, path: str, num_threads: int = 1) -> Timing:
    """`files.upload` of the databricks SDK for each file; PUT makes the directories."""
    from databricks.sdk import WorkspaceClient

    client = WorkspaceClient()
    client.files.get_directory_metadata(path.rpartition("/")[0])

    def upload(file: Path) -> None:
        with file.open("rb") as contents:
            client.files.upload(f"{path}/{file.relative_to(source)}", contents, overwrite=True)

    with measured() as timing:
        files = (file for file in Path(source).rglob("*") if file.is_file())
        _each(upload, files, num_threads)
    return timing


def download_sdk(path: str, folder: str, num_threads: int = 1) -> Timing:
    """`files.download` of the databricks SDK for each file that its listing has."""
    from databricks.sdk import WorkspaceClient

    client = WorkspaceClient()
    client.files.get_directory_metadata(path.rpartition("/")[0])
    target = Path(folder)

    def walk(directory: str) -> Iterator[str]:
        (target / directory.removeprefix(path).lstrip("/")).mkdir()
        for entry in client.files.list_directory_contents(directory):
            assert entry.path is not None
            if entry.is_directory:
                yield from walk(entry.path.rstrip("/"))
            else:
                yield entry.path

    def download(remote: str) -> None:
        contents = client.files.download(remote).contents
        assert contents is not None
        with contents as stream:
            (target / remote.removeprefix(path).lstrip("/")).write_bytes(stream.read())

    with measured() as timing:
        _each(download, walk(path), num_threads)
    return timing


def _each(move: Callable[[Any], None], files: Iterator[Any], num_threads: int) -> None:
    if num_threads == 1:
        for file in files:
            move(file)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(move, files))
