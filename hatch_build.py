"""Generates the gRPC messages and stubs of `trainmount_csi.wire` from its .proto files.

Called by hatchling for every wheel and every editable install. What it writes is not in git.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from grpc_tools import protoc
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WIRE = Path("trainmount_csi/wire")


class WireBuildHook(BuildHookInterface):
    """Runs protoc in place, so that the same files serve a wheel and an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        generate(Path(self.root) / "fuse")
        build_data["artifacts"].append(f"/fuse/{WIRE}/*_pb2*")


def generate(source_root: Path) -> None:
    """Write `*_pb2.py`, `*_pb2.pyi` and `*_pb2_grpc.py` beside each .proto file.

    Raises:
        RuntimeError: protoc refused a file; it has printed which line.
    """
    # Relative to the import root, because the generated modules import each other by these paths.
    protos = sorted(
        str(path.relative_to(source_root)) for path in (source_root / WIRE).glob("*.proto")
    )
    well_known_types = files("grpc_tools") / "_proto"
    status = protoc.main(
        [
            "protoc",
            f"-I{source_root}",
            f"-I{well_known_types}",
            f"--python_out={source_root}",
            f"--pyi_out={source_root}",
            f"--grpc_python_out={source_root}",
            *protos,
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status} on {', '.join(protos)}")
