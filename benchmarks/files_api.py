"""Bytes through the Files API: the volume client against the databricks SDK.

On a local server, or with `--volume` on a workspace, by the credentials of the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from measure import MIB, Comparison, Program, Sample, compare, run_program, say, take_turns
from places import ROOT, serving, write_blocks
from topics import Setting, as_rate

__all__ = ["run"]

_SDK_STREAM = "databricks SDK, `files.download`: one stream"
_SDK_PARALLEL = "databricks SDK, `files.download_to`: a local file, ten threads"
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

        try:
            client_upload, sdk_upload = take_turns(
                {
                    "upload, client": lambda _round: upload("upload_client"),
                    "upload, SDK": lambda _round: upload("upload_sdk"),
                },
                setting.repeats,
            ).values()
            copy = str(setting.folder)
            client_read, sdk_stream, sdk_parallel = take_turns(
                {
                    "read, client": lambda _round: read("read_client"),
                    "read, SDK": lambda _round: read("read_by_sdk"),
                    "read, SDK parallel": lambda _round: read("read_by_sdk_to_file", folder=copy),
                },
                setting.repeats,
            ).values()
        finally:
            _delete(path, environment)
    unit = as_rate(size)
    what = f"volume client: read {setting.read_mib} MiB into memory, 8 ranges of 8 MiB at once"
    return [
        compare(
            f"volume client: upload a local file of {setting.read_mib} MiB",
            _SDK_UPLOAD,
            client_upload,
            sdk_upload,
            unit,
        ),
        compare(what, _SDK_STREAM, client_read, sdk_stream, unit),
        compare(what, _SDK_PARALLEL, client_read, sdk_parallel, unit),
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
    program: str, arguments: Mapping[str, object], environment: Mapping[str, str]
) -> Sample:
    timing = run_program(
        Program(module="programs", name=program, arguments=arguments, environment=environment)
    )
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)


def _delete(path: str, environment: Mapping[str, str]) -> None:
    from trainmount_files import NotFound, open_volume

    root, _, name = path.rpartition("/")
    volume = open_volume(
        root, host=environment.get("DATABRICKS_HOST"), token=environment.get("DATABRICKS_TOKEN")
    )
    try:
        volume.delete(name)
    except NotFound:
        pass
    finally:
        volume.close()
