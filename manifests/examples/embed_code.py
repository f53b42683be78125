"""Embed each example's code into its manifests: one file is then all that kubectl needs.

    python embed_code.py [--check]

`X.yaml` is made from `X.in.yaml`, in which a line that is only `@name@` stands for the file of that
name beside it, indented as the line is. With `--check` nothing is written, and the exit code says
whether anything would be.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parent


def render(template: Path) -> str:
    """The whole text of the manifest."""

    def embedded(place: re.Match[str]) -> str:
        return textwrap.indent((template.parent / place[2]).read_text(), place[1])

    sources = re.sub(r"^( *)@([\w.]+)@\n", embedded, template.read_text(), flags=re.MULTILINE)
    return f"# Made by `make examples` from {template.name} and what it names.\n{sources}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Embed code into the examples' manifests.")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for template in sorted(HERE.glob("*/*.in.yaml")):
        target, text = Path(str(template).replace(".in.yaml", ".yaml")), render(template)
        if not target.exists() or target.read_text() != text:
            stale.append(str(target.relative_to(HERE)))
            if not check:
                target.write_text(text)
    for name in stale:
        print(f"{'stale' if check else 'written'}: {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
