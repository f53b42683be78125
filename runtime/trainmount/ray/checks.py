"""What makes a checkpointed pipeline lose or repeat rows, found before it runs. Called by `job.py`
for every run, and by users who want to know more beforehand.

Ray skips, after a kill, the rows of the *input* whose id is that of a written row. So an id must be
in the input, stay with its row, and stand for one row of the output.
"""

from __future__ import annotations

import json
import posixpath
import zlib
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from pyarrow.fs import (  # type: ignore[import-untyped]
    FileSelector,
    FileType,
)

from trainmount.errors import TrainmountError
from trainmount.ray.filesystem import CheckpointHandler, place
from trainmount.ray.internals import Dataset, FileDatasink, LogicalPlan, ops, split_extension
from trainmount.ray.storage import path_in

__all__ = ["PipelineRefused", "check_input", "check_pipeline", "check_plan", "check_sink"]

ROW_HASH: Final = "row_hash"
"""The column of `read_parquet(include_row_hash=True)`: made of a file's path and a row's place."""

_INPUT_FILE: Final = "_trainmount_input"

_ROW_BY_ROW: Final = (ops.AbstractMap, ops.ListFiles, ops.Download, ops.Union)


class PipelineRefused(TrainmountError, ValueError):
    """The pipeline would lose or repeat rows when it is resumed."""


def check_pipeline(dataset: Dataset, *, id_column: str, probe_rows: int = 100) -> None:
    """Whether `dataset`, about to be written, can be resumed by `id_column`.

    Reads the ids of the whole input, which are held in memory, and runs the pipeline until it has
    given `probe_rows` rows (0: not at all). Writes nothing, and takes no notice of checkpoints.

    Raises:
        PipelineRefused: an operator is not row by row, or the input is in memory; the input lacks
            the ids, or they repeat or are null; the pipeline drops them, or makes several rows of
            one.
    """
    dag = dataset._logical_plan.dag
    check_plan(dag, id_column)
    for op in _operators(dag):
        if isinstance(op, ops.Read | ops.ReadFiles):
            ids = _collect(_detached(dataset, op).select_columns([id_column]))
            _check_values(ids, id_column, "the input")
    if probe_rows:
        found = _collect(_detached(dataset, dag).limit(probe_rows))
        _check_values(found, id_column, "the output")


def check_plan(dag: Any, id_column: str) -> None:
    """The operators of a logical plan, and its schemas as far as they are known.

    Raises:
        PipelineRefused: see `check_pipeline`.
    """
    for op in _operators(dag):
        is_source = not op.input_dependencies
        if is_source and not isinstance(op, ops.Read | ops.ListFiles):
            raise PipelineRefused(
                f"{op.name} reads from memory, and Ray skips written rows only of files that it "
                "reads: write the input to files first"
            )
        if not isinstance(op, _ROW_BY_ROW):
            raise PipelineRefused(
                f"{op.name} does not treat each row by itself, so that a resumed run would get "
                "other rows: do that in a job before or after this one, without a checkpoint"
            )
        if isinstance(op, ops.ListFiles) and op.limit is not None:
            raise PipelineRefused(
                "limit() takes other rows in a resumed run: limit the input files"
            )
        if isinstance(op, ops.Read | ops.ReadFiles):
            _check_has(
                op, id_column, "is no column of the input, in which written rows are skipped"
            )
    _check_has(dag, id_column, "is dropped or renamed before the write: keep it")


def check_sink(sink: Any, handler: CheckpointHandler) -> None:
    """Where and under which names the pipeline writes.

    Raises:
        PipelineRefused: files of an earlier attempt would be removed or overwritten.
    """
    if not isinstance(sink, FileDatasink):
        raise PipelineRefused(
            f"{type(sink).__name__} writes no files, so that rows of an interrupted task cannot be "
            "taken back: write files, and load them from there"
        )
    mode = getattr(sink.mode, "value", sink.mode)
    if mode != "append":
        raise PipelineRefused(
            f"mode={mode!r} removes or refuses what an earlier attempt has written: use "
            "mode='append' and a new directory"
        )
    provider = sink.filename_provider
    runs = [
        [provider.get_filename_for_task(run, n) for n in (1, 10)] for run in ("0a" * 16, "0b" * 16)
    ]
    bases = [split_extension(name)[0] for names in runs for name in names]
    if len(set(bases)) < len(bases):
        raise PipelineRefused(
            f"{type(provider).__name__} gives two write tasks one file name ({bases[0]!r}): use "
            "both write_uuid and task_index in it, before the extension"
        )
    output = place(path_in(sink.unresolved_path)) + "/"
    if handler.directory.startswith(output) or output.startswith(f"{handler.directory}/"):
        raise PipelineRefused(
            f"the checkpoint {handler.directory} and the output {output} must not be one in another"
        )


