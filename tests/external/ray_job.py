"""A batch job on a Ray cluster, as a user writes it; run by `test_ray_jobs.py` with one argument, a
JSON object of what is below.

It doubles `x`. Once `log` has `gate` lines, one for each batch that was ever begun, no more come
out of the transform; rows of the input file `poison` raise.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import threading
import traceback
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
from ray.data import DataContext
from ray.data.checkpoint import CheckpointConfig
from ray.data.datasource import FilenameProvider
from ray.data.expressions import col

from trainmount.ray import (
    build_checkpoint_filesystem,
    check_pipeline,
    checkpointing,
    read_parquet,
)


class UnpaddedNames(FilenameProvider):
    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        return f"{write_uuid}_part-{task_index}.parquet"


class OneNameForAllRuns(FilenameProvider):
    def get_filename_for_task(self, write_uuid: str, task_index: int) -> str:
        return f"part-{task_index:06}.csv"


class Transform:
    def __init__(self, gate: int, poison: int, change: str, log: str) -> None:
        self.gate, self.poison, self.change, self.log = gate, poison, change, log

    def __call__(self, batch: Any) -> Any:
        if self.log:
            with Path(self.log).open("a+") as log:
                fcntl.flock(log, fcntl.LOCK_EX)
                log.seek(0)
                if len(log.readlines()) >= self.gate:
                    fcntl.flock(log, fcntl.LOCK_UN)
                    threading.Event().wait()
                log.write(f"{len(batch['x'])}\n")
        if self.poison in batch["file"]:
            raise RuntimeError("a sample that cannot be read")
        batch["x"] = batch["x"] * 2
        if self.change == "drop":
            del batch[next(iter(set(batch) & {"uid", "row_hash"}))]
        if self.change == "explode":
            batch = {name: values.repeat(2) for name, values in batch.items()}
        return batch


def config_of_ray(job: dict[str, Any]) -> Any:
    """The pattern of Ray's documentation, with no more of ours than the filesystem."""
    filesystem = build_checkpoint_filesystem(job["checkpoint"], job["options"])
    DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column=job["id"], checkpoint_path=job["checkpoint"], override_filesystem=filesystem
    )
    return nullcontext()


def dataset_of(job: dict[str, Any]) -> Any:
    if job["source"] == "memory":
        dataset = ray.data.from_items([{"uid": f"u{n}", "x": n, "file": 0} for n in range(10)])
    else:
        dataset = read_parquet(
            job["input"],
            storage_options=job["options"],
            include_row_hash=job["id"] == "row_hash",
            override_num_blocks=job["blocks"],
        )
    if job["plan"] == "shuffle":
        dataset = dataset.random_shuffle()
    if job["plan"] == "filter":
        dataset = dataset.filter(expr=col("x") >= 10)
    if job["plan"] == "select":
        dataset = dataset.select_columns(["x", "file"])
    transform = Transform(job["gate"], job["poison"], job["change"], job["log"])
    return dataset.map_batches(transform, batch_size=job["batch"])


def run(job: dict[str, Any]) -> None:
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.target_max_block_size = job["block_bytes"]
    context.use_datasource_v2 = job["v2"]
    options = {"filesystem": None}
    if "://" in job["output"]:
        options["filesystem"] = build_checkpoint_filesystem(job["output"], job["options"])
    names = {"unpadded": UnpaddedNames(), "one": OneNameForAllRuns(), "": None}[job["names"]]
    how = job["how"]
    if how == "check":
        check_pipeline(dataset_of(job), id_column=job["id"])
        return
    block = (
        config_of_ray(job)
        if how == "ray"
        else checkpointing(job["checkpoint"], id_column=job["id"], storage_options=job["options"])
    )
    with block:
        dataset = dataset_of(job)
        if job["plan"] == "count":
            dataset.materialize()
        elif job["names"] == "one":
            dataset.write_csv(job["output"], filename_provider=names, **options)
        else:
            dataset.write_parquet(
                job["output"], filename_provider=names, mode=job["mode"], **options
            )


def main() -> None:
    """Run each of the jobs that are named, in one session of the cluster; say how each ended."""
    address, jobs = json.loads(sys.argv[1])
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    for job in jobs:
        try:
            run(job)
            print(json.dumps({"error": "", "text": ""}), flush=True)
        except Exception as error:
            kind = type(error).__name__
            text = "".join(traceback.format_exception(error))
            print(json.dumps({"error": kind, "text": text}), flush=True)
    # What still waits in the cluster ends with it.
    os._exit(0)


main()
