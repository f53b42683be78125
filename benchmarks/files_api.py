"""Bytes through the Files API: the volume client against the databricks SDK.

On a local server, or with `--volume` on a workspace, by the credentials of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from measure import MIB, Comparison, Program, Sample, compare, run_program, say, take_turns
from places import ROOT, serving, write_blocks
from topics import Setting, as_rate

if TYPE_CHECKING:
    from trainmount_files import Volume

__all__ = ["run"]

_SDK_STREAM = "databricks SDK, `files.download`: one stream"
_SDK_PARALLEL = "databricks SDK, `files.download_to`: a local file, ten threads"
_BARE = "a bare urllib3 loop: the same ranges into memory, nothing checked or retried"
_SDK_UPLOAD = "databricks SDK, `files.upload_from`: ten threads"


def run(setting: Setting) -> list[Comparison]:
    source = setting.folder / "source"
    size = setting.read_mib * MIB
    write_blocks(source, size)
    with _volume(setting) as (root, environment):
        path = f"{root}/benchmark-{os.getpid()}"

        def upload(program: str) -> Sample:
            arguments = {"source": str(source), "path": path}
            return _sample(program, arguments, environment)

        def read(program: str, **more: str) -> Sample:
            arguments = {"path": path, "size_bytes": size, **more}
            return _sample(program, arguments, environment)

        def move(program: str, **arguments: object) -> Sample:
            return _sample(program, arguments, environment, module="transfers")

        try:
            lines = _uploads(setting, source, path, upload, move)
            lines += _downloads(setting, path, size, read, move)
            lines += _streams(setting, source, path, move)
        finally:
            _delete(path, environment)
    return lines


Upload = Callable[[str], Sample]
Read = Callable[..., Sample]
Move = Callable[..., Sample]


def _uploads(
    setting: Setting, source: Path, path: str, upload: Upload, move: Move
) -> list[Comparison]:
    ours, theirs = take_turns(
        {
            "upload, client": lambda _round: move("upload_whole", source=str(source), path=path),
            "upload, SDK": lambda _round: upload("upload_sdk"),
        },
        setting.repeats,
    ).values()
    what = f"volume client: upload a local file of {setting.read_mib} MiB"
    return [compare(what, _SDK_UPLOAD, ours, theirs, as_rate(setting.read_mib * MIB))]


def _downloads(setting: Setting, path: str, size: int, read: Read, move: Move) -> list[Comparison]:
    folder = str(setting.folder)
    into_memory, to_file, iterated, bare, sdk_stream, sdk_parallel = take_turns(
        {
            "read, client": lambda _round: read("read_client"),
            "download, client": lambda _round: move(
                "download_whole", path=path, size_bytes=size, folder=folder
            ),
            "iterate, client": lambda _round: move("iterate_client", path=path, size_bytes=size),
            "read, urllib3": lambda _round: move("readinto_urllib3", path=path, size_bytes=size),
            "read, SDK": lambda _round: read("read_by_sdk"),
            "read, SDK parallel": lambda _round: read("read_by_sdk_to_file", folder=folder),
        },
        setting.repeats,
    ).values()
    unit = as_rate(size)
    memory = f"volume client: read {setting.read_mib} MiB into memory, 8 ranges of 8 MiB at once"
    file = f"volume client: download {setting.read_mib} MiB to a local file, whole or absent"
    blocks = f"volume client: iterate over {setting.read_mib} MiB, 4 blocks of 8 MiB ahead"
    return [
        compare(memory, _BARE, into_memory, bare, unit),
        compare(memory, _SDK_STREAM, into_memory, sdk_stream, unit),
        compare(file, _BARE, to_file, bare, unit),
        compare(file, _SDK_PARALLEL, to_file, sdk_parallel, unit),
        compare(blocks, _SDK_STREAM, iterated, sdk_stream, unit),
    ]


def _streams(setting: Setting, source: Path, path: str, move: Move) -> list[Comparison]:
    """What many at once cost: mostly memory."""
    arguments = {"source": str(source), "path": path}
    one, many, streams = take_turns(
        {
            "upload, one": lambda _round: move("upload_whole", **arguments),
            "upload, eight": lambda _round: move("upload_many", **arguments, num_files=8),
            "streams, eight": lambda _round: move("upload_stream", **arguments, num_files=8),
        },
        min(setting.repeats, 2),
    ).values()
    against = f"one upload of a local file of {setting.read_mib} MiB"
    size = setting.read_mib * MIB
    return [
        compare("volume client: 8 such uploads at once", against, many, one, as_rate(size)),
        compare(
            "volume client: 8 streams of that size at once", against, streams, one, as_rate(size)
        ),
    ]


@contextmanager
def _volume(setting: Setting) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Where to write, and what to put into a program's environment to get there."""
    if setting.volume:
        say(f"files_api: on {setting.volume} of the environment's workspace")
        yield setting.volume.rstrip("/"), {}
        return
    with serving(setting.folder / "store") as store:
        yield ROOT, store.environment


def _sample(
    program: str,
    arguments: Mapping[str, object],
    environment: Mapping[str, str],
    module: str = "programs",
) -> Sample:
    timing = run_program(
        Program(module=module, name=program, arguments=arguments, environment=environment)
    )
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)


def _open(root: str, environment: Mapping[str, str]) -> Volume:
    from trainmount_files import open_volume

    return open_volume(
        root, host=environment.get("DATABRICKS_HOST"), token=environment.get("DATABRICKS_TOKEN")
    )


def _delete(path: str, environment: Mapping[str, str]) -> None:
    from trainmount_files import NotFound

    root, _, name = path.rpartition("/")
    volume = _open(root, environment)
    try:
        volume.delete(name)
    except NotFound:
        pass
    finally:
        volume.close()
