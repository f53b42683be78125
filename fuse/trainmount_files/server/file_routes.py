"""The verbs of files, and the download by a presigned URL; called by `service`."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from trainmount_files.server.bodies import file_headers, send_file, store_body
from trainmount_files.server.call import Api, Call, empty
from trainmount_files.server.conditions import FileInfo
from trainmount_files.server.endpoints import describe_endpoints
from trainmount_files.server.errors import ApiError, StorageError, invalid
from trainmount_files.server.grants import READ_VOLUME
from trainmount_files.server.paths import VolumePath, parse_volume_path
from trainmount_files.server.presigned import Claims, parse_expire_time
from trainmount_files.server.staging import Temporary

__all__ = [
    "create_download_url",
    "delete_file",
    "get_file",
    "head_file",
    "list_endpoints",
    "presigned_get",
    "put_file",
]


async def put_file(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    overwrite, conditions = call.overwrite(), call.conditions

    def admit() -> None:
        api.store.require_writable(path, overwrite=overwrite, conditions=conditions)

    def finish(temporary: Temporary) -> FileInfo:
        return api.store.publish(temporary, path, overwrite=overwrite, conditions=(conditions,))

    # The pruning of implicit directories has a lock that is held for longer.
    at_once = not api.settings.implicit_directories
    info = await store_body(api, call, finish, admit=admit, at_once=at_once)
    return empty(headers=call.validators(info.etag))


async def get_file(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    fd, info = await api.run_cached(api.store.open_file, path)
    return await send_file(api, call, fd, info, str(path))


async def head_file(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    info = await api.run_cached(api.store.stat_file, path)
    call.conditions.require_read(info, str(path))
    headers = file_headers(call, info) | {"Content-Length": str(info.size_bytes)}
    return web.Response(headers=headers)


async def delete_file(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    vanish = call.fault.vanish_parents
    await api.run(api.store.delete_file, path, call.conditions, vanish=vanish)
    return empty()


async def create_download_url(api: Api, call: Call) -> web.StreamResponse:
    text = call.request.query.get("path")
    if not text:
        raise invalid("path must be given")
    path = parse_volume_path(text)
    call.caller.require(READ_VOLUME, path.volume_names)
    await api.run_cached(api.store.stat_file, path)
    expires_at = parse_expire_time(
        call.request.query.get("expire_time"), api.settings.max_url_lifetime_seconds
    )
    url = api.signer.sign(Claims("get", str(path)), expires_at)
    return web.json_response({"url": call.base_url + quote(url), "headers": []})


async def list_endpoints(api: Api, call: Call) -> web.StreamResponse:
    settings = api.settings
    document = describe_endpoints(
        settings.endpoints,
        scheme=call.request.scheme,
        host=call.host,
        resumable=settings.resumable,
    )
    return web.json_response(document)


async def presigned_get(api: Api, call: Call, claims: Claims) -> web.StreamResponse:
    path = parse_volume_path(claims.target)
    try:
        fd, info = await api.run_cached(api.store.open_file, path)
        return await send_file(api, call, fd, info, str(path))
    except ApiError as error:
        raise _as_storage_error(error) from None


def _as_storage_error(error: ApiError) -> StorageError:
    codes = {404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange"}
    return StorageError(error.status, codes.get(error.status, "InvalidRequest"), error.message)
