"""Whether a volume can be used, asked before anything is mounted. Called by node and controller.

A wrong token found here is one clear line at the pod; found later it would be an input/output error
in the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from trainmount_csi.credentials import Credentials
from trainmount_csi.errors import InvalidArgument, Unavailable, from_volume_error
from trainmount_files import Volume, VolumeError, open_volume

__all__ = ["check_source", "within"]

Result = TypeVar("Result")


def check_source(
    source: str, credentials: Credentials, timeout_seconds: float, *, allow_node_directory: bool
) -> None:
    """Ask the store for the volume's root.

    Raises:
        InvalidArgument: `source` is no URL of a volume, is a file, or a directory that a daemon
        would not see. Unauthenticated, PermissionDenied: the token is not taken, or not for this.
        NotFound: no such volume or directory. Unavailable: no answer within the timeout.
    """
    if source.startswith("file:") and not allow_node_directory:
        raise InvalidArgument(
            f"source {source} is a directory of the node, which a mount pod does not see; "
            "use a hostPath volume for it"
        )

    def root_is_directory(volume: Volume) -> bool:
        return volume.stat("").is_directory

    if not within(source, credentials, timeout_seconds, root_is_directory):
        raise InvalidArgument(f"source {source} must be a directory, it is a file")


def within(
    source: str, credentials: Credentials, timeout_seconds: float, use: Callable[[Volume], Result]
) -> Result:
    """Open a volume, use it and close it; `use` may go on after the timeout, its result is dropped
    then.

    Raises:
        CsiError: what the volume's own error means to a caller, or Unavailable after the timeout.
    """
    result: Future[Result] = Future()

    def run() -> None:
        try:
            volume = open_volume(source, host=credentials.host, token=credentials.token)
            try:
                value = use(volume)
            finally:
                volume.close()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=run, name="volume-check", daemon=True).start()
    try:
        return result.result(timeout_seconds)
    except FutureTimeoutError:
        where = f" at {credentials.host}" if credentials.host else ""
        raise Unavailable(f"{source}{where} has not answered for {timeout_seconds:.0f} s") from None
    except VolumeError as error:
        raise from_volume_error(error, source, credentials.host) from error
