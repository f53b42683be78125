"""`trainmount get`: one run, or the newest."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainmount_cli.errors import CliError
from trainmount_cli.options import ContextOption, LocalOption, NamespaceOption, OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["get"]


def get(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="Run or job; the newest by default.")
    ] = None,
    local: LocalOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show where a run stands, with its attempts."""
    select(output)
    described = _local(name) if local else _cluster(name, namespace, context)
    if output is Output.JSON:
        print_data(described)
    else:
        _print(described)


def _local(name: str | None) -> dict[str, Any]:
    from trainmount_cli.local.store import RunStore
    from trainmount_cli.local.view import describe_run

    store = RunStore()
    if name is not None:
        return describe_run(store.find(name))
    newest = next(iter(store.all()), None)
    if newest is None:
        raise CliError("there is no run on this machine yet", code="NOT_FOUND")
    return describe_run(newest)


def _cluster(name: str | None, namespace: str | None, context: str | None) -> dict[str, Any]:
    from trainmount_cli.cluster_run import describe_job

    if name is None:
        raise CliError("get needs the name of a job; see `trainmount list`")
    return describe_job(name, namespace=namespace, context=context)


def _print(described: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    for label, key in (
        ("Run", "run_id"),
        ("Job", "job_name"),
        ("Status", "status"),
        ("Message", "message"),
        ("Started", "started_at"),
        ("Seconds", "duration_seconds"),
        ("Retries", "retries"),
        ("Data", "data_directory"),
        ("Folder", "folder"),
    ):
        if described.get(key) not in (None, ""):
            console.print(f"{label:<9}{described[key]}", markup=False)
    if described["attempts"]:
        table = Table(box=None, pad_edge=False)
        for title in ("ATTEMPT", "OUTCOME", "NODE", "CODE", "MESSAGE"):
            table.add_column(title)
        for record in described["attempts"]:
            table.add_row(
                str(record["number"]),
                record.get("outcome", "running"),
                str(record.get("nodeRank", "")),
                str(record.get("exitCode", "")),
                record.get("message", ""),
            )
        console.print(table)
