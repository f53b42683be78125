"""The embedded default: a training job on this machine, with the local Files API server, real
mounts and one process group a node.

A run is a folder (`store`). The command line prepares it (`launch`) and starts its supervisor
(`supervisor`), which makes the run's namespaces and becomes the parent of the run's first process
(`agent`); that one keeps the server and the mounts (`services`) and runs attempts (`gang`). Whoever
watches only reads the folder (`follow`).
"""

from __future__ import annotations

__all__: list[str] = []
