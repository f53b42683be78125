"""The verbs of uploads in parts: on the API's host, on presigned URLs, and as older SDKs spell
them; called by `service`.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

from aiohttp import web

from trainmount_files.server.bodies import store_body
from trainmount_files.server.call import Api, Call, empty, read_json
from trainmount_files.server.errors import ApiError, StorageError, invalid
from trainmount_files.server.grants import WRITE_VOLUME
from trainmount_files.server.multipart import MAX_PARTS, Part
from trainmount_files.server.paths import VolumePath, parse_volume_path
from trainmount_files.server.presigned import Claims, parse_expire_time
from trainmount_files.server.staging import Temporary
from trainmount_files.server.uploads import MULTIPART, RESUMABLE

__all__ = [
    "abort_upload",
    "complete_upload",
    "create_abort_upload_url",
    "create_upload_part_urls",
    "initiate_upload",
    "parse_path_and_token",
    "presigned_abort",
    "presigned_put",
    "put_part",
]

# One call hands out no more, so that an answer stays below a megabyte.
_MAX_URLS: Final = 1000


_DIGITS: Final = re.compile(r"[0-9]{1,9}")


async def initiate_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    overwrite, conditions = call.overwrite(), call.conditions
    await api.run(api.store.require_writable, path, overwrite=overwrite, conditions=conditions)
    is_resumable = api.settings.resumable and call.version == "2.0"
    kind = RESUMABLE if is_resumable else MULTIPART
    token = await api.run(
        api.upload_folders.initiate, path, overwrite=overwrite, kind=kind, conditions=conditions
    )
    if call.version != "2.0":
        return web.json_response({"upload_id": token})
    return web.json_response({f"{kind}_upload": {"session_token": token}})


async def create_upload_part_urls(api: Api, call: Call) -> web.StreamResponse:
    body = await read_json(call.request)
    path, token = parse_path_and_token(body)
    call.caller.require(WRITE_VOLUME, path.volume_names)
    first = _whole_number(body, "start_part_number", 1, MAX_PARTS)
    count = min(_whole_number(body, "count", 1, MAX_PARTS), _MAX_URLS, MAX_PARTS - first + 1)
    expires_at = parse_expire_time(body.get("expire_time"), api.settings.max_url_lifetime_seconds)
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
    path, token = parse_path_and_token(body)
    call.caller.require(WRITE_VOLUME, path.volume_names)
    await api.run(api.upload_folders.require_open, token, path, None)
    expires_at = parse_expire_time(body.get("expire_time"), api.settings.max_url_lifetime_seconds)
    url = _url(api, call, Claims("abort", token), expires_at)
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
    await api.run(api.upload_folders.abort, claims.target, None)
    return empty(200)


async def complete_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    parts = _parse_parts(await read_json(call.request))
    etag = await api.run(api.uploads.complete, _token(call), path, parts, call.conditions)
    return web.json_response({}, headers=call.validators(etag))


async def abort_upload(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    await api.run(api.upload_folders.abort, _token(call), path)
    return web.json_response({})


async def _store_part(api: Api, call: Call, token: str, number: int) -> web.StreamResponse:
    def finish(temporary: Temporary) -> str:
        return api.uploads.put_part(token, number, temporary)

    def admit() -> None:
        api.upload_folders.require_open(token, None, MULTIPART)

    etag = await store_body(api, call, finish, admit=admit)
    return web.Response(headers={"ETag": f'"{etag}"'})


def _url(api: Api, call: Call, claims: Claims, expires_at: float) -> str:
    return call.base_url + quote(api.signer.sign(claims, expires_at))


def _token(call: Call) -> str:
    if call.version != "2.0":
        return _required(call, "upload_id")
    kind = call.request.query.get("upload_type", "multipart")
    if kind != "multipart":
        raise invalid(f"upload_type must be multipart, got {kind}")
    return _required(call, "session_token")


def _required(call: Call, name: str) -> str:
    value = call.request.query.get(name)
    if not value:
        raise invalid(f"{name} must be given")
    return value


def parse_path_and_token(body: dict[str, Any]) -> tuple[VolumePath, str]:
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
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        value = int(value)
    if type(value) is not int or not minimum <= value <= maximum:
        raise invalid(
            f"{name} must be a whole number from {minimum} to {maximum}, got {value!r:.100}"
        )
    return value
