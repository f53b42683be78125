"""`trainmount serve`: the local Files API server. Its options are those of
`python -m trainmount_files.server`, to which all arguments go.
"""

from __future__ import annotations

import typer

__all__ = ["serve"]


def serve(context: typer.Context) -> None:
    """Serve a directory as Unity Catalog volumes over the Databricks Files API."""
    from trainmount_files.server.__main__ import main

    raise typer.Exit(main(context.args))
