"""The verbs of directories; called by `service`."""

from __future__ import annotations

from aiohttp import web

from trainmount_files.server.call import Api, Call, empty
from trainmount_files.server.errors import directory_not_found
from trainmount_files.server.listing import list_directory_page, parse_page_size
from trainmount_files.server.paths import VolumePath

__all__ = ["head_directory", "list_directory", "make_directory", "remove_directory"]


async def make_directory(api: Api, _call: Call, path: VolumePath) -> web.StreamResponse:
    await api.run(api.store.make_directory, path)
    return empty()


async def head_directory(api: Api, _call: Call, path: VolumePath) -> web.StreamResponse:
    if not await api.run_cached(api.store.is_directory, path):
        raise directory_not_found(str(path))
    return empty(200)


async def list_directory(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    query = call.request.query
    size = parse_page_size(query.get("page_size"))
    page = await api.run(list_directory_page, api.store, path, query.get("page_token"), size)
    return web.json_response(text=page)


async def remove_directory(api: Api, call: Call, path: VolumePath) -> web.StreamResponse:
    await api.run(api.store.remove_directory, path, vanish=call.fault.vanish_parents)
    return empty()
