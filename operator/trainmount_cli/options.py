"""Options that several commands share, with one help text each."""

from __future__ import annotations

import re
from typing import Annotated, Final

import typer

from trainmount_cli.errors import CliError
from trainmount_cli.output import Output

__all__ = [
    "ChunkOption",
    "ContextOption",
    "LocalOption",
    "NamespaceOption",
    "OutputOption",
    "ProfileOption",
    "number_of_bytes",
]

_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}

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
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        metavar="NAME",
        help="Section of ~/.databrickscfg; counts before DATABRICKS_HOST and DATABRICKS_TOKEN.",
    ),
]
ChunkOption = Annotated[
    str | None,
    typer.Option(
        "--chunk-above",
        metavar="SIZE",
        help="Keep larger files in chunks, for storage that takes 5 GiB a file: 5Gi.",
    ),
]


def number_of_bytes(option: str, text: str | None) -> int | None:
    """The bytes of a size like 500M or 5Gi; None for None.

    Raises:
        CliError: it is no size.
    """
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]+)([KMGT]i?)?B?", text)
    if match is None or not int(match[1]):
        raise CliError(f"{option} {text}: is not a size; write 500M or 5Gi")
    return int(match[1]) * _UNITS[match[2] or ""]
