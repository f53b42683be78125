"""What S3's requests need besides a bucket and a key: endpoint, region, keys. From options, the
environment and the profiles of `~/.aws`. Called by `stores.py` and `signed.py`; sends nothing.
"""

from __future__ import annotations

import configparser
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from trainmount_files.bucket.location import Location
from trainmount_files.errors import InvalidRequest, Unauthenticated

__all__ = ["ENDPOINT_VARIABLES", "Keys", "S3Address", "has_keys", "keys_of", "profile_settings"]

ENDPOINT_VARIABLES: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""First the one that wins."""

_REGION_VARIABLES: Final = ("AWS_REGION", "AWS_DEFAULT_REGION")

_OTHER_SOURCES: Final = (
    "skip_signature",
    "web_identity_token_file",
    "container_credentials_relative_uri",
    "container_credentials_full_uri",
)
"""What obstore takes credentials from by itself, besides keys; each may be a variable `AWS_…`."""

_OTHER_WAYS: Final = ("credential_process", "login_session", "role_arn", "sso_account_id")
"""Of a profile without keys."""

_KEPT: Final = timedelta(minutes=10)
"""How long obstore may use keys of a profile before it asks again."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What a request is signed with."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "Keys()"


def has_keys(given: Mapping[str, str]) -> bool:
    """Whether options (by obstore's own names) or variables say where credentials are."""
    names = ("access_key_id", *_OTHER_SOURCES)
    return any(given.get(name) or os.environ.get(f"AWS_{name.upper()}") for name in names)


def profile_settings(url: str, given: Mapping[str, str]) -> tuple[dict[str, str], Any]:
    """Settings out of the profile of `AWS_PROFILE`, and what obstore shall ask for credentials, or
    None. Empty where options or variables have credentials, or there is no profile.

    Raises:
        InvalidRequest: there is no profile of that name.
        Unauthenticated: the profile has no keys of its own, and botocore is not installed.
    """
    if has_keys(given):
        return {}, None
    name = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE") or "default"
    profile = _read_profile(name)
    if profile is None:
        if name != "default":
            raise InvalidRequest("open", url, f"there is no profile {name!r} in ~/.aws")
        return {}, None
    found: dict[str, str] = {}
    if "region" in profile and not any(map(os.environ.get, _REGION_VARIABLES)):
        found["region"] = profile["region"]
    if "endpoint_url" in profile and not any(map(os.environ.get, ENDPOINT_VARIABLES)):
        found["endpoint"] = profile["endpoint_url"]
    if profile.get("aws_access_key_id") and profile.get("aws_secret_access_key"):
        found["access_key_id"] = profile["aws_access_key_id"]
        found["secret_access_key"] = profile["aws_secret_access_key"]
        if profile.get("aws_session_token"):
            found["session_token"] = profile["aws_session_token"]
        return found, None
    if not any(way in profile for way in _OTHER_WAYS):
        return found, None
    chain = _chain()
    if chain is None:
        reason = (
            f"the profile {name!r} has no keys of its own: pip install botocore, "
            "or set the variables that `aws configure export-credentials` prints"
        )
        raise Unauthenticated("open", url, reason)
    return found, _Provider(chain)


def keys_of(given: Mapping[str, str], provider: Any) -> Keys | None:
    """The keys that obstore signs with; None where it alone has them (roles, without botocore)."""
    if given.get("access_key_id"):
        secret = given.get("secret_access_key", "")
        return Keys(given["access_key_id"], secret, given.get("session_token"))
    if provider is not None:
        found = provider()
        return Keys(found["access_key_id"], found["secret_access_key"], found["token"])
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID"):
        return Keys(
            environment["AWS_ACCESS_KEY_ID"],
            environment.get("AWS_SECRET_ACCESS_KEY", ""),
            environment.get("AWS_SESSION_TOKEN"),
        )
    chain = _chain()
    return chain() if chain is not None else None


@dataclass(frozen=True, slots=True)
class S3Address:
    """Where a bucket answers."""

    url: str
    """Of the bucket, without a slash at its end."""
    region: str
    skips_signature: bool
    headers: Mapping[str, str]

    @classmethod
    def of(cls, location: Location, given: Mapping[str, str]) -> S3Address:
        """As obstore has it, from options by obstore's own names and from the environment."""
        region = _first(given, ("region", "default_region"), _REGION_VARIABLES) or "us-east-1"
        endpoint = _first(given, ("endpoint",), ENDPOINT_VARIABLES).rstrip("/")
        is_virtual = _is_true(given, "virtual_hosted_style_request")
        if not endpoint:
            host = f"s3.{region}.amazonaws.com"
            url = f"https://{location.bucket}.{host}" if is_virtual else f"https://{host}"
        else:
            # In this style the endpoint has the bucket in its name already.
            url = endpoint
        if not is_virtual:
            url += f"/{location.bucket}"
        headers = {"x-amz-request-payer": "requester"} if _is_true(given, "request_payer") else {}
        return cls(url, region, _is_true(given, "skip_signature"), headers)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc


def _first(given: Mapping[str, str], names: tuple[str, ...], variables: tuple[str, ...]) -> str:
    found = [given[name] for name in names if given.get(name)]
    found += [os.environ[name] for name in variables if os.environ.get(name)]
    return found[0] if found else ""


def _is_true(given: Mapping[str, str], name: str) -> bool:
    value = str(given.get(name) or os.environ.get(f"AWS_{name.upper()}") or "")
    return value.lower() in ("1", "true", "on", "yes", "y")


def _read_profile(name: str) -> dict[str, str] | None:
    """A profile out of both files of the AWS command line; the keys' file wins."""
    files = (
        ("AWS_CONFIG_FILE", "config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "credentials", name),
    )
    found: dict[str, str] | None = None
    for variable, file_name, section in files:
        path = Path(os.environ.get(variable) or f"~/.aws/{file_name}").expanduser()
        parser = configparser.RawConfigParser(default_section="", strict=False)
        try:
            parser.read_string(path.read_text())
        except (OSError, UnicodeError, configparser.Error):
            # Its own text would repeat the line that it does not understand.
            continue
        if parser.has_section(section):
            found = (found or {}) | {key: value for key, value in parser.items(section) if value}
    return found


class _Provider:
    """What obstore calls for credentials, from threads of its own."""

    def __init__(self, keys: Callable[[], Keys | None]) -> None:
        self._keys = keys

    def __call__(self) -> dict[str, Any]:
        keys = self._keys()
        if keys is None:
            raise ValueError("the profile gives no credentials")
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.session_token,
            "expires_at": datetime.now(UTC) + _KEPT,
        }


def _chain() -> Callable[[], Keys | None] | None:
    """All that botocore knows of credentials, where it is installed."""
    try:
        session = importlib.import_module("botocore.session").Session()
    except ImportError:
        return None

    def keys() -> Keys | None:
        found = session.get_credentials()
        if found is None:
            return None
        frozen = found.get_frozen_credentials()
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    return keys
