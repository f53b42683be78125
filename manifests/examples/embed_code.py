"""Embed each example's training code into its `trainingjob.yaml`: one file for kubectl.

    python embed_code.py [--check]

`trainingjob.yaml` is `job.yaml` (written by hand) after a ConfigMap that holds `train.py`. With
`--check` nothing is written, and the exit code says whether anything would be.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent


def render(example: Path) -> str:
    """The whole text of `trainingjob.yaml`."""
    job = (example / "job.yaml").read_text()
    name = yaml.safe_load(job)["spec"]["codeSource"]["configMap"]["name"]
    code = textwrap.indent(
        (example / "train.py").read_text(), "    ", lambda line: line.strip() != ""
    )
    return (
        "# Made by `make examples` from train.py and job.yaml beside this file: change those.\n"
        "apiVersion: v1\n"
        "kind: ConfigMap\n"
        f"metadata: {{name: {name}}}\n"
        "data:\n"
        f"  train.py: |\n{code}"
        f"---\n{job}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Embed training code into trainingjob.yaml files.")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for job in sorted(HERE.glob("*/job.yaml")):
        target, text = job.parent / "trainingjob.yaml", render(job.parent)
        if not target.exists() or target.read_text() != text:
            stale.append(str(target.relative_to(HERE)))
            if not check:
                target.write_text(text)
    for name in stale:
        print(f"{'stale' if check else 'written'}: {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
