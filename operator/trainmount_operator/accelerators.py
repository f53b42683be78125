"""What an accelerator type means: how many a node has, and which resource a pod asks for.

Called by `spec` while it reads `compute`. The names are those of the AI Runtime workload file, so
that a file written for it keeps its meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["ACCELERATOR_TYPES", "DEFAULT_RESOURCE_NAME", "AcceleratorType"]

DEFAULT_RESOURCE_NAME: Final = "nvidia.com/gpu"


@dataclass(frozen=True, kw_only=True)
class AcceleratorType:
    """One shape of node."""

    name: str
    """As it stands in `compute.acceleratorType`; case matters."""

    per_node: int
    """Accelerators of one node, which is what every pod of the job asks for."""

    resource_name: str = DEFAULT_RESOURCE_NAME
    """The extended resource under which a device plugin announces them."""


ACCELERATOR_TYPES: Final = {
    kind.name: kind
    for kind in (
        AcceleratorType(name="GPU_1xA10", per_node=1),
        AcceleratorType(name="GPU_1xH100", per_node=1),
        AcceleratorType(name="GPU_8xH100", per_node=8),
        AcceleratorType(name="GPU_8xB300", per_node=8),
    )
}
