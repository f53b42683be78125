"""Paths of the filesystem, and the volumes they lead to.

A path is `/Volumes/<catalog>/<schema>/<volume>/...`, or, of a filesystem with a root, a path below
that root. Volumes are shared by all filesystem objects of one identity in a process: fsspec makes
one for each thread, which must not mean a connection pool for each.
"""

from __future__ import annotations

import os
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Final

from trainmount_files.errors import NotFound
from trainmount_files.open import open_volume
from trainmount_files.per_process import PerProcess
from trainmount_files.volume import Volume

__all__ = ["Identity", "Location", "Locations", "strip"]

_PREFIXES: Final = ("volumes://", "volumes:", "dbfs:")

_VOLUME_NAMES: Final = 4
"""`Volumes`, catalog, schema, volume."""


def strip(path: str | os.PathLike[str]) -> str:
    """The one spelling of a path: absolute, without protocol, doubled or trailing slashes."""
    text = os.fspath(path)
    for prefix in _PREFIXES:
        if text.startswith(prefix):
            text = text.removeprefix(prefix)
            break
    return "/" + "/".join(name for name in text.split("/") if name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks, and where; None is what the environment or the profile says."""

    host: str | None = None
    token: str | None = field(default=None, repr=False)
    profile: str | None = None
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Of a bucket, as `open_volume` takes them."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where a path leads."""

    volume: Volume
    root: str
    """Path of the volume's root in the filesystem; without a trailing slash, so empty for `/`."""
    path: str
    """In the volume."""

    @property
    def full_path(self) -> str:
        return self.full(self.path)

    def full(self, path: str) -> str:
        """The path in the filesystem of `path` in the volume."""
        return f"{self.root}/{path}" if path else self.root or "/"


class Locations:
    """Finds the volume of a path. Any thread may ask; may be forked."""

    def __init__(self, root: str | None, identity: Identity) -> None:
        self._root = root
        self._identity = identity
        # What this object used lives as long as it. Single operations only, so that no lock is
        # needed, which a fork could copy while it is held.
        self._kept: dict[str, Volume] = {}

    def is_above_all(self, path: str) -> bool:
        """Whether `path`, as `strip` makes it, is the one above `/Volumes`."""
        return self._root is None and path == "/"

    def is_root(self, path: str) -> bool:
        """Whether `path` is the root of a volume or above it."""
        return path == "/" if self._root is not None else path.count("/") < _VOLUME_NAMES + 1

    def find(self, path: str) -> Location:
        """Where `path`, as `strip` makes it, leads.

        Raises:
            VolumeError: no volume can be there, or it cannot be opened.
        """
        names = path.split("/")[1:] if path != "/" else []
        if self._root is not None:
            return Location(self._volume(self._root), "", "/".join(names))
        if names[:1] != ["Volumes"]:
            raise NotFound("open", path, "paths begin with /Volumes/<catalog>/<schema>/<volume>")
        num_above = min(len(names), _VOLUME_NAMES)
        root = "/Volumes" if num_above < _VOLUME_NAMES else "/" + "/".join(names[:num_above])
        return Location(self._volume(root), root, path.removeprefix(root).lstrip("/"))

    def _volume(self, url: str) -> Volume:
        volume = self._kept.get(url)
        if volume is None:
            volume = _SHARED.get().open(url, self._identity)
            self._kept[url] = volume
        return volume


_Key = tuple[str, Identity, frozenset[tuple[str, str]]]

_SETTINGS: Final = ("DATABRICKS_", "ARM_", "AWS_", "GOOGLE_", "AZURE_")
"""How the names of variables begin that say who asks, and where."""


class _SharedVolumes:
    """The open volumes of this process. Any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Held weakly: a volume goes when the last filesystem object that used it does.
        self._volumes: weakref.WeakValueDictionary[_Key, Any] = weakref.WeakValueDictionary()

    def open(self, url: str, identity: Identity) -> Volume:
        # A volume keeps to what it found at its first request; who is made after the environment
        # has changed shall see the change.
        environment = frozenset(
            each for each in os.environ.items() if each[0].startswith(_SETTINGS)
        )
        key = (url, identity, environment)
        with self._lock:
            volume: Volume | None = self._volumes.get(key)
            if volume is None:
                volume = open_volume(
                    url,
                    host=identity.host,
                    token=identity.token,
                    profile=identity.profile,
                    options=dict(identity.options),
                )
                self._volumes[key] = volume
            return volume


_SHARED: Final = PerProcess(_SharedVolumes)
