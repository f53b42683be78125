"""What Ray Data writes and reads its checkpoints through. Built on the driver; pickled into every
write task.

    open_output_stream   a pending file appears whole, once its ids are right
    move                 the commit: refused to a run that another has taken over
    get_file_info        what is shown of a directory: names.presented
"""

from __future__ import annotations

import io
import os
import posixpath
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem
from pyarrow.fs import (  # type: ignore[import-untyped]
    FileInfo,
    FileType,
    FSSpecHandler,
    PyFileSystem,
)

from trainmount.errors import CheckpointError
from trainmount.ray.names import (
    committed_name,
    hidden,
    pending_base,
    presented,
    stored_name,
)
from trainmount.ray.storage import (
    BucketFileSystem,
    StorageOptions,
    open_filesystem,
    path_in,
    scheme_of,
)

__all__ = ["CheckpointHandler", "build_checkpoint_filesystem", "place"]

RUN_FILE: Final = "_trainmount_run"
"""In a checkpoint's directory: the run that may commit."""


def build_checkpoint_filesystem(path: str, storage_options: StorageOptions | None = None) -> Any:
    """The `pyarrow.fs.FileSystem` for `CheckpointConfig(checkpoint_path=path,
    override_filesystem=…)`; `filesystem=` of Ray's reads and writes may have it too.

    `path` is `volumes:///Volumes/...`, `s3://bucket/...` of any store that speaks S3 (also `cos://`
    and `oss://`), `gs://...`, `az://...`, or an absolute path that every worker sees.
    `storage_options` are those of its scheme, or `{scheme: options}`: for `s3` as s3fs has them
    (`key`, `secret`, `token`, `endpoint_url`, `client_kwargs`, `config_kwargs` with
    `addressing_style`) or as the volume has (`access_key_id`, `endpoint`, `region`, …); for
    `volumes` `host`, `token`, `profile`. Without them each worker finds its own in the environment.
    They are pickled with the filesystem, into the cluster's object store.

    Listings are asked for each time. A file is whole or absent. A commit is one rename, or a copy
    and a removal of which a repetition, or the next run, sees that it was done. Recovery after a
    kill deletes data files of the interrupted tasks alone, whatever their names.

    Raises:
        ValueError: the path is relative or of another scheme, or an option has no meaning.
    """
    if "://" not in path and scheme_of(path) == "volumes":
        # Each worker shall go the same way, also one that has the volume mounted.
        path = f"volumes://{path.removeprefix('dbfs:')}"
    return PyFileSystem(CheckpointHandler(path, storage_options))


def place(path: str) -> str:
    """The one spelling of a path as Ray passes it to a filesystem."""
    return "/" + path.strip("/")


