"""Calls of the Files API on the workspace's host: authenticated, small answers, repeated as the
policy says.

Called by `volume.py` (metadata), `signed_urls.py` and `upload.py`; by `catalog/` for the calls of
Unity Catalog, which have another base. File bodies that are read do not pass here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final
from urllib.parse import quote, urlencode

from trainmount_files.cancellation import Either
from trainmount_files.errors import Cancelled, InvalidRequest, Unavailable, VolumeError
from trainmount_files.files_api.answers import error_of, is_passing, parse_object
from trainmount_files.files_api.file_slice import FileSlice
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.transport import Reply, Transport, TransportError
from trainmount_files.retry import Attempts, Cancellation, Clock, RetryPolicy
from trainmount_files.volume import Buffer

__all__ = ["BodySource", "Call", "FilesApi", "Outcome", "encode_path", "failure_of"]

_BASE: Final = "/api/2.0/fs"

BodySource = Callable[[], Buffer | FileSlice]
"""Makes the body of one try, from its first byte."""


def encode_path(operation: str, path: str) -> str:
    """`path` as it stands in a URL: UTF-8, percent-encoded once, `/` kept.

    Raises:
        InvalidRequest: the name is no Unicode text, which the service cannot store.
    """
    try:
        return quote(path, safe="/")
    except UnicodeEncodeError:
        pass
    raise InvalidRequest(operation, ascii(path)[1:-1], "the name must be valid Unicode text")


def failure_of(operation: str, path: str, broken: TransportError, what: str = "") -> VolumeError:
    """The error that a request without an answer stands for."""
    kind: type[VolumeError] = Unavailable
    if broken.was_closed:
        kind = Cancelled
    elif not broken.may_pass:
        kind = InvalidRequest
    return kind(operation, path, f"{what}{broken.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of the API. May be repeated: the caller says with `Outcome.was_uncertain` how it
    copes.
    """

    operation: str
    """For messages: `stat`, `put`."""
    path: str
    """For messages: relative to the volume."""
    method: str
    target: str
    """Below `base`, encoded, without a query."""
    query: Mapping[str, str | int] | None = None
    headers: Mapping[str, str] | None = None
    base: str = _BASE
    expects_json: bool = False
    """A success without a JSON object is none: a proxy's page, a body that broke off. It is asked
    again.
    """
    is_farewell: bool = False
    """Sent though the volume is closed: it frees what the store has of us."""
    secret: str = ""
    """What the call carries that no message may repeat: an upload's token."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call."""

    reply: Reply | None
    """None where the call failed."""
    error: VolumeError | None
    """None where the status was below 300."""
    was_uncertain: bool
    """An earlier try got no answer, so that it may have been carried out unseen."""

    def unwrap(self) -> Reply:
        """The reply, or raise the error."""
        if self.error is not None:
            raise self.error
        assert self.reply is not None
        return self.reply


class FilesApi:
    """The workspace's Files API as one identity. Any thread may call."""

    def __init__(
        self,
        credentials: Credentials,
        transport: Transport,
        retry: RetryPolicy,
        clock: Clock | None = None,
    ) -> None:
        self.credentials = credentials
        self._transport = transport
        self._retry = retry
        self._clock = clock

    def attempts(
        self,
        cancel: Cancellation | None = None,
        within_seconds: float | None = None,
        *,
        is_farewell: bool = False,
    ) -> Attempts:
        """The tries of one request; `within_seconds` shortens the policy's deadline."""
        closed = self._transport.closed
        policy = self._retry
        if within_seconds is not None and within_seconds < policy.deadline_seconds:
            policy = replace(policy, deadline_seconds=within_seconds)
        if is_farewell:
            return Attempts(policy, cancel=cancel, clock=self._clock)
        # Who closes the volume has given up too.
        both = closed if cancel is None else Either(closed, cancel)
        return Attempts(policy, cancel=both, clock=self._clock)

    def has_other_credentials(self, refused: Mapping[str, str]) -> bool:
        """Whether the headers that authenticate are others by now than those that were refused.

        Raises:
            Unauthenticated: none can be had any more.
        """
        return self.credentials.headers() != refused

    def url(
        self, target: str, query: Mapping[str, str | int] | None = None, *, base: str = _BASE
    ) -> str:
        """The whole URL; holds no secret unless the query does."""
        suffix = f"?{urlencode(query, quote_via=quote, safe='')}" if query else ""
        return f"{self.credentials.host}{base}{target}{suffix}"

    def call(
        self,
        call: Call,
        *,
        body: BodySource | None = None,
        cancel: Cancellation | None = None,
        within_seconds: float | None = None,
    ) -> Outcome:
        """Send `call` until there is an answer that another try would not change, or the deadline
        is over.

        `body` is called once for each try. Never raises for what the server says: `Outcome.error`
        holds it. Raises what a body's file raises, Cancelled and Unauthenticated.
        """
        attempts = self.attempts(cancel, within_seconds, is_farewell=call.is_farewell)
        attempts.check_cancelled(call.operation, call.path)
        url = self.url(call.target, call.query, base=call.base)
        uncertain = False
        renewed = False
        while True:
            authentication = self.credentials.headers()
            reply, error, retry_after, sent = self._once(call, url, authentication, body, cancel)
            may_pass = reply is None or reply.status < 300 or is_passing(reply.status, reply.body)
            if error is None or not (may_pass and isinstance(error, Unavailable)):
                if reply is not None and reply.status == 401 and not renewed:
                    # A token may have ended between two requests; its source then has a new one.
                    renewed = True
                    if self.has_other_credentials(authentication):
                        continue
                return Outcome(reply, error, uncertain)
            uncertain = uncertain or sent
            try:
                attempts.wait_or_raise(error, retry_after)
            except Unavailable as final:
                return Outcome(reply, final, uncertain)

    def call_json(
        self, call: Call, value: object, *, cancel: Cancellation | None = None
    ) -> Outcome:
        """As `call`, with a JSON body."""
        headers = {**(call.headers or {}), "Content-Type": "application/json"}
        encoded = json.dumps(value).encode()
        return self.call(replace(call, headers=headers), body=lambda: encoded, cancel=cancel)

    def _once(
        self,
        call: Call,
        url: str,
        authentication: Mapping[str, str],
        body: BodySource | None,
        cancel: Cancellation | None,
    ) -> tuple[Reply | None, VolumeError | None, str | None, bool]:
        """One try: the reply, the error it stands for, its `Retry-After`, and whether its outcome
        is unknown.
        """
        try:
            reply = self._transport.exchange(
                call.method,
                url,
                headers={**authentication, **(call.headers or {})},
                body=body() if body is not None else None,
                cancel=cancel,
                is_farewell=call.is_farewell,
            )
        except TransportError as broken:
            error = failure_of(call.operation, call.path, broken)
            return None, error, None, broken.was_sent
        if reply.status < 300:
            if not call.expects_json or parse_object(reply.body) is not None:
                return reply, None, None, False
            reason = "the answer is not the API's: a body without a JSON object"
            return reply, Unavailable(call.operation, call.path, reason), None, True
        token = authentication.get("Authorization", "").rpartition(" ")[2]
        error = error_of(call.operation, call.path, reply.status, reply.body, token, call.secret)
        if not isinstance(error, Unavailable) and is_passing(reply.status, reply.body):
            error = Unavailable(call.operation, call.path, error.reason)
        # A gateway that gave up waiting does not know what became of the request.
        unknown = reply.status in (500, 502, 504)
        return reply, error, reply.headers.get("Retry-After"), unknown
