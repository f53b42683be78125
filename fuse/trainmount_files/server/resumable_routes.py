"""The verbs of resumable uploads; called by `service`."""

from __future__ import annotations

from urllib.parse import quote

from aiohttp import web

from trainmount_files.server.bodies import receive
from trainmount_files.server.call import Api, Call, read_json
from trainmount_files.server.errors import ApiError, StorageError
from trainmount_files.server.grants import WRITE_VOLUME
from trainmount_files.server.presigned import Claims, parse_expire_time
from trainmount_files.server.resumable import ContentRange, Progress, parse_content_range
from trainmount_files.server.upload_routes import parse_path_and_token
from trainmount_files.server.uploads import RESUMABLE

__all__ = ["create_resumable_upload_url", "presigned_resumable"]

_CODES = {404: "NoSuchUpload", 413: "EntityTooLarge"}


async def create_resumable_upload_url(api: Api, call: Call) -> web.StreamResponse:
    body = await read_json(call.request)
    path, token = parse_path_and_token(body)
    call.caller.require(WRITE_VOLUME, path.volume_names)
    await api.run(api.upload_folders.require_open, token, path, RESUMABLE)
    expires_at = parse_expire_time(body.get("expire_time"), api.settings.max_url_lifetime_seconds)
    url = call.base_url + quote(api.signer.sign(Claims("resume", token), expires_at))
    return web.json_response({"resumable_upload_url": {"url": url, "headers": []}})


async def presigned_resumable(api: Api, call: Call, claims: Claims) -> web.StreamResponse:
    """A chunk: 308 with `Range` while more is to come, 200 for the last one."""
    request = call.request
    try:
        place = parse_content_range(request.headers.get("Content-Range"), request.content_length)
        progress = await _append(api, call, claims.target, place)
    except ApiError as error:
        if error.status == 409:
            # The store's word for "made meanwhile": the upload is for a path with no file.
            message = "At least one of the pre-conditions you specified did not hold."
            raise StorageError(412, "PreconditionFailed", message) from None
        code = _CODES.get(error.status, "InvalidRequest")
        raise StorageError(error.status, code, error.message) from None
    if progress.etag is not None:
        return web.Response(headers={"ETag": progress.etag})
    stored = progress.stored_bytes
    return web.Response(status=308, headers={"Range": f"bytes=0-{stored - 1}"} if stored else None)


async def _append(api: Api, call: Call, token: str, place: ContentRange) -> Progress:
    if place.is_empty:
        return await api.run(api.resumables.append, token, None, place)
    temporary = await api.run(api.staging.new_temporary)
    try:
        try:
            await receive(api, call, temporary)
        except (ApiError, ConnectionError):
            # What came of a chunk that broke off is kept: the client asks how much that is.
            part = ContentRange(place.start, place.end, False, None)
            await api.run(api.resumables.append, token, temporary, part)
            raise
        return await api.run(api.resumables.append, token, temporary, place)
    finally:
        temporary.discard()
