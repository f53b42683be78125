"""`trainmount list`: all runs, newest first."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainmount_cli.options import ContextOption, LocalOption, NamespaceOption, OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["list_runs"]


def list_runs(
    local: LocalOption = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first."""
    select(output)
    runs = _local(limit) if local else _cluster(limit, namespace, context)
    if output is Output.JSON:
        print_data({"runs": runs})
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("RUN", "STATUS", "STARTED", "SECONDS", "ATTEMPT"):
        table.add_column(title, no_wrap=True)
    for run in runs:
        values = (run["started_at"], run["duration_seconds"], run["attempt_number"])
        shown = ["" if value is None else str(value) for value in values]
        table.add_row(run["run_id"], run["status"], *shown)
    Console(highlight=False, soft_wrap=True).print(table)


def _local(limit: int) -> list[dict[str, Any]]:
    from trainmount_cli.local.store import RunStore
    from trainmount_cli.local.view import describe_run

    return [describe_run(folder) for folder in RunStore().all()[:limit]]


def _cluster(limit: int, namespace: str | None, context: str | None) -> list[dict[str, Any]]:
    from trainmount_cli.cluster_run import describe_jobs

    return describe_jobs(namespace=namespace, context=context)[:limit]