class CheckpointHandler(FSSpecHandler):  # type: ignore[misc, unused-ignore]
    """The filesystem's verbs as pyarrow calls them. Any thread may.

    `run` is whose commits it makes; None before the directory was taken. With `unique_ids`, ids
    that repeat in one file are refused; with `committed_only`, listings leave out what is pending.
    """

    def __init__(
        self,
        path: str,
        storage_options: StorageOptions | None,
        run: str | None = None,
        unique_ids: bool = False,
        committed_only: bool = False,
    ) -> None:
        """Sends no request."""
        super().__init__(open_filesystem(path, storage_options))
        self.run = run
        self.unique_ids = unique_ids
        self.committed_only = committed_only
        self.directory = place(path_in(path))
        self._path = path
        self._options = storage_options

    def __reduce__(self) -> tuple[Any, ...]:
        given = (self._path, self._options, self.run, self.unique_ids, self.committed_only)
        return type(self), given

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._path!r}>"

    def get_type_name(self) -> str:
        return "trainmount"

    def create_dir(self, path: str, recursive: bool) -> None:
        """Make a directory. Ray does so for a checkpoint's when it plans a run: see `take_over`."""
        super().create_dir(path, recursive)
        if place(path) == self.directory:
            self.take_over()

    def take_over(self) -> None:
        """From now on only tasks that are given this object commit here."""
        self.run = uuid.uuid4().hex
        with suppress(FileExistsError):
            self.fs.makedirs(self.directory, exist_ok=True)
        self._publish(self._own(RUN_FILE), self.run.encode())

    def get_file_info_selector(self, selector: Any) -> list[Any]:
        """The entries below a directory, as `names.presented` has them."""
        by_folder: dict[str, dict[str, Any]] = {}
        for info in super().get_file_info_selector(selector):
            path = info.path.strip("/") if isinstance(self.fs, BucketFileSystem) else info.path
            folder, name = posixpath.split(path)
            by_folder.setdefault(folder, {})[name] = info
        return [
            FileInfo(posixpath.join(folder, each), info.type, size=info.size, mtime=info.mtime)
            for folder, infos in by_folder.items()
            for name, shown in presented(infos).items()
            for info in [infos[name]]
            for each in (shown if info.type == FileType.File else [name])
            if not (self.committed_only and pending_base(each) is not None)
        ]

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        if not self._is_checkpoint(path):
            return super().open_output_stream(path, metadata)
        return pa.PythonFile(_CheckpointFile(self, path), mode="w")

    def move(self, src: str, dest: str) -> None:
        """Rename; of a pending checkpoint file to its committed name, commit it."""
        base = pending_base(posixpath.basename(src))
        if base is None:
            super().move(src, dest)
            return
        self._check_run(dest)
        try:
            self.fs.mv(src, dest)
        except FileNotFoundError:
            # Another try of the same commit was faster, or its answer was lost.
            if not self.fs.exists(dest):
                raise

    def delete_file(self, path: str) -> None:
        """Remove a file, also by a name under which `get_file_info` has shown it."""
        folder, name = posixpath.split(path)
        stored = stored_name(name)
        if stored is None or self.fs.exists(path):
            super().delete_file(path)
            return
        # It was shown under several names, and so is deleted as often.
        with suppress(FileNotFoundError):
            super().delete_file(posixpath.join(folder, stored))

    def store(self, path: str, data: bytes) -> None:
        """Publish a checkpoint file, the ids in which are those of one write task.

        Raises:
            CheckpointError: ids repeat or are missing; the file's name was used for other ids, so
                that data have been overwritten; another run has taken over.
        """
        ids = pq.read_table(io.BytesIO(data))
        if self.unique_ids:
            _check_ids(ids)
        self._check_run(path)
        folder, name = posixpath.split(path)
        committed = posixpath.join(folder, committed_name(name))
        is_again = pending_base(name) is not None and self.fs.exists(committed)
        if is_again and not _same_ids(ids, pq.read_table(io.BytesIO(self.fs.cat_file(committed)))):
            raise CheckpointError(
                f"{committed} is there already with other ids: two write tasks have one file name; "
                "a FilenameProvider must use both write_uuid and task_index"
            )
        self._publish(path, data)
        if is_again:
            # The task is repeated and will write its file anew. Until that is done it is not
            # committed, or a kill in between would lose its rows.
            self.fs.rm_file(committed)

    def read_own(self, name: str) -> bytes | None:
        """A file that we keep in the checkpoint's directory; None if there is none."""
        try:
            return bytes(self.fs.cat_file(self._own(name)))
        except FileNotFoundError:
            return None

    def write_own(self, name: str, data: bytes) -> None:
        self._publish(self._own(name), data)

    def files_in_directory(self) -> list[str]:
        """Names of all files in the checkpoint's directory, as they are stored."""
        try:
            found = self.fs.ls(self.directory, detail=True)
        except FileNotFoundError:
            return []
        return [posixpath.basename(each["name"]) for each in found if each["type"] == "file"]

    def rename_in_directory(self, names: Iterable[tuple[str, str]]) -> None:
        """Give files of the checkpoint's directory other names; those that are gone are passed."""
        for old, new in names:
            with suppress(FileNotFoundError):
                self.fs.mv(self._own(old), self._own(new))

    def _own(self, name: str) -> str:
        return posixpath.join(self.directory, name)

    def _is_checkpoint(self, path: str) -> bool:
        folder, name = posixpath.split(path)
        if pending_base(name) is not None:
            return True
        return place(folder) == self.directory and name.endswith(".parquet") and not hidden(name)

    def _check_run(self, path: str) -> None:
        """Raises CheckpointError where another run has taken the directory, or it is gone."""
        if self.run is None or place(posixpath.dirname(path)) != self.directory:
            return
        if self.read_own(RUN_FILE) != self.run.encode():
            raise CheckpointError(
                f"another run has taken over {self._path}, or has finished: this task's rows are "
                "that run's to write"
            )

    def _publish(self, path: str, data: bytes) -> None:
        """Store a file, whole or not at all."""
        if not isinstance(self.fs, LocalFileSystem):
            self.fs.pipe_file(path, data)
            return
        target = Path(path)
        partial = target.with_name(f"_trainmount_{uuid.uuid4().hex}")
        try:
            with partial.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


class _CheckpointFile(io.BytesIO):
    """A checkpoint file in the making; it is kept in memory, and published when it is closed."""

    def __init__(self, handler: CheckpointHandler, path: str) -> None:
        super().__init__()
        self._handler = handler
        self._target = path

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        self._handler.store(self._target, data)

    def __del__(self) -> None:
        # The base would close, and so publish, what an exception has cut short.
        pass


def _check_ids(ids: Any) -> None:
    (column,) = ids.column_names
    values = ids[column]
    if values.null_count:
        raise CheckpointError(
            f"the id column {column!r} must not be null, as {values.null_count} are"
        )
    if pc.count_distinct(values).as_py() == len(values):
        return
    counts = pc.value_counts(values)
    example = counts.filter(pc.greater(counts.field("counts"), 1))[0]["values"].as_py()
    raise CheckpointError(
        f"the id {example!r} of {column!r} stands for several output rows: some may be written and "
        "the others skipped after a kill; give each row an id of its own, in a job before this one"
    )


def _same_ids(one: Any, other: Any) -> bool:
    if one.schema.names != other.schema.names or len(one) != len(other):
        return False
    order = [(name, "ascending") for name in one.schema.names]
    return bool(one.sort_by(order).equals(other.sort_by(order)))
