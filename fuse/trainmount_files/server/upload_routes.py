"""The verbs of uploads in parts: on the API's host, on presigned URLs, and as older SDKs spell
them; called by `service`.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from trainmount_files.server.bodies import store_body
from trainmount_files.server.call import Api, Call, empty, read_json
from trainmount_files.server.errors import ApiError, StorageError, already_exists, invalid
from trainmount_files.server.multipart import MAX_PARTS, Part
from trainmount_files.server.paths import VolumePath, parse_volume_path
from trainmount_files.server.presigned import Claims, parse_expire_time
from trainmount_files.server.staging import Temporary

__all__ = [
    "abort_upload",
    "complete_upload",
    "create_abort_upload_url",
    "create_upload_part_urls",
    "initiate_upload",
    "presigned_abort",
    "presigned_put",
    "put_part",
]

# One call hands out no more, so that an answer stays below a megabyte.
_MAX_URLS: Final = 1000


async def initiate_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    overwrite = call.overwrite()
    if not overwrite and await api.run(api.store.exists, path):
        raise already_exists(str(path))
    token = await api.run(api.uploads.initiate, path, overwrite=overwrite)
    return web.json_response({"multipart_upload": {"session_token": token}})


async def create_upload_part_urls(api: Api, call: Call) -> web.StreamResponse:
    body = await read_json(call.request)
    path, token = _path_and_token(body)
    first = _whole_number(body, "start_part_number", 1, MAX_PARTS)
    count = min(_whole_number(body, "count", 1, MAX_PARTS), _MAX_URLS, MAX_PARTS - first + 1)
    expires_at = parse_expire_time(body.get("expire_time"))
    await api.run(api.uploads.require_open, token, path)
    urls = [
        {
            "part_number": number,
            "url": _url(api, call, Claims("put", token, number), expires_at),
            "headers": [],
        }
        for number in range(first, first + count)
    ]
    return web.json_response({"upload_part_urls": urls})


async def create_abort_upload_url(api: Api, call: Call) -> web.StreamResponse:
    body = await read_json(call.request)
    path, token = _path_and_token(body)
    await api.run(api.uploads.require_open, token, path)
    url = _url(api, call, Claims("abort", token), parse_expire_time(body.get("expire_time")))
    return web.json_response({"abort_upload_url": {"url": url, "headers": []}})


async def put_part(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    """A part on the API's own host, for clients that may not reach presigned URLs."""
    token = _token(call)
    number = _whole_number(call.request.query, "part_number", 1, MAX_PARTS)
    await api.run(api.uploads.require_open, token, path)
    return await _store_part(api, call, token, number)


async def presigned_put(api: Api, call: Call, claims: Claims) -> web.StreamResponse:
    try:
        return await _store_part(api, call, claims.target, claims.part_number)
    except ApiError as error:
        codes = {404: "NoSuchUpload", 413: "EntityTooLarge"}
        raise StorageError(
            error.status, codes.get(error.status, "InvalidRequest"), error.message
        ) from None


async def presigned_abort(api: Api, _call: Call, claims: Claims) -> web.StreamResponse:
    await api.run(api.uploads.abort, claims.target, None)
    return empty(200)


async def complete_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    parts = _parse_parts(await read_json(call.request))
    await api.run(api.uploads.complete, _token(call), path, parts)
    return web.json_response({})


async def abort_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    await api.run(api.uploads.abort, _token(call), path)
    return web.json_response({})


async def _store_part(api: Api, call: Call, token: str, number: int) -> web.StreamResponse:
    def finish(temporary: Temporary) -> str:
        return api.uploads.put_part(token, number, temporary)

    etag = await store_body(api, call, api.staging.new_temporary, finish)
    return web.Response(headers={"ETag": f'"{etag}"'})


def _url(api: Api, call: Call, claims: Claims, expires_at: float) -> str:
    return call.base_url + quote(api.signer.sign(claims, expires_at))


def _token(call: Call) -> str:
    kind = call.request.query.get("upload_type", "multipart")
    if kind != "multipart":
        raise invalid(f"upload_type must be multipart, got {kind}")
    token = call.request.query.get("session_token")
    if not token:
        raise invalid("session_token must be given")
    return token


def _path_and_token(body: dict[str, Any]) -> tuple[VolumePath, str]:
    path, token = body.get("path"), body.get("session_token")
    if not isinstance(path, str) or not isinstance(token, str):
        raise invalid("path and session_token must be given as text")
    return parse_volume_path(path), token


def _parse_parts(body: dict[str, Any]) -> list[Part]:
    parts = body.get("parts")
    if not isinstance(parts, list):
        raise invalid("parts must be a list")
    return [_parse_part(part) for part in parts]


def _parse_part(part: Any) -> Part:
    if not isinstance(part, dict) or not isinstance(part.get("etag"), str):
        raise invalid("each of parts must have a part_number and an etag")
    return Part(_whole_number(part, "part_number", 1, MAX_PARTS), part["etag"].strip('"'))


def _whole_number(source: Any, name: str, minimum: int, maximum: int) -> int:
    value = source.get(name)
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = minimum - 1
    if isinstance(value, bool | float) or not minimum <= number <= maximum:
        raise invalid(f"{name} must be a whole number from {minimum} to {maximum}, got {value}")
    return number