def check_input(dag: Any, id_column: str, handler: CheckpointHandler) -> None:
    """Whether ids that are made of a row's place still mean the same rows; the first run says what
    they are places in.

    Raises:
        PipelineRefused: a file was added, removed or changed, or the filter was.
    """
    if id_column != ROW_HASH:
        return
    found = _input_of(dag)
    recorded = handler.read_own(_INPUT_FILE)
    if recorded is None:
        handler.write_own(_INPUT_FILE, zlib.compress(json.dumps(found).encode()))
        return
    known = json.loads(zlib.decompress(recorded))
    if known == found:
        return
    remedy = f"{ROW_HASH} would mean other rows: take a new checkpoint path and a new output"
    if known["filters"] != found["filters"]:
        raise PipelineRefused(
            f"the filter of the read was {known['filters']} and is {found['filters']}; {remedy}"
        )
    before, now = known["files"], found["files"]
    path = min(path for path in before | now if before.get(path, -1) != now.get(path, -1))
    what = "is gone" if path not in now else "is new" if path not in before else "has changed"
    raise PipelineRefused(f"the input file {path} {what}; {remedy}")


def _operators(dag: Any) -> Iterator[Any]:
    yield dag
    for op in dag.input_dependencies:
        yield from _operators(op)


def _check_has(op: Any, id_column: str, reason: str) -> None:
    """Raises PipelineRefused where what `op` gives is known, and has no such column."""
    schema = op.infer_schema()
    names = getattr(schema, "names", None)
    if names and id_column not in names:
        raise PipelineRefused(f"the id column {id_column!r} {reason} (columns: {', '.join(names)})")


def _check_values(table: Any, id_column: str, where: str) -> None:
    if table is None:
        return
    if id_column not in table.column_names:
        names = ", ".join(table.column_names)
        raise PipelineRefused(f"{where} has no column {id_column!r} (columns: {names})")
    values = table[id_column]
    if values.null_count:
        raise PipelineRefused(f"{values.null_count} ids of {where} are null ({id_column!r})")
    counts = pc.value_counts(values)
    repeated = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(repeated):
        raise PipelineRefused(
            f"the id {repeated[0]['values'].as_py()!r} stands for several rows of {where} "
            f"({id_column!r}): give each row an id of its own, in a job before this one"
        )


def _detached(dataset: Dataset, dag: Any) -> Dataset:
    """A dataset of that plan which knows of no checkpoint."""
    context = dataset.context.copy()
    context.checkpoint_config = None
    return Dataset(LogicalPlan(dag, context), context, dataset._in_stats)


def _collect(dataset: Dataset) -> Any:
    tables = [
        table
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow")
        if table.num_rows
    ]
    return pa.concat_tables(tables, promote_options="default") if tables else None


def _input_of(dag: Any) -> dict[str, Any]:
    """The files that a plan reads, with their sizes where these are told, and its filters."""
    files: dict[str, int | None] = {}
    filters: list[str] = []
    for op in _operators(dag):
        if isinstance(op, ops.Read):
            paths = op.infer_metadata().input_files or []
            files |= _sizes(getattr(op.datasource, "_filesystem", None), paths)
            filters.append(str(op.get_current_predicate()))
        elif isinstance(op, ops.ListFiles):
            files |= _listed(op)
            filters.append(str(op.predicate))
    return {"files": files, "filters": sorted(filters)}


def _sizes(filesystem: Any, paths: list[str]) -> dict[str, int | None]:
    """Of files, by one listing of each directory that they are in; None where nobody can tell."""
    found: dict[str, int | None] = dict.fromkeys(paths)
    if filesystem is not None:
        for folder in {posixpath.dirname(path) for path in paths}:
            infos = filesystem.get_file_info(FileSelector(folder))
            found |= {info.path: info.size for info in infos if info.path in found}
    return found


def _listed(op: Any) -> dict[str, int | None]:
    suffixes = tuple(f".{each.lstrip('.')}" for each in op.file_extensions or ())
    found: dict[str, int | None] = {}
    for info in op.filesystem.get_file_info(op.paths):
        below = [info]
        if info.type == FileType.Directory:
            below = op.filesystem.get_file_info(FileSelector(info.path, recursive=True))
        for each in below:
            name = posixpath.basename(each.path)
            is_read = not name.startswith((".", "_")) and (not suffixes or name.endswith(suffixes))
            if each.type == FileType.File and is_read:
                found[each.path] = each.size
    return found
