"""`trainmount run`: start a job, here or on a cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.interrupts import detachable
from trainmount_cli.options import ContextOption, LocalOption, NamespaceOption, OutputOption
from trainmount_cli.output import Output, print_data, print_line, select, timestamp

__all__ = ["run"]


def run(
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="YAML with a TrainingJob or a workload.")
    ] = None,
    local: LocalOption = False,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it ends.")] = False,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="With --local: directory of the volumes.", file_okay=False),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="RUN", help="With --local: go on with a run or a job."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--override", metavar="KEY=VALUE", help="Change a field; repeatable."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only.")] = False,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Run a training job: on the cluster, or with --local on this machine."""
    select(output)
    _check_options(file=file, local=local, data=data, resume=resume)
    if local and resume is not None:
        status = _resume(resume, file, watch=watch, output=output)
    elif local:
        assert file is not None
        status = _run_local(file, data, override or [], watch=watch, dry=dry_run, output=output)
    else:
        assert file is not None
        from trainmount_cli.cluster_run import submit

        status = submit(
            file,
            override or [],
            namespace=namespace,
            context=context,
            watch=watch,
            dry_run=dry_run,
            output=output,
        )
    raise typer.Exit(status)


def _check_options(
    *, file: Path | None, local: bool, data: Path | None, resume: str | None
) -> None:
    if file is None and resume is None:
        raise CliError("run needs -f FILE")
    for name, value in (("--data", data), ("--resume", resume)):
        if value is not None and not local:
            raise CliError(f"{name} is for runs of this machine; add --local")
    if data is not None and resume is not None:
        raise CliError("--data cannot be changed by --resume: the checkpoints are where they are")


def _run_local(
    path: Path, data: Path | None, overrides: list[str], *, watch: bool, dry: bool, output: Output
) -> int:
    from trainmount_cli.doctor import require_local
    from trainmount_cli.documents import load_job_file
    from trainmount_cli.local.launch import prepare, resolve_secrets, start_supervisor
    from trainmount_cli.local.store import RunStore

    file = load_job_file(path, overrides)
    for notice in file.job.notices:
        print(f"trainmount: {notice}", file=sys.stderr)
    secrets = resolve_secrets(file.job, file.secret_value)
    require_local(has_volumes=bool(file.job.spec.volumes))
    if dry:
        return _report(output, "DRY_RUN_OK", None, is_dry=True)
    folder = prepare(file, data=data, store=RunStore())
    with detachable(f"run {folder.run_id}", f"trainmount logs --local {folder.run_id} -f"):
        start_supervisor(folder, secrets)
    return _follow_or_report(folder, output, watch=watch)


def _resume(name: str, path: Path | None, *, watch: bool, output: Output) -> int:
    from trainmount_cli.doctor import require_local
    from trainmount_cli.documents import load_job_file
    from trainmount_cli.local.launch import resolve_secrets, start_supervisor
    from trainmount_cli.local.store import RunStore
    from trainmount_operator.spec import parse_job

    folder = RunStore().find(name)
    if folder.is_alive():
        message = f"{folder.run_id} is running; see it with `trainmount logs --local {name} -f`"
        raise CliError(message, code="CONFLICT", exit_status=EXIT_FAILED)
    job = parse_job(folder.read_spec()["manifest"])
    find = load_job_file(path).secret_value if path else lambda _secret, _key: None
    secrets = resolve_secrets(job, find)
    require_local(has_volumes=bool(job.spec.volumes))
    num_events, num_attempts = len(folder.read_events()), folder.num_attempts()
    with detachable(f"run {folder.run_id}", f"trainmount logs --local {folder.run_id} -f"):
        start_supervisor(folder, secrets)
    return _follow_or_report(
        folder, output, watch=watch, skip_events=num_events, first_attempt=num_attempts
    )


def _follow_or_report(
    folder: Any, output: Output, *, watch: bool, skip_events: int = 0, first_attempt: int = 0
) -> int:
    if not watch:
        return _report(output, "PENDING", folder.run_id)
    from trainmount_cli.local.view import watch as watch_run

    if output is Output.JSON:
        print_line({"type": "SUBMITTED", "ts": timestamp(), "run_id": folder.run_id})
    else:
        print(f"-- run {folder.run_id}, folder {folder.path}", flush=True)
    return watch_run(folder, output, skip_events=skip_events, first_attempt=first_attempt)


def _report(output: Output, status: str, run_id: str | None, *, is_dry: bool = False) -> int:
    if output is Output.JSON:
        print_data({"status": status, "dry_run": is_dry, "run_id": run_id})
    elif is_dry:
        print("the job is valid and could run here")
    else:
        print(f"{run_id} has started; follow it: trainmount logs --local {run_id} -f")
    return 0
