"""A server with its life: in the calling event loop (`serving`) or in a thread of its own
(`LocalServer`).

`__main__` uses the first; tests and programs that want a server beside them the second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from trainmount_files.server.call import Api
from trainmount_files.server.faults import Fault, FaultPlan, Faults
from trainmount_files.server.grants import Callers, load_grants
from trainmount_files.server.multipart import UploadStore
from trainmount_files.server.presigned import Signer
from trainmount_files.server.resumable import ResumableStore
from trainmount_files.server.service import Service
from trainmount_files.server.settings import ServerSettings
from trainmount_files.server.staging import Staging
from trainmount_files.server.store import DirectoryStore
from trainmount_files.server.uploads import UploadFolders

__all__ = ["LocalServer", "Running", "StartError", "serving"]

_log = logging.getLogger(__name__)

_SWEEP_PERIOD_SECONDS: Final = 60.0

# A client that does not end its side of TLS is waited for this long, also at a stop.
_GOODBYE_SECONDS: Final = 0.2

# Requests in flight get this moment at a stop, then their connections are closed: clients retry.
_STOP_SECONDS: Final = 2.0

# aiohttp reads this far ahead of a slow disk; its own 64 KiB makes 16 wake-ups of a megabyte.
_READ_BUFFER_BYTES: Final = 512 * 1024


# The longest path that a disk can hold, each byte percent-encoded, and a query.
_MAX_LINE_BYTES: Final = 16 * 1024


class _WithoutRequests(logging.Filter):
    """aiohttp quotes the line for which it refuses a request: a token, or a signed URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            record.msg, record.args = "A request was refused that is no HTTP", ()
            record.exc_info = record.exc_text = None
        return True


_http_log = logging.getLogger(f"{__name__}.http")
_http_log.addFilter(_WithoutRequests())


class StartError(Exception):
    """The server cannot start; one clear line."""


class Running:
    """A server that accepts requests."""

    def __init__(self, url: str, service: Service) -> None:
        self.url = url
        self.service = service


@contextlib.asynccontextmanager
async def serving(settings: ServerSettings) -> AsyncIterator[Running]:
    """Serve for as long as the block lasts.

    Raises:
        StartError: the directory is missing or not writable, the port is taken.
        FaultError: the file of faults is malformed.
        GrantError: the file of grants is malformed.
    """
    directory = settings.directory
    if not directory.is_dir():
        raise StartError(f"{directory} is not a directory; create it or name another")
    faults = Faults(settings.faults)
    callers = Callers(settings.token, load_grants(settings.grants) if settings.grants else ())
    async with contextlib.AsyncExitStack() as stack:
        try:
            staging = Staging(directory, fsync=settings.fsync)
            stack.callback(staging.close)
            store = DirectoryStore(
                directory, staging, implicit_directories=settings.implicit_directories
            )
            stack.callback(store.close)
            for name in settings.volumes:
                store.create_volume(name)
            signer = Signer(staging.read_secret())
        except OSError as error:
            raise StartError(f"{directory} cannot be served: {error.strerror}") from None
        threads = ThreadPoolExecutor(settings.num_threads, thread_name_prefix="files-api")
        stack.callback(threads.shutdown)
        senders = ThreadPoolExecutor(settings.num_senders, thread_name_prefix="files-api-body")
        stack.callback(senders.shutdown)
        folders = UploadFolders(
            store, staging, signer, lifetime_seconds=settings.upload_lifetime_seconds
        )
        api = Api(
            settings,
            store,
            staging,
            folders,
            UploadStore(folders, store, staging, min_part_bytes=settings.min_part_bytes),
            ResumableStore(folders, store, staging),
            signer,
            threads,
            senders,
        )
        service = Service(api, callers, faults)
        url = await _listen(settings, service, stack)
        sweeper = asyncio.create_task(_sweep(api))
        stack.callback(sweeper.cancel)
        yield Running(url, service)


async def _listen(
    settings: ServerSettings, service: Service, stack: contextlib.AsyncExitStack
) -> str:
    server = web.Server(
        service.handle,
        access_log=None,
        logger=_http_log,
        read_bufsize=_READ_BUFFER_BYTES,
        max_line_size=_MAX_LINE_BYTES,
        # What a client calls compressed is a file like any other.
        auto_decompress=False,
    )
    # It waits for as long once to let requests end and once more when it has cancelled them.
    runner = web.ServerRunner(server, shutdown_timeout=_STOP_SECONDS / 2)
    await runner.setup()
    tls = _tls_context(settings)
    if tls is not None:
        stack.push_async_callback(asyncio.sleep, 2 * _GOODBYE_SECONDS)
    stack.push_async_callback(runner.cleanup)
    try:
        # Not by aiohttp's TCPSite, which cannot shorten the goodbye of TLS.
        listener = await asyncio.get_running_loop().create_server(
            server,
            settings.host,
            settings.port,
            backlog=1024,
            ssl=tls,
            ssl_shutdown_timeout=None if tls is None else _GOODBYE_SECONDS,
        )
    except OSError as error:
        place = f"{settings.host}:{settings.port}"
        reason = error.strerror or str(error)
        raise StartError(
            f"cannot listen at {place}: {reason}; choose another --port or --host"
        ) from None
    stack.callback(listener.close)
    host, port = listener.sockets[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if tls is None else 'https'}://{shown}:{port}"


def _tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # what is wrong with their content is one too
        reason = error.strerror or str(error)
        raise StartError(f"{certificate} and {key} are no certificate and key: {reason}") from None
    return context


async def _sweep(api: Api) -> None:
    while True:
        try:
            removed = await api.run(lambda: api.staging.sweep() + api.upload_folders.sweep())
            if removed:
                _log.info(
                    "Removed what dead writers and old uploads had left", extra={"count": removed}
                )
        except OSError:
            _log.warning("The staging folder could not be swept", exc_info=True)
        await asyncio.sleep(_SWEEP_PERIOD_SECONDS)


class LocalServer:
    """A server in a thread: `with LocalServer(settings) as server: … server.url`."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="files-api-server", daemon=True)
        # Written by the thread before `_started` is set, read after it.
        self._running: Running | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    @property
    def url(self) -> str:
        """What `DATABRICKS_HOST` must be."""
        return self._require().url

    def __enter__(self) -> LocalServer:
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self._thread.join()
            raise self._error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. Safe to call more than once."""
        if self._thread.is_alive() and self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):  # the loop ended by itself
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def inject(self, *faults: Fault, seed: int | None = None) -> None:
        """Put these faults in force instead of the ones before; none clears them. `seed` is of
        their probabilities.
        """
        self._require().service.faults.replace(FaultPlan(rules=faults, seed=seed))

    def statistics(self) -> dict[str, Any]:
        """See `Service.statistics`."""
        return self._require().service.statistics()

    def _require(self) -> Running:
        if self._running is None:
            raise RuntimeError("the server has not been started")
        return self._running

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with serving(self._settings) as running:
            self._running = running
            self._started.set()
            await self._stop.wait()
