"""`trainmount cancel`: end a run; what it has written stays."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.options import ContextOption, LocalOption, NamespaceOption, OutputOption
from trainmount_cli.output import Output, print_data, select

__all__ = ["cancel"]


def cancel(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs or jobs.")],
    local: LocalOption = False,
    timeout: Annotated[
        float, typer.Option("--timeout", help="With --local: seconds before it is killed.")
    ] = 180.0,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """End runs in order: nodes get SIGTERM and their grace period, files are uploaded."""
    select(output)
    cancelled: list[str] = []
    failed: list[dict[str, Any]] = []
    for name in names:
        try:
            if local:
                cancelled.append(_local(name, timeout))
            else:
                from trainmount_cli.cluster_run import cancel_job

                cancel_job(name, namespace=namespace, context=context)
                cancelled.append(name)
        except CliError as error:
            if len(names) == 1:
                raise
            failed.append({"run_id": name, "error": error.message})
    if output is Output.JSON:
        print_data({"cancelled": cancelled, "failed": failed})
    else:
        for name in cancelled:
            print(f"{name} is cancelled")
        for failure in failed:
            print(f"{failure['run_id']}: {failure['error']}")
    raise typer.Exit(EXIT_FAILED if failed else 0)


def _local(name: str, timeout: float) -> str:
    from trainmount_cli.local.launch import cancel as cancel_run
    from trainmount_cli.local.store import RunStore

    folder = RunStore().find(name)
    if not cancel_run(folder, timeout_seconds=timeout):
        message = f"{folder.run_id} is not running"
        raise CliError(message, code="CONFLICT", exit_status=EXIT_FAILED)
    return folder.run_id
