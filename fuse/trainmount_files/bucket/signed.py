"""Requests of S3 that obstore cannot make, since it takes no key that is no path of its own: a
listing that holds such keys, and the removal of a key that ends in a slash. Called by `listing.py`
and `volume.py`; signed by awscrt, which starts no threads for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from trainmount_files.bucket.answers import error_of_answer
from trainmount_files.bucket.options import BucketOptions
from trainmount_files.bucket.s3_settings import Keys, S3Address
from trainmount_files.errors import Cancelled, Unauthenticated, Unavailable, Unsupported
from trainmount_files.retry import RETRYABLE_STATUSES, Attempts

__all__ = ["SignedRequests"]

_SIGN_SECONDS: Final = 10.0

_UNRESERVED: Final = "-_.~"


class SignedRequests:
    """Requests to one bucket, with the retries of all others. One a volume and process; any thread
    may call.
    """

    def __init__(
        self, address: S3Address, options: BucketOptions, find_keys: Callable[[], Keys | None]
    ) -> None:
        from trainmount_files.files_api.transport import Transport, TransportOptions

        self._address = address
        self._policy = options.retry
        self._find_keys = find_keys
        self._transport = Transport(
            TransportOptions(inactivity_timeout_seconds=options.read_timeout_seconds)
        )

    def send(
        self,
        operation: str,
        path: str,
        method: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
    ) -> bytes:
        """The answer's body. `operation` and `path` are for errors.

        Raises:
            VolumeError: as of any other request. Unsupported: the keys to sign with are not to be
            had here.
        """
        from trainmount_files.files_api.transport import TransportError

        target = self._target(key, query or {})
        attempts = Attempts(self._policy)
        while True:
            try:
                headers = self._headers(operation, path, method, target)
                origin = self._address.url.partition("//")
                url = f"{origin[0]}//{self._address.host}{target}"
                reply = self._transport.exchange(method, url, headers=headers)
            except TransportError as error:
                if error.was_closed or self._transport.closed.is_set():
                    raise Cancelled(operation, path, "the volume was closed") from None
                reason = f"the store cannot be reached ({error.reason})"
                failure = Unavailable(operation, path, reason)
                if not error.may_pass:
                    raise failure from None
                attempts.wait_or_raise(failure)
                continue
            if reply.status < 300:
                return reply.body
            refusal = error_of_answer(
                operation, path, reply.status, reply.body.decode(errors="replace")
            )
            if reply.status not in RETRYABLE_STATUSES:
                raise refusal
            attempts.wait_or_raise(refusal, reply.headers.get("Retry-After"))

    def close(self) -> None:
        self._transport.close()

    def _target(self, key: str, query: Mapping[str, str]) -> str:
        _, _, path = self._address.url.partition("//")[2].partition("/")
        target = f"/{path}" if path else ""
        # A bucket's own address ends in a slash only where its name is in the host's.
        if key or not target:
            target += "/" + quote(key, safe=_UNRESERVED + "/")
        pairs = sorted((name, quote(value, safe=_UNRESERVED)) for name, value in query.items())
        return target + ("?" if pairs else "") + "&".join(f"{n}={v}" for n, v in pairs)

    def _headers(self, operation: str, path: str, method: str, target: str) -> dict[str, str]:
        headers = {"Host": self._address.host, **self._address.headers}
        if self._address.skips_signature:
            return headers
        keys = self._find_keys()
        if keys is None:
            raise Unsupported(
                operation, path, "roles are known to obstore alone here: pip install botocore"
            )
        try:
            return _sign(method, target, headers, keys, self._address.region)
        except ImportError:
            raise Unsupported(
                operation, path, "needs awscrt: pip install 'trainmount[bucket]'"
            ) from None
        except (ValueError, RuntimeError, TypeError, TimeoutError):
            refusal = Unauthenticated(operation, path, "these keys cannot sign a request")
        # Outside of the handler: the error's text may repeat what was to be signed.
        raise refusal


def _sign(
    method: str, target: str, headers: Mapping[str, str], keys: Keys, region: str
) -> dict[str, str]:
    """The headers of a request without a body, with Signature Version 4 among them."""
    from awscrt import auth, http

    provider = auth.AwsCredentialsProvider.new_static(
        keys.access_key_id, keys.secret_access_key, keys.session_token
    )
    config = auth.AwsSigningConfig(
        algorithm=auth.AwsSigningAlgorithm.V4,
        signature_type=auth.AwsSignatureType.HTTP_REQUEST_HEADERS,
        credentials_provider=provider,
        region=region,
        service="s3",
        date=datetime.now(UTC),
        # S3 takes a key as it stands, `..` and empty names with it.
        use_double_uri_encode=False,
        should_normalize_uri_path=False,
        signed_body_value=auth.AwsSignedBodyValue.EMPTY_SHA256,
        signed_body_header_type=auth.AwsSignedBodyHeaderType.X_AMZ_CONTENT_SHA_256,
    )
    request = http.HttpRequest(method, target, http.HttpHeaders(list(headers.items())))
    signed: Any = auth.aws_sign_request(request, config).result(_SIGN_SECONDS)
    return dict(signed.headers)
