"""The local Files API server: the wire of Databricks volumes over a directory.

`trainmount serve`, `python -m trainmount_files.server` and `trainmount run --local` start it; any
Databricks SDK, the databricks command line and this project's own client talk to it.

Hops of a request: `service` (who may, by `grants`; which route; which fault) -> `file_routes`,
`directory_routes`, `upload_routes`, `resumable_routes`, `unity_catalog` -> `store`, `multipart`,
`resumable` (both in the folders of `uploads`) -> `resolution` (names to descriptors, never outside
of the directory).
"""

from __future__ import annotations

try:
    import aiohttp  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "the local server needs aiohttp: pip install 'trainmount[server]'", name="aiohttp"
    ) from None

from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings

__all__ = ["LocalServer", "ServerSettings"]
