"""Options that several commands share, with one help text each."""

from __future__ import annotations

from typing import Annotated

import typer

from trainmount_cli.output import Output

__all__ = ["ContextOption", "LocalOption", "NamespaceOption", "OutputOption"]

LocalOption = Annotated[
    bool, typer.Option("--local", help="Runs of this machine instead of the cluster's.")
]
OutputOption = Annotated[
    Output,
    typer.Option("--output", "-o", help="JSON envelopes for programs.", case_sensitive=False),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", "-n", help="Namespace in the cluster; the context's by default."),
]
ContextOption = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig; the current by default.")
]
