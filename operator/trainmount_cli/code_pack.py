"""A folder of code as a ConfigMap, which is how `codeSource.rootPath` gets into a cluster. Called
by `cluster_run`.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainmount_cli.documents import JobFile, resolve_root_path
from trainmount_cli.errors import CliError
from trainmount_operator.labels import base_name

__all__ = ["pack_code"]

# etcd takes 1.5 MiB, the API server 1 MiB of data; names and base64 need their part.
_MAX_BYTES: Final = 1_000_000
_MAX_FILES: Final = 5000

_SKIPPED: Final = frozenset({".git", "__pycache__", ".venv", "node_modules"})


def pack_code(file: JobFile) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """The ConfigMap with the code and the job's manifest that refers to it; None and the manifest
    as it is for a job without `rootPath`.

    Raises:
        CliError: no such folder, or more than a ConfigMap can hold.
    """
    source = file.job.spec.code_source
    if source is None or source.root_path is None:
        return None, file.manifest
    root = resolve_root_path(file)
    contents = {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in _files(root, source.include_paths)
    }
    size = sum(len(name) + len(data) * 4 // 3 for name, data in contents.items())
    if size > _MAX_BYTES or len(contents) > _MAX_FILES:
        raise CliError(
            f"spec.codeSource.rootPath: {root} has {len(contents)} files of {size} bytes, a "
            f"ConfigMap holds {_MAX_BYTES}; name includePaths, or put the code into a volume"
        )
    name = f"{base_name(file.job.name)}-code"
    keys = {relative: f"file-{number:04d}" for number, relative in enumerate(sorted(contents))}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name},
        # All binary: text that is not quite UTF-8 and line ends arrive as they are.
        "binaryData": {
            keys[relative]: base64.b64encode(data).decode() for relative, data in contents.items()
        },
    }
    items = [{"key": key, "path": relative} for relative, key in keys.items()]
    spec = file.manifest["spec"] | {"codeSource": {"configMap": {"name": name, "items": items}}}
    return config_map, file.manifest | {"spec": spec}


def _files(root: Path, include_paths: tuple[str, ...]) -> Iterator[Path]:
    for relative in include_paths or ("",):
        start = root / relative
        if start.is_file():
            yield start
        elif not start.is_dir():
            raise CliError(f"spec.codeSource.includePaths: there is no {start}")
        for folder, names, files in os.walk(start):
            names[:] = sorted(name for name in names if name not in _SKIPPED)
            yield from (Path(folder, name) for name in sorted(files) if not name.endswith(".pyc"))
