"""Prepares the folder of a run and starts its supervisor; called by the commands `run` and
`cancel`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from trainmount_cli.documents import JobFile, resolve_root_path
from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.local.agent import CANCEL_FILE
from trainmount_cli.local.store import RunFolder, RunStore, default_data_directory, remove
from trainmount_cli.local.volumes import volume_subdirectory
from trainmount_operator.environment import parameters_file
from trainmount_operator.job import CodeSource, TrainingJob

__all__ = ["cancel", "prepare", "resolve_secrets", "start_supervisor"]

_START_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05

# Never part of a program, and often larger than it.
_NOT_CODE: Final = shutil.ignore_patterns(".git", "__pycache__", "*.pyc", ".venv")


def prepare(file: JobFile, *, data: Path | None, store: RunStore) -> RunFolder:
    """A folder from which a supervisor can run the job; volumes are made in the data directory.

    Raises:
        CliError: the job cannot run here; nothing is left behind.
    """
    live = store.live_run_of(file.job.name)
    if live is not None:
        raise CliError(
            f"{file.job.name} is running already as {live.run_id}; "
            f"see it with `trainmount logs --local {live.run_id} -f`",
            code="CONFLICT",
            exit_status=EXIT_FAILED,
        )
    _check(file)
    directory = (data or default_data_directory()).absolute()
    folder = store.create(file.job.name)
    try:
        _write_code(file, folder)
        _make_volumes(file.job, directory)
        parameters = file.job.spec.parameters
        if parameters is not None:
            folder.parameters.write_text(parameters_file(parameters), encoding="utf-8")
        # Last: a folder with this file is a run.
        folder.write_spec({"v": 1, "manifest": file.manifest, "dataDirectory": str(directory)})
    except (CliError, OSError) as error:
        remove(folder)
        if isinstance(error, CliError):
            raise
        message = f"cannot prepare the run: {error.filename}: {error.strerror}"
        raise CliError(message, exit_status=EXIT_FAILED) from None
    return folder


def resolve_secrets(job: TrainingJob, find: Callable[[str, str], str | None]) -> dict[str, str]:
    """Values of the job's `secrets`, by variable: from `find(secret, key)`, else from this
    environment.

    Raises:
        CliError: one is nowhere.
    """
    values = {}
    for name, reference in job.spec.secrets.items():
        value = find(reference.name, reference.key)
        if value is None:
            value = os.environ.get(name)
        if value is None:
            raise CliError(
                f"spec.secrets.{name}: no Secret {reference.name!r} with the key "
                f"{reference.key!r} in the file; add one, or set {name} in the environment"
            )
        values[name] = value
    return values


def start_supervisor(folder: RunFolder, secrets: Mapping[str, str]) -> None:
    """Start the run's supervisor, and return once it has said that it lives.

    Raises:
        CliError: it did not.
    """
    with (folder.logs / "supervisor.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainmount_cli.local.supervisor", str(folder.path)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert process.stdin is not None
    with process.stdin:
        # Through a pipe: neither arguments nor files tell them to others.
        process.stdin.write(json.dumps(dict(secrets)).encode())
    deadline = time.monotonic() + _START_SECONDS
    while folder.read_status().get("pids", {}).get("supervisor") != process.pid:
        if process.poll() is not None:
            if folder.read_status():
                return  # it has told in the status why it ended
            log_path = folder.logs / "supervisor.log"
            raise CliError(f"the run did not start; see {log_path}", exit_status=EXIT_FAILED)
        if time.monotonic() > deadline:
            raise CliError(f"the run does not start; see {folder.logs}", exit_status=EXIT_FAILED)
        time.sleep(_POLL_SECONDS)
    # It goes on without us; there is nothing to wait for.
    process.returncode = 0


def cancel(folder: RunFolder, *, timeout_seconds: float) -> bool:
    """End a run in order, or by force after the time. False if it was not running."""
    pid = folder.read_status().get("pids", {}).get("supervisor")
    if not folder.is_alive() or pid is None:
        return False
    (folder.path / CANCEL_FILE).touch()
    deadline = time.monotonic() + timeout_seconds
    number = signal.SIGTERM
    while folder.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        until = min(deadline, time.monotonic() + 5)
        while folder.is_alive() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        if time.monotonic() >= deadline:
            number = signal.SIGKILL
            deadline = time.monotonic() + timeout_seconds
    return True


def _check(file: JobFile) -> None:
    spec = file.job.spec
    if spec.suspend:
        raise CliError(f"{file.path}: spec.suspend is true: the job would never start here")
    for index, volume in enumerate(spec.volumes):
        if volume.claim_name is not None:
            raise CliError(
                f"{file.path}: spec.volumes[{index}].claimName needs a cluster; "
                "with --local give source"
            )
    source = spec.code_source
    if source is not None and source.config_map is not None:
        _config_map(file, source.config_map)


def _write_code(file: JobFile, folder: RunFolder) -> None:
    source = file.job.spec.code_source
    if source is None:
        return
    if source.config_map is not None:
        _write_config_map(_config_map(file, source.config_map), source, folder)
    else:
        _copy_folder(resolve_root_path(file), source, folder)


def _config_map(file: JobFile, name: str) -> dict[str, Any]:
    document = file.find("ConfigMap", name)
    if document is None:
        raise CliError(
            f"{file.path}: spec.codeSource.configMap.name: no ConfigMap {name!r} in the file; "
            "with --local it must stand beside the job"
        )
    return document


def _write_config_map(document: dict[str, Any], source: CodeSource, folder: RunFolder) -> None:
    contents = {key: str(text).encode() for key, text in (document.get("data") or {}).items()}
    for key, encoded in (document.get("binaryData") or {}).items():
        contents[key] = base64.b64decode(encoded)
    paths = {item.key: item.path for item in source.items} or {key: key for key in contents}
    folder.code.mkdir()
    for key, relative in paths.items():
        if key not in contents:
            raise CliError(f"spec.codeSource.configMap.items: the ConfigMap has no key {key!r}")
        place = folder.code / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(contents[key])


def _copy_folder(root: Path, source: CodeSource, folder: RunFolder) -> None:
    if not source.include_paths:
        shutil.copytree(root, folder.code, symlinks=True, ignore=_NOT_CODE)
        return
    for relative in source.include_paths:
        place = folder.code / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        if (root / relative).is_dir():
            shutil.copytree(root / relative, place, symlinks=True, ignore=_NOT_CODE)
        elif (root / relative).exists():
            shutil.copy2(root / relative, place)
        else:
            raise CliError(f"spec.codeSource.includePaths: there is no {root / relative}")


def _make_volumes(job: TrainingJob, data: Path) -> None:
    data.mkdir(parents=True, exist_ok=True)
    for volume in job.spec.volumes:
        source = volume.source or volume.path
        subdirectory = volume_subdirectory(source)
        if subdirectory is None:
            continue
        if any(part in (".", "..") for part in subdirectory.split("/")):
            raise CliError(f"the source of a volume must not contain '.' or '..', got {source!r}")
        (data / subdirectory).mkdir(parents=True, exist_ok=True)
