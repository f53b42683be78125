"""One request from its first line to its answer: who may, which route, which fault, which error.

`embedded` and `__main__` hand it to aiohttp. Routing is a table here and not aiohttp's router,
since names of files may hold anything, and since token and fault are decided by the route before
its handler runs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final

from aiohttp import web

from trainmount_files.server import (
    directory_routes,
    file_routes,
    resumable_routes,
    upload_routes,
)
from trainmount_files.server.call import Api, Call, read_document
from trainmount_files.server.errors import (
    ApiError,
    ServerError,
    StorageError,
    disk_refusal,
    expired_url,
)
from trainmount_files.server.faults import NO_FAULT, Fault, FaultError, Faults, parse_faults
from trainmount_files.server.grants import (
    FULL_RIGHTS,
    READ_VOLUME,
    WRITE_VOLUME,
    Caller,
    Callers,
)
from trainmount_files.server.paths import VolumePath, decode_target, parse_volume_path
from trainmount_files.server.presigned import PREFIX
from trainmount_files.server.unity_catalog import UnityCatalog, is_unity_catalog

__all__ = ["Service"]

_log = logging.getLogger(__name__)

_PATH_TARGET: Final = re.compile(r"/api/([23]\.0)/fs/(files|directories)(/.*)", re.DOTALL)

# Of a request as it is written to a proxy, which a server has to take too.
_ORIGIN: Final = re.compile(r"\Ahttps?://[^/?#]*", re.IGNORECASE)

PathHandler = Callable[[Api, Call, VolumePath], Awaitable[web.StreamResponse]]
PlainHandler = Callable[[Api, Call], Awaitable[web.StreamResponse]]

_FILE_ROUTES: Final[dict[str, PathHandler]] = {
    "PUT": file_routes.put_file,
    "GET": file_routes.get_file,
    "HEAD": file_routes.head_file,
    "DELETE": file_routes.delete_file,
}
_UPLOAD_ROUTES: Final[dict[str, PathHandler]] = {
    "initiate-upload": upload_routes.initiate_upload,
    "complete-upload": upload_routes.complete_upload,
    "abort-upload": upload_routes.abort_upload,
}
_DIRECTORY_ROUTES: Final[dict[str, PathHandler]] = {
    "PUT": directory_routes.make_directory,
    "GET": directory_routes.list_directory,
    "HEAD": directory_routes.head_directory,
    "DELETE": directory_routes.remove_directory,
}
# All others change something.
_READS: Final[frozenset[PathHandler]] = frozenset(
    {
        file_routes.get_file,
        file_routes.head_file,
        directory_routes.head_directory,
        directory_routes.list_directory,
    }
)
_PLAIN_ROUTES: Final[dict[tuple[str, str], PlainHandler]] = {
    ("POST", "/api/2.0/fs/create-download-url"): file_routes.create_download_url,
    ("POST", "/api/2.0/fs/create-upload-part-urls"): upload_routes.create_upload_part_urls,
    ("POST", "/api/2.0/fs/create-abort-upload-url"): upload_routes.create_abort_upload_url,
    (
        "POST",
        "/api/2.0/fs/create-resumable-upload-url",
    ): resumable_routes.create_resumable_upload_url,
    ("GET", "/api/2.0/fs/endpoints"): file_routes.list_endpoints,
}
_PRESIGNED_ROUTES: Final = {
    ("get", "GET"): file_routes.presigned_get,
    ("put", "PUT"): upload_routes.presigned_put,
    ("abort", "DELETE"): upload_routes.presigned_abort,
    ("resume", "PUT"): resumable_routes.presigned_resumable,
    ("resume", "DELETE"): upload_routes.presigned_abort,
}


class Service:
    """The handler of one server. Runs on its event loop; `statistics` may be read from any
    thread.
    """

    def __init__(self, api: Api, callers: Callers, faults: Faults) -> None:
        self._api = api
        self._callers = callers
        self.faults = faults
        self._counts: Counter[str] = Counter()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; never raises."""
        response = await self._answer(request)
        if "Transfer-Encoding" in request.headers:
            # aiohttp takes the trailers of a body for headers of the connection's next request.
            response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        target = _ORIGIN.sub("", request.raw_path).partition("?")[0]
        try:
            return await self._dispatch(request, target)
        except ServerError as error:
            return _refuse(request, target, error)
        except ConnectionError:
            # Nobody is left to answer; raised, aiohttp would log it as a failure of the server.
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=499)
        except Exception as error:
            refusal = disk_refusal(error) if isinstance(error, OSError) else None
            return _refuse(request, target, refusal or self._unplanned(request, target))

    def statistics(self) -> dict[str, Any]:
        """Requests by route, uploads that are open and the bytes they and bodies in flight hold.
        Blocking.
        """
        return {
            "requests": dict(self._counts),
            "open_uploads": self._api.upload_folders.count_open(),
            "staged_bytes": self._api.staging.staged_bytes(),
        }

    async def _dispatch(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        if target.startswith(PREFIX):
            return await self._presigned(request, target)
        if target == "/.well-known/databricks-config":
            # Asked by every SDK at start, without a token; nothing to discover.
            return web.json_response({})
        caller = self._authenticate(request)
        if match := _PATH_TARGET.fullmatch(target):
            version, kind, raw_path = match.groups()
            handler = _path_route(request, kind)
            path = parse_volume_path(decode_target(raw_path))
            privilege = READ_VOLUME if handler in _READS else WRITE_VOLUME
            caller.require(privilege, path.volume_names)
            return await self._run(
                handler.__name__,
                str(path),
                functools.partial(Call, request, caller=caller, version=version),
                lambda call: handler(self._api, call, path),
            )
        plain = _PLAIN_ROUTES.get((request.method, target))
        if plain is not None:
            make_call = functools.partial(Call, request, caller=caller)
            return await self._run(
                plain.__name__, target, make_call, lambda call: plain(self._api, call)
            )
        if target.startswith("/admin/") and self._api.settings.admin:
            return await self._admin(request, target, caller)
        if is_unity_catalog(target):
            return await self._unity_catalog(request, target, caller)
        raise _no_route(request)

    async def _presigned(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        if "Authorization" in request.headers:
            # As object stores do: a client that sends the token along has leaked it.
            message = "Only one auth mechanism allowed: the signature of the URL."
            raise StorageError(400, "InvalidArgument", message)
        claims = self._api.signer.verify(decode_target(target))
        handler = _PRESIGNED_ROUTES.get((claims.action, request.method))
        if handler is None:
            raise StorageError(
                403, "SignatureDoesNotMatch", "The URL was signed for another method."
            )
        path = claims.target if claims.action == "get" else ""
        make_call = functools.partial(Call, request, caller=FULL_RIGHTS)
        return await self._run(
            handler.__name__, path, make_call, lambda call: handler(self._api, call, claims)
        )

    async def _unity_catalog(
        self, request: web.BaseRequest, target: str, caller: Caller
    ) -> web.StreamResponse:
        catalog = UnityCatalog(self._api.store, self._callers)

        async def answer(_call: Call) -> web.StreamResponse:
            document = await self._api.run(
                catalog.answer, caller, request.method, target, request.query
            )
            if document is None:
                raise _no_route(request)
            return web.json_response(document)

        make_call = functools.partial(Call, request, caller=caller)
        return await self._run("unity_catalog", target, make_call, answer)

    async def _run(
        self,
        route: str,
        path: str,
        make_call: Callable[..., Call],
        answer: Callable[[Call], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Call a route, or what its fault makes of it."""
        self._counts[route] += 1
        fault = self.faults.take(route, path)
        call = make_call(fault=fault)
        request = call.request
        if fault is NO_FAULT:
            await _continue(request)
            return await answer(call)
        if fault.latency_ms:
            await asyncio.sleep(fault.latency_ms / 1000)
        if fault.expired_url:
            raise expired_url(fault.expired_code)
        if fault.status is not None and not fault.lose_reply:
            return _injected(request, fault)
        await _continue(request)
        response = await answer(call)
        if not fault.lose_reply:
            return response
        if fault.status is not None:
            return _injected(request, fault)
        if request.transport is not None:
            request.transport.close()
        raise ConnectionResetError("the reply was lost by a fault")

    async def _admin(
        self, request: web.BaseRequest, target: str, caller: Caller
    ) -> web.StreamResponse:
        if not caller.is_admin:
            message = f"User '{caller.user}' may not use the admin routes."
            raise ApiError(403, "PERMISSION_DENIED", message)
        if (request.method, target) == ("GET", "/admin/statistics"):
            return web.json_response(await self._api.run(self.statistics))
        if (request.method, target) == ("PUT", "/admin/faults"):
            try:
                self.faults.replace(parse_faults(await read_document(request)))
            except FaultError as error:
                raise ApiError(400, "INVALID_PARAMETER_VALUE", str(error)) from None
            return web.json_response({})
        raise _no_route(request)

    def _authenticate(self, request: web.BaseRequest) -> Caller:
        given = request.headers.get("Authorization", "")
        scheme, _, token = given.partition(" ")
        caller = self._callers.find(token) if scheme.lower() == "bearer" and token else None
        if caller is None:
            message = "The token is not valid." if given else "The token is missing."
            raise ApiError(401, "UNAUTHENTICATED", message)
        return caller

    def _unplanned(self, request: web.BaseRequest, target: str) -> ApiError:
        # The path of a presigned URL is a credential.
        shown = PREFIX + "…" if target.startswith(PREFIX) else target
        _log.exception("Request failed", extra={"method": request.method, "path": shown})
        return ApiError(500, "INTERNAL_ERROR", "The server failed; its log says why.")


def _path_route(request: web.BaseRequest, kind: str) -> PathHandler:
    method, query = request.method, request.query
    if kind == "directories":
        handler = _DIRECTORY_ROUTES.get(method)
    elif method == "POST":
        handler = _UPLOAD_ROUTES.get(query.get("action", ""))
    elif method == "PUT" and "part_number" in query:
        handler = upload_routes.put_part
    else:
        handler = _FILE_ROUTES.get(method)
    if handler is None:
        raise _no_route(request)
    return handler


def _no_route(request: web.BaseRequest) -> ApiError:
    message = f"No API found for '{request.method} {request.raw_path.partition('?')[0]}'"
    return ApiError(404, "ENDPOINT_NOT_FOUND", message)


def _refuse(request: web.BaseRequest, target: str, error: ServerError) -> web.Response:
    headers = error.headers if isinstance(error, ApiError) else {}
    if request.method == "HEAD" or error.status == 304:
        return web.Response(status=error.status, headers=headers)
    if isinstance(error, ApiError) and not target.startswith(PREFIX):
        return web.json_response(error.to_json(), status=error.status, headers=headers)
    text = StorageError.of(error).to_xml()
    return web.Response(
        status=error.status, headers=headers, text=text, content_type="application/xml"
    )


def _injected(request: web.BaseRequest, fault: Fault) -> web.Response:
    assert fault.status is not None
    headers = {"Retry-After": fault.retry_after} if fault.retry_after else None
    code = fault.error_code or {429: "RESOURCE_EXHAUSTED", 503: "TEMPORARILY_UNAVAILABLE"}.get(
        fault.status, "INTERNAL_ERROR" if fault.status >= 500 else "BAD_REQUEST"
    )
    return _refuse(request, "", ApiError(fault.status, code, "Injected fault.", headers=headers))


async def _continue(request: web.BaseRequest) -> None:
    """Let a client that asked first send its body; after this point the request has a taker."""
    if (
        request.headers.get("Expect", "").lower() == "100-continue"
        and request.transport is not None
    ):
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
