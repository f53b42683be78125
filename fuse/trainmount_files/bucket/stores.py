"""From a location and options to a store of obstore. Called by `volume.py`, once a process."""

from __future__ import annotations

import os
from datetime import timedelta
from types import ModuleType
from typing import Any, Final

from trainmount_files.bucket.location import Location
from trainmount_files.bucket.options import BucketOptions
from trainmount_files.bucket.s3_settings import (
    ENDPOINT_VARIABLES,
    S3Address,
    keys_of,
    profile_settings,
)
from trainmount_files.bucket.signed import SignedRequests
from trainmount_files.errors import InvalidRequest
from trainmount_files.redaction import one_line

__all__ = ["make_signed_requests", "make_store"]

_CLIENT_OPTIONS: Final = frozenset(
    {
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_ca_certificate",
        "proxy_excludes",
        "proxy_url",
        "read_timeout",
        "root_certificate",
        "timeout",
        "user_agent",
    }
)
"""Storage options that are about the HTTP client; all others are the store's."""

_NOT_SIGNED: Final = frozenset(
    {"allow_invalid_certificates", "proxy_ca_certificate", "proxy_url", "root_certificate"}
)
"""Client options that only obstore's own client can have."""

_ENDPOINTS: Final = {
    "s3": ENDPOINT_VARIABLES,
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "memory": (),
}
"""Variables that name another server, first the one that wins."""

_NO_LIMIT: Final = "365days"
"""obstore ends a request after 30 seconds by default, also one that is in good progress; here a
silence ends it.
"""

_MEMORY: Final[dict[str, Any]] = {}


def make_store(library: ModuleType, location: Location, options: BucketOptions) -> Any:
    """The bucket as a store. Sends nothing.

    Raises:
        InvalidRequest: a storage option is unknown or has a wrong value; its value is not said.
        Unauthenticated: the AWS profile needs botocore, which is not installed.
    """
    if location.scheme == "memory":
        if location.bucket not in _MEMORY:
            _MEMORY[location.bucket] = library._store.MemoryStore()
        return _MEMORY[location.bucket]
    given = dict(options.storage)
    client = {name: given.pop(name) for name in list(given) if name in _CLIENT_OPTIONS}
    if location.account:
        given.setdefault("account_name", location.account)
    if location.scheme == "s3":
        # A file of several parts is created exclusively by a copy on the server.
        given.setdefault("copy_if_not_exists", "multipart")
    client.setdefault("timeout", _NO_LIMIT)
    client.setdefault("read_timeout", f"{int(options.read_timeout_seconds * 1000)}ms")
    store = _make(library, location, options, given, client)
    if location.scheme != "s3":
        return store
    # Only the store knows which setting each option's name stands for.
    found, provider = profile_settings(location.url, store.config)
    if not found and provider is None:
        return store
    given = {name: value for name, value in store.config.items() if name != "bucket"}
    return _make(library, location, options, found | given, client, provider)


def make_signed_requests(
    store: Any, location: Location, options: BucketOptions
) -> SignedRequests | None:
    """Requests to the same bucket past obstore; None where only obstore can make them."""
    if location.scheme != "s3" or _NOT_SIGNED & set(store.client_options):
        return None
    given, provider = dict(store.config), store.credential_provider
    return SignedRequests(S3Address.of(location, given), options, lambda: keys_of(given, provider))


def _make(
    library: ModuleType,
    location: Location,
    options: BucketOptions,
    given: dict[str, str],
    client: dict[str, str],
    provider: Any = None,
) -> Any:
    if _asks_for_http(location.scheme, given):
        client = {"allow_http": "true"} | client
    store = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}[location.scheme]
    failure: InvalidRequest
    try:
        return getattr(library._store, store)(
            location.bucket,
            config=given,
            client_options=client,
            retry_config=_retry_config(options),
            **({} if provider is None else {"credential_provider": provider}),
        )
    except Exception as error:
        failure = InvalidRequest("open", location.url, _reason(error, given, client))
    raise failure


def _asks_for_http(scheme: str, given: dict[str, str]) -> bool:
    """Whether an endpoint without TLS was named, which obstore wants to be told twice."""
    explicit = [
        value
        for name, value in given.items()
        if "endpoint" in name.lower() or "base_url" in name.lower()
    ]
    inherited = [os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)]
    return (explicit or inherited or [""])[0].lower().startswith("http://")


def _retry_config(options: BucketOptions) -> dict[str, Any]:
    policy = options.retry
    return {
        # The deadline decides, as everywhere in this package.
        "max_retries": 10_000,
        "retry_timeout": timedelta(seconds=policy.deadline_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=policy.first_delay_seconds),
            "max_backoff": timedelta(seconds=policy.max_delay_seconds),
            "base": 2,
        },
    }


def _reason(error: Exception, given: dict[str, str], client: dict[str, str]) -> str:
    values = [str(value) for value in (*given.values(), *client.values())]
    first_line = str(error).partition("\n")[0]
    return one_line(f"storage options: {first_line}", *values)
