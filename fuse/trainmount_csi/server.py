"""The gRPC server over a Unix socket, and what every call has in common: logging and errors. Called
by main."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from trainmount_csi.errors import CsiError
from trainmount_csi.redaction import log_safe
from trainmount_csi.wire import csi_pb2_grpc, registration_pb2_grpc

__all__ = ["EndpointError", "Server", "socket_path"]

logger = logging.getLogger(__name__)

_MAX_PATH_BYTES: Final = 107
"""Of a Unix socket, on Linux."""

MAX_THREADS: Final = 64
"""A publish may wait for a daemon for a minute and more; other pods' calls must not wait behind it.
"""

# The generated functions have no annotations.
_ADD: Final[dict[str, Callable[[Any, grpc.Server], None]]] = {
    "csi.v1.Identity": csi_pb2_grpc.add_IdentityServicer_to_server,
    "csi.v1.Controller": csi_pb2_grpc.add_ControllerServicer_to_server,
    "csi.v1.Node": csi_pb2_grpc.add_NodeServicer_to_server,
    "pluginregistration.Registration": registration_pb2_grpc.add_RegistrationServicer_to_server,
}


class EndpointError(Exception):
    """Nothing can listen at the endpoint; `str()` is one line for a person."""


class Server:
    """Services at one Unix socket."""

    def __init__(self, path: Path, services: dict[str, object]) -> None:
        """`services` are servicers by the full name of their service."""
        self._path = path
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="grpc")
        self._server = grpc.server(self._threads, interceptors=[_Boundary()])
        for name, servicer in services.items():
            _ADD[name](servicer, self._server)

    def start(self) -> None:
        """Listen. A socket that an earlier process left is replaced; one that answers is not.

        Raises:
            EndpointError: another process listens there, or the folder cannot be used.
        """
        try:
            self._path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            _remove_stale(self._path)
            self._server.add_insecure_port(f"unix:{self._path}")
        except (OSError, RuntimeError) as error:
            raise EndpointError(f"cannot listen at {self._path}: {error}") from error
        # Whoever may call can have any volume mounted.
        self._path.chmod(0o600)
        self._server.start()

    def stop(self, grace_seconds: float) -> None:
        """Take no more calls, let running ones end within the grace, and remove the socket."""
        self._server.stop(grace_seconds).wait()
        self._threads.shutdown(wait=False)
        self._path.unlink(missing_ok=True)


def socket_path(option: str, endpoint: str) -> Path:
    """The path of an endpoint `unix:///path` or `/path` that was given as this option.

    Raises:
        EndpointError: it is anything else, or longer than a socket's path may be.
    """
    path = endpoint.removeprefix("unix://")
    if not path.startswith("/"):
        raise EndpointError(f"{option} must be unix:///path of a socket, got {endpoint!r}")
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise EndpointError(
            f"{option} must be a path of at most {_MAX_PATH_BYTES} bytes, got {endpoint!r}"
        )
    return Path(path)


def _remove_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except FileNotFoundError:
            return
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise EndpointError(f"cannot listen at {path}: another process does")


class _Boundary(grpc.ServerInterceptor):
    """Where errors end: each becomes a code and a line, the unplanned ones with a traceback in the
    log."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None  # gRPC answers UNIMPLEMENTED
        method: str = handler_call_details.method.rpartition("/")[2]
        behavior = handler.unary_unary
        assert behavior is not None, "CSI and registration have no streams"

        def call(request: Message, context: grpc.ServicerContext) -> Message:
            started = time.monotonic()
            fields = {"method": method, "request": log_safe(request)}
            try:
                response: Message = behavior(request, context)
            except CsiError as error:
                logger.warning(
                    "call failed",
                    extra={**fields, "grpc_code": error.grpc_code, "reason": str(error)},
                )
                context.abort(grpc.StatusCode[error.grpc_code], str(error))
            except Exception:
                logger.exception("call failed unexpectedly", extra=fields)
                context.abort(
                    grpc.StatusCode.INTERNAL,
                    f"{method} failed unexpectedly; the driver's log says why",
                )
            logger.debug("call", extra={**fields, "seconds": round(time.monotonic() - started, 3)})
            return response

        return grpc.unary_unary_rpc_method_handler(
            call, handler.request_deserializer, handler.response_serializer
        )
