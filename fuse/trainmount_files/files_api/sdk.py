"""The databricks SDK's part: where the workspace is and who we are. The only module that imports
it.

The SDK decides host and credentials (environment, profiles, OAuth, workload identity); requests are
ours, since its HTTP client reads a `Retry-After` only as seconds, has one deadline for everything,
shares its sockets with forked children and logs the bodies of answers, signed URLs among them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any, Final

from trainmount_files.errors import InvalidRequest, Unauthenticated, VolumeError
from trainmount_files.per_process import PerProcess
from trainmount_files.redaction import one_line

__all__ = ["Credentials"]

_DISCOVERY_SECONDS: Final = 10
"""The SDK looks for `/.well-known/databricks-config` when it is configured and would retry that for
five minutes.
"""

_NOISE: Final = re.compile(
    r", please check https://\S+ to configure credentials for your preferred authentication method"
    r"|(?:,| Config:) (?:http|retry)_timeout_seconds=[0-9.]+(?=[,.]|$)"
)
"""Of the SDK's texts, what tells a person nothing: an address that is redacted, and limits that are
ours.
"""

_OTHER_AUTHENTICATION: Final = (
    "DATABRICKS_CONFIG_PROFILE",
    "DATABRICKS_CLIENT_ID",
    "DATABRICKS_USERNAME",
)
"""With one of these set the SDK has to decide, even where there is a token."""


class Credentials:
    """Host and authentication headers of one identity. Any thread may ask; each process resolves
    anew.

    Pickled while a child process is being spawned, an explicit token travels with it; pickled
    otherwise it is left out, and the copy resolves from its own environment.
    """

    def __init__(
        self, *, host: str | None = None, token: str | None = None, profile: str | None = None
    ) -> None:
        """Resolves nothing yet: the first request does.

        `profile` names a section of `~/.databrickscfg` (or `DATABRICKS_CONFIG_FILE`), which then
        counts before the environment; `host` and `token` count before both.
        """
        self._host = host
        self._token = token
        self._profile = profile
        self._resolved = PerProcess(self._resolve)

    def __repr__(self) -> str:
        named = f", profile={self._profile!r}" if self._profile is not None else ""
        return f"Credentials(host={self._host!r}{named})"

    def __getstate__(self) -> dict[str, str | None]:
        spawning = get_spawning_popen() is not None
        token = self._token if spawning else None
        return {"host": self._host, "token": token, "profile": self._profile}

    def __setstate__(self, state: Mapping[str, str | None]) -> None:
        self._host = state["host"]
        self._token = state["token"]
        self._profile = state["profile"]
        self._resolved = PerProcess(self._resolve)

    @property
    def host(self) -> str:
        """Scheme, name and port, without a trailing slash.

        Raises:
            Unauthenticated: no host or no credentials are configured.
        """
        return self._resolved.get().host

    def headers(self) -> dict[str, str]:
        """The headers that authenticate a request now; a new token is fetched where the last one
        expires.

        Raises:
            Unauthenticated: no credentials are configured, or they cannot be had.
        """
        return self._resolved.get().headers()

    def _resolve(self) -> _Resolved:
        if self._profile is not None:
            return self._resolve_profile(self._profile)
        host = self._host or os.environ.get("DATABRICKS_HOST")
        token = self._token or os.environ.get("DATABRICKS_TOKEN")
        explicit = self._token is not None
        auth_type = os.environ.get("DATABRICKS_AUTH_TYPE", "pat")
        undecided = auth_type != "pat" or any(os.environ.get(n) for n in _OTHER_AUTHENTICATION)
        if host and token and (explicit or not undecided):
            # The SDK would come to the same, after two seconds of imports that each loader worker
            # and each restart of the mount's daemon would pay.
            workspace = os.environ.get("DATABRICKS_WORKSPACE_ID")
            return _Resolved.of_token(_normalized(host), token, workspace)
        return _Resolved.of_sdk({"host": self._host, "token": self._token})

    def _resolve_profile(self, profile: str) -> _Resolved:
        """The SDK lets the environment count before a profile, even one that was asked for by name;
        so what the profile says is handed to it as if the caller had.
        """
        settings = {**_read_profile(profile)}
        if self._host:
            settings["host"] = self._host
        if self._token:
            settings["token"] = self._token
            settings["auth_type"] = "pat"
        elif "token" in settings:
            settings.setdefault("auth_type", "pat")
        host, token = settings.get("host"), settings.get("token")
        if host and token and settings["auth_type"] == "pat":
            return _Resolved.of_token(_normalized(host), token, settings.get("workspace_id"))
        return _Resolved.of_sdk({**settings, "profile": profile})


class _Resolved:
    """What `Credentials` found in this process."""

    def __init__(self, host: str, source: _Token | _Sdk) -> None:
        self.host = host
        self._source = source

    @classmethod
    def of_token(cls, host: str, token: str, workspace: str | None) -> _Resolved:
        return cls(host, _Token(token, workspace))

    @classmethod
    def of_sdk(cls, settings: Mapping[str, str | None]) -> _Resolved:
        source = _Sdk(settings)
        return cls(_normalized(source.host), source)

    def headers(self) -> dict[str, str]:
        return self._source.headers()


class _Token:
    def __init__(self, token: str, workspace: str | None) -> None:
        self._headers = {"Authorization": f"Bearer {token}"}
        if workspace:
            self._headers["X-Databricks-Workspace-Id"] = workspace

    def headers(self) -> dict[str, str]:
        return dict(self._headers)


class _Sdk:
    def __init__(self, settings: Mapping[str, str | None]) -> None:
        failure: VolumeError
        try:
            from databricks.sdk.core import Config

            known = {attribute.name for attribute in Config.attributes()} | {"profile"}
            given: dict[str, Any] = {
                name: value for name, value in settings.items() if value and name in known
            }
            self._config = Config(
                **given,
                http_timeout_seconds=_DISCOVERY_SECONDS,
                retry_timeout_seconds=_DISCOVERY_SECONDS,
            )
            self.host = str(self._config.host or "")
            if self.host:
                return
            failure = Unauthenticated("open", "", _how_to_configure("no host is configured"))
        except ValueError as error:
            # The SDK's text names the settings it saw, tokens masked; ours masks once more.
            text = _NOISE.sub("", str(error)).rstrip(".")
            failure = Unauthenticated("open", "", _how_to_configure(one_line(text)))
        raise failure

    def headers(self) -> dict[str, str]:
        try:
            headers = dict(self._config.authenticate())
            # The oldest SDKs know no workspace.
            workspace = getattr(self._config, "workspace_id", None)
            if workspace:
                headers["X-Databricks-Workspace-Id"] = str(workspace)
            return headers
        except Exception as error:
            # Each way to authenticate has its own exceptions: HTTP, files, programs.
            reason = one_line(f"no token could be had: {error}")
        raise Unauthenticated("authenticate", "", reason)


def _read_profile(profile: str) -> dict[str, str]:
    """What one section of the configuration file says.

    Raises:
        Unauthenticated: there is no such section, or the file cannot be read.
    """
    file = Path(os.environ.get("DATABRICKS_CONFIG_FILE") or "~/.databrickscfg").expanduser()
    # As the SDK: DEFAULT is a profile like the others, and `%` is part of a token.
    parser = ConfigParser(default_section="", interpolation=None)
    try:
        with file.open(encoding="utf-8") as lines:
            parser.read_file(lines)
        if parser.has_section(profile):
            return {name: value for name, value in parser.items(profile) if value}
        reason = f"{file} has no profile {profile}"
    except OSError as error:
        reason = f"the profile {profile} is asked for, and {file}: {error.strerror}"
    except (ConfigParserError, ValueError):
        # Its text would quote a line of the file, which may be the one with the token.
        reason = f"{file} is no configuration file with [profiles]"
    raise Unauthenticated("open", "", reason)


def _how_to_configure(reason: str) -> str:
    return f"{reason}; set DATABRICKS_HOST and DATABRICKS_TOKEN, or a profile in ~/.databrickscfg"


def _normalized(host: str) -> str:
    """As the SDK has it: https where no scheme is given, no trailing slash."""
    text = host.strip().rstrip("/")
    if "://" not in text:
        text = f"https://{text}"
    scheme, _, rest = text.partition("://")
    if scheme not in ("http", "https") or not rest or "@" in rest:
        raise InvalidRequest(
            "open", "", "DATABRICKS_HOST must be https://HOST[:PORT] or http://HOST[:PORT]"
        )
    return f"{scheme}://{rest.partition('/')[0]}"
