"""What every route gets: the request, the fault that goes with it, and the parts of the server it
may use.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from aiohttp import ClientError, web
from aiohttp.http_exceptions import HttpProcessingError

from trainmount_files.server.conditions import Conditions
from trainmount_files.server.errors import ApiError, invalid
from trainmount_files.server.faults import Fault
from trainmount_files.server.grants import Caller
from trainmount_files.server.multipart import UploadStore
from trainmount_files.server.presigned import Signer
from trainmount_files.server.resumable import ResumableStore
from trainmount_files.server.settings import ServerSettings
from trainmount_files.server.staging import Staging
from trainmount_files.server.store import DirectoryStore
from trainmount_files.server.uploads import UploadFolders
from trainmount_files.volume import MIB

__all__ = ["Api", "Call", "empty", "read_document", "read_json"]

P = ParamSpec("P")
T = TypeVar("T")

# Files API 3.0 documents these.
_MAX_PUT_BYTES_V3 = 5000 * MIB
_MAX_PART_BYTES_V3 = 4000 * MIB

# A complete with 10,000 parts is half a megabyte.
_MAX_JSON_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Api:
    """The server's parts; one for its life."""

    settings: ServerSettings
    store: DirectoryStore
    staging: Staging
    upload_folders: UploadFolders
    uploads: UploadStore
    resumables: ResumableStore
    signer: Signer
    threads: ThreadPoolExecutor
    senders: ThreadPoolExecutor
    """For bodies alone, so that downloads never keep a small request waiting for a thread."""

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call something that touches the disk, off the event loop.

        When it returns or raises, the call is over, also after a cancellation: descriptors that it
        was given may be closed.
        """
        call = functools.partial(function, *args, **kwargs)
        future = asyncio.get_running_loop().run_in_executor(self.threads, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def run_cached(self, function: Callable[..., T], *args: Any) -> T:
        """Call something that with `cached=True` answers at once or raises: here if it can, off the
        event loop with `cached` left out if it cannot.
        """
        try:
            return function(*args, cached=True)
        except (OSError, ApiError):
            # Also where nothing is found: only the slow way is certain of that.
            return await self.run(function, *args)


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way."""

    request: web.BaseRequest
    fault: Fault

    caller: Caller
    """Whose token came along."""

    version: str = "2.0"
    """Of the Files API, by the prefix of the URL."""

    @property
    def base_url(self) -> str:
        """As the client sees this server, so that signed URLs work through names and forwarded
        ports.
        """
        return f"{self.request.scheme}://{self.host}"

    @property
    def host(self) -> str:
        """With its port."""
        transport = self.request.transport
        if "Host" in self.request.headers or transport is None:
            return self.request.host
        # HTTP/1.0. Not aiohttp's answer, which asks the name server, from the event loop.
        address, port = transport.get_extra_info("sockname")[:2]
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    @property
    def is_encrypted(self) -> bool:
        """Whether bytes that go to the socket directly would be no TLS."""
        transport = self.request.transport
        return transport is not None and transport.get_extra_info("sslcontext") is not None

    @property
    def conditions(self) -> Conditions:
        return Conditions.of_headers(self.request.headers, version=self.version)

    def max_body_bytes(self, settings: ServerSettings) -> int:
        """The limit of one request's body: a file in one piece, or a part."""
        if self.version == "2.0":
            return settings.max_put_bytes
        is_part = "part_number" in self.request.query
        return min(settings.max_put_bytes, _MAX_PART_BYTES_V3 if is_part else _MAX_PUT_BYTES_V3)

    def validators(self, etag: str) -> dict[str, str]:
        """The headers that tell a version; 2.0 has none but `Last-Modified`."""
        return {} if self.version == "2.0" else {"ETag": etag}

    def overwrite(self) -> bool:
        """The `overwrite` parameter; absent means true."""
        value = self.request.query.get("overwrite", "true").lower()
        if value not in ("true", "false"):
            raise invalid(f"overwrite must be true or false, got {value}")
        return value == "true"


def empty(status: int = 204, *, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, headers=headers)


async def read_json(request: web.BaseRequest) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError."""
    document = await read_document(request)
    if not isinstance(document, dict):
        raise invalid("The body must be a JSON object.")
    return document


async def read_document(request: web.BaseRequest) -> Any:
    """The body as JSON of any kind; an empty one is an empty object. Raises ApiError."""
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > _MAX_JSON_BYTES:
                raise invalid(f"The body must be at most {_MAX_JSON_BYTES} bytes of JSON.")
        return json.loads(body or b"{}")
    except (ClientError, HttpProcessingError):
        raise invalid("The body of the request broke off.") from None
    except (ValueError, RecursionError):
        raise invalid("The body must be JSON.") from None
