"""The command line: registers the commands, and turns what they raise into one line and an exit
status. Entry point of `trainmount` and `python -m trainmount_cli`.

A command module imports what it needs when it is called, so that `--help` and `--local` neither
load nor read anything of a cluster.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EBADF, EDQUOT, EIO, ENOSPC
from typing import Any, Final

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    # The command is on the path after a plain install too.
    sys.exit("trainmount: the command line needs its extra: pip install 'trainmount[cli]'")

from trainmount_cli.cancel import cancel
from trainmount_cli.cp import cp
from trainmount_cli.doctor import doctor
from trainmount_cli.errors import EXIT_FAILED, CliError
from trainmount_cli.evict import evict
from trainmount_cli.flush import flush
from trainmount_cli.get import get
from trainmount_cli.list_runs import list_runs
from trainmount_cli.logs import logs
from trainmount_cli.ls import ls
from trainmount_cli.mkdir import mkdir
from trainmount_cli.mount import mount, remount, unmount
from trainmount_cli.output import print_error
from trainmount_cli.refresh import refresh
from trainmount_cli.rm import rm
from trainmount_cli.run import run
from trainmount_cli.serve import serve
from trainmount_cli.status import status
from trainmount_cli.warm import warm
from trainmount_files.wording import printable

__all__ = ["app", "main"]

# All arguments belong to the program behind the command, `--help` too.
_PASS_THROUGH: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

# Of the click that typer has a copy of, or of the package where typer is older.
_UsageError: Final[Any] = typer.BadParameter.__mro__[1]

_OUTPUT_ERRORS: Final = (ENOSPC, EDQUOT, EIO, EBADF)


class _Commands(TyperGroup):
    """All commands. What goes wrong with standard output is dealt with here, before typer makes a
    failure of a reader that has had enough.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            # Then it is not a mistake that is told, but the help.
            return super().parse_args(ctx, args)
        with _usage_in_one_line(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage_in_one_line(ctx):
                result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read has read enough; Python must not complain when it flushes at exit.
            _forget_output()
            sys.exit(0)
        except OSError as error:
            # One without a name is of a descriptor.
            if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
                raise
            _forget_output()
            reason = (error.strerror or "failed").lower()
            print(f"trainmount: standard output cannot be written: {reason}", file=sys.stderr)
            sys.exit(EXIT_FAILED)
        return result


@contextmanager
def _usage_in_one_line(context: Any) -> Iterator[None]:
    """A mistake in the arguments inside, of the command of `context` or of one below it, in place
    of typer's several lines.
    """
    try:
        yield
    except _UsageError as error:
        where = getattr(error, "ctx", None) or context
        said = " ".join(error.format_message().split()).rstrip(".")
        line = f"{said[:1].lower()}{said[1:]}; see {where.command_path} --help"
        raise CliError(printable(line)) from None


def _forget_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="trainmount",
    cls=_Commands,
    help="Distributed training over Unity Catalog volumes, on a cluster or on this machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run)
app.command("get")(get)
app.command("list")(list_runs)
app.command("logs")(logs)
app.command("cancel")(cancel)
app.command("serve", context_settings=_PASS_THROUGH)(serve)
app.command("mount", context_settings=_PASS_THROUGH)(mount)
app.command("remount", context_settings=_PASS_THROUGH)(remount)
app.command("unmount", context_settings=_PASS_THROUGH)(unmount)
app.command("status")(status)
app.command("warm")(warm)
app.command("evict")(evict)
app.command("flush")(flush)
app.command("refresh")(refresh)
app.command("ls")(ls)
app.command("cp")(cp)
app.command("rm")(rm)
app.command("mkdir")(mkdir)
app.command("doctor")(doctor)


def main() -> None:
    """Run one command and exit."""
    for name in ("stdout", "stderr"):
        # A shell may have closed it (`>&-`).
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
    try:
        app(prog_name=app.info.name)
    except CliError as error:
        print_error(error)
        sys.exit(error.exit_status)
