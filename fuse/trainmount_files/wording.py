"""How sizes, counts, names and mistakes in arguments read to a person, the same in every command
line.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

__all__ = ["OneLineParser", "files_text", "printable", "size_text"]


class OneLineParser(argparse.ArgumentParser):
    """A parser of arguments that says one line of a mistake, with exit status 2: the usage of a
    command with many options is longer than a screen.
    """

    def error(self, message: str) -> NoReturn:
        line = printable(f"{message}; see {self.prog} --help")
        self.exit(2, f"{self.prog.partition(' ')[0]}: {line}\n")


def files_text(count: int) -> str:
    """`1 file`, `12,345 files`."""
    return "1 file" if count == 1 else f"{count:,} files"


def size_text(num_bytes: int) -> str:
    """In powers of 1,000 with one digit behind the point: `999 B`, `1.5 kB`."""
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def printable(name: str) -> str:
    """A name in which nothing acts on a terminal: control and lone surrogate characters escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in name
    )
