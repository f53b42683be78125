"""All that is taken from Ray, and whether this Ray has it. What it does not promise to keep, the
plan's operators and the hooks of a run among them, is named here and nowhere else.
"""

from __future__ import annotations

try:
    import ray  # type: ignore[import-not-found, unused-ignore]
    from ray.data import (  # type: ignore[import-not-found, unused-ignore]
        DataContext,
        Dataset,
    )
    from ray.data._internal.execution.execution_callback import (  # type: ignore[import-not-found, unused-ignore]
        ExecutionCallback,
    )
    from ray.data._internal.logical import (  # type: ignore[import-not-found, unused-ignore]
        operators as ops,
    )
    from ray.data._internal.logical.interfaces import (  # type: ignore[import-not-found, unused-ignore]
        LogicalPlan,
    )
    from ray.data.checkpoint import (  # type: ignore[import-not-found, unused-ignore]
        CheckpointConfig,
        IdColumnCheckpointManager,
    )
    from ray.data.datasource.file_datasink import (  # type: ignore[import-not-found, unused-ignore]
        _FileDatasink as FileDatasink,
    )
    from ray.data.datasource.filename_provider import (  # type: ignore[import-not-found, unused-ignore]
        _split_base_and_ext as split_extension,
    )
    from ray.data.datasource.path_util import (  # type: ignore[import-not-found, unused-ignore]
        _unwrap_protocol as without_scheme,
    )

    # Both came with 2.60.
    ops.ListFiles, DataContext().custom_execution_callback_classes
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"this Ray Data is not the one that is known ({error}): pip install 'trainmount[ray]'"
    ) from error

__all__ = [
    "CheckpointConfig",
    "DataContext",
    "Dataset",
    "ExecutionCallback",
    "FileDatasink",
    "IdColumnCheckpointManager",
    "LogicalPlan",
    "ops",
    "ray",
    "split_extension",
    "without_scheme",
]
