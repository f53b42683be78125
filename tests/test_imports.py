"""Import hygiene: what a package drags in when it is imported, each in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = frozenset(
    {"torch", "kopf", "kubernetes", "pyfuse3", "grpc", "aiohttp", "trio", "numpy", "databricks"}
)


def imported_by(statement: str) -> set[str]:
    """The heavy top-level packages that `statement` loads."""
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return HEAVY & {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("trainmount_files", set()),
        ("trainmount", set()),
        ("trainmount.run", set()),
        ("trainmount_operator.spec", set()),
        ("trainmount_operator.plan", set()),
        ("trainmount_cli.app", set()),
        ("trainmount_fuse.filesystem", {"trio"}),
        ("trainmount_fuse.session.handover", set()),
        ("trainmount_csi.target_path", set()),
        ("trainmount_files.server", {"aiohttp"}),
    ],
)
def test_a_module_drags_in_no_more_than_its_part_needs(module: str, allowed: set[str]) -> None:
    assert imported_by(f"import {module}") <= allowed


def test_the_runtime_never_loads_what_a_training_pod_lacks() -> None:
    assert imported_by("import trainmount.data, trainmount.checkpoint") <= {"torch", "numpy"}
