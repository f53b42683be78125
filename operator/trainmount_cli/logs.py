"""`trainmount logs`: what the nodes of a run print."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.errors import CliError
from trainmount_cli.options import ContextOption, LocalOption, NamespaceOption, OutputOption
from trainmount_cli.output import Output, print_line, select

__all__ = ["logs"]


def logs(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Run or job.")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job ends, through attempts.")
    ] = False,
    node: Annotated[int | None, typer.Option("--node", min=0, help="One node only.")] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", min=0, help="One only; by default all, or with --local the last."
        ),
    ] = None,
    local: LocalOption = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the output of a run's nodes, each line once."""
    select(output)
    if local:
        raise typer.Exit(_local(name, follow=follow, node=node, attempt=attempt, output=output))
    from trainmount_cli.cluster_run import show_logs

    raise typer.Exit(
        show_logs(
            name,
            follow=follow,
            node=node,
            attempt=attempt,
            namespace=namespace,
            context=context,
            output=output,
        )
    )


def _local(
    name: str, *, follow: bool, node: int | None, attempt: int | None, output: Output
) -> int:
    from trainmount_cli.local.follow import read_logs
    from trainmount_cli.local.store import RunStore
    from trainmount_cli.local.view import run_status, watch

    folder = RunStore().find(name)
    last = folder.num_attempts() - 1
    wanted = max(last, 0) if attempt is None else attempt
    if attempt is not None and attempt > last:
        shown = "none yet" if last < 0 else f"0 to {last}"
        raise CliError(f"--attempt {attempt}: {folder.run_id} has the attempts {shown}")
    nodes = run_status(folder).nodes
    if node is not None and node >= nodes:
        raise CliError(f"--node {node}: {folder.run_id} has the nodes 0 to {nodes - 1}")
    if follow:
        return watch(folder, output, first_attempt=wanted, node=node)
    printed = False
    for line in read_logs(folder, attempt=wanted):
        if node in (None, line.node):
            printed = True
            if output is Output.JSON:
                print_line({"attempt": line.attempt, "node": line.node, "line": line.text})
            else:
                print(f"[node {line.node}] {line.text}")
    if not printed:
        _explain_silence(folder.read_events())
    return 0


def _explain_silence(events: list[dict[str, object]]) -> None:
    """Where there is no output, the reason."""
    last = events[-1]["message"] if events else "it has not started yet"
    raise CliError(f"no output: {last}", code="NOT_FOUND")
