"""The verbs of fsspec over volumes. Found by fsspec itself, which makes one object for each thread
and set of options.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from datetime import UTC, datetime
from errno import EPERM
from hashlib import sha256
from multiprocessing.context import get_spawning_popen
from typing import Any, Final, cast

from fsspec.spec import make_instance

from trainmount_files.errors import DirectoryNotEmpty, NotADirectory
from trainmount_files.filesystem.contents import FileContentsFileSystem
from trainmount_files.filesystem.locations import Identity, Locations, strip
from trainmount_files.filesystem.many_files import Info, is_directory
from trainmount_files.filesystem.os_errors import as_os_errors
from trainmount_files.volume import list_directory

__all__ = ["VolumesFileSystem"]

_SECRET: Final = ("token", "options")
"""Options that are neither shown nor pickled."""


class VolumesFileSystem(FileContentsFileSystem):
    """Volumes as fsspec has filesystems. Any thread may use it; may be forked.

    Without `root` a path is `/Volumes/<catalog>/<schema>/<volume>/...`, also as
    `volumes:///Volumes/...`. With `root`, any URL that `open_volume` takes, paths are below it.
    `host`, `token` and `profile` are as in `open_volume`, and so are `options`, of a `root` that is
    a bucket. `parallelism` is how many files are worked on at once, `block_size` the bytes of a
    block of read-ahead, of which an open file has four at most; 0, which datasets give for a
    stream, is the default. Listings are kept only with `use_listings_cache`.

    An explicit token, and `options`, stay in this process: they are in no `repr`, JSON or
    `storage_options`, and pickling the object is refused but for a child process that is being
    spawned. What comes from the environment or a profile is found there by each process itself.
    """

    protocol = "volumes"
    root_marker = "/"

    def __init__(
        self,
        *,
        root: str | None = None,
        host: str | None = None,
        token: str | None = None,
        profile: str | None = None,
        options: Mapping[str, str] | None = None,
        parallelism: int = 16,
        block_size: int | None = None,
        use_listings_cache: bool = False,
        listings_expiry_time: float | None = None,
        max_paths: int | None = None,
        asynchronous: bool = False,
        loop: Any = None,
    ) -> None:
        """Sends no request."""
        if asynchronous or loop is not None:
            raise ValueError("the filesystem is synchronous: it has threads of its own")
        if parallelism < 1:
            raise ValueError(f"parallelism must be at least 1, got {parallelism}")
        super().__init__(
            use_listings_cache=use_listings_cache,
            listings_expiry_time=listings_expiry_time,
            max_paths=max_paths,
        )
        self.parallelism = parallelism
        if block_size:
            self.blocksize = block_size
        given = {"token": token, "options": options}
        self._secrets = {name: value for name, value in given.items() if value}
        settings = tuple(sorted((options or {}).items()))
        identity = Identity(host=host, token=token, profile=profile, options=settings)
        self._locations = Locations(root, identity)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._secrets and get_spawning_popen() is None:
            raise pickle.PicklingError(
                "an explicit token, or options, are not pickled; let each process find them: set "
                "DATABRICKS_TOKEN, or a profile in ~/.databrickscfg; the variables of the cloud"
            )
        options = self.storage_options | self._secrets
        return make_instance, (type(self), self.storage_args, options)

    def __copy__(self) -> VolumesFileSystem:
        return self

    def __deepcopy__(self, _: Any) -> VolumesFileSystem:
        return self

    @property
    def storage_options(self) -> dict[str, Any]:
        """The options that the object was made with, but for what may be secret."""
        return self._options

    @storage_options.setter
    def storage_options(self, options: dict[str, Any]) -> None:
        self._options = {name: value for name, value in options.items() if name not in _SECRET}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return [strip(each) for each in path] if isinstance(path, list) else strip(path)

    def unstrip_protocol(self, name: str) -> str:
        return f"{self.protocol}://{strip(name)}"

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **_: Any) -> Any:
        """The entries of a directory, by name; of a file itself."""
        full = strip(path)
        infos = None if refresh else self._listed(full)
        if infos is None:
            infos = self._list(full)
            self.dircache[full] = infos
        return infos if detail else [info["name"] for info in infos]

    def info(self, path: str, **_: Any) -> Info:
        full = strip(path)
        siblings = self._listed(self._parent(full)) if full != "/" else None
        if siblings is not None:
            # A bucket may have both; the file is what every other verb takes first.
            of_it = [info for info in siblings if info["name"] == full]
            for info in sorted(of_it, key=is_directory):
                return info
        with as_os_errors(full):
            if self._locations.is_above_all(full):
                return {"name": full, "size": 0, "type": "directory"}
            location = self._locations.find(full)
            return self._info_of(full, location.volume.stat(location.path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether anything is at the path; raises where that cannot be told."""
        return self._info_or_none(path, **kwargs) is not None

    def isdir(self, path: str) -> bool:
        return is_directory(self._info_or_none(path))

    def isfile(self, path: str) -> bool:
        info = self._info_or_none(path)
        return info is not None and not is_directory(info)

    def checksum(self, path: str) -> int:
        return int(self.ukey(path), 16)

    def ukey(self, path: str) -> str:
        info = self.info(path)
        known = f"{info['name']}\0{info['type']}\0{info.get('version')}"
        return sha256(known.encode(errors="surrogateescape")).hexdigest()

    def modified(self, path: str) -> datetime:
        mtime = self.info(path).get("mtime")
        if mtime is None:
            # Says that the store does not tell.
            return cast("datetime", super().modified(path))
        return datetime.fromtimestamp(mtime, UTC)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        full = strip(path)
        if self.exists(full):
            raise FileExistsError(f"{full} is there already")
        if not create_parents and not self.isdir(self._parent(full)):
            raise FileNotFoundError(f"no directory is at {self._parent(full)}")
        self.makedirs(full, exist_ok=True)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        full = strip(path)
        if not exist_ok and self.exists(full):
            raise FileExistsError(f"{full} is there already")
        with as_os_errors(full):
            location = self._locations.find(full)
            if location.path:
                location.volume.make_directory(location.path)
            else:
                location.volume.stat("")
        self.invalidate_cache(full)

    def rmdir(self, path: str) -> None:
        full = strip(path)
        self._refuse_root(full)
        self._remove_directory(full, may_remain=False)

    def rm_file(self, path: str) -> None:
        full = strip(path)
        with as_os_errors(full):
            location = self._locations.find(full)
            location.volume.delete(location.path)
        self.invalidate_cache(full)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the listings that a change at `path` may have made wrong, all without a path."""
        super().invalidate_cache(path)
        if path is None:
            self.dircache.clear()
            return
        full = strip(path)
        for known in list(self.dircache):
            # Parents may have been made by the same change.
            if known == full or full.startswith(f"{known.rstrip('/')}/"):
                self.dircache.pop(known, None)
        for known in list(self.dircache):
            if known.startswith(f"{full}/"):
                self.dircache.pop(known, None)

    def _list(self, path: str) -> list[Info]:
        with as_os_errors(path):
            if self._locations.is_above_all(path):
                return [self.info("/Volumes")]
            location = self._locations.find(path)
            try:
                entries = list(list_directory(location.volume, location.path))
            except NotADirectory:
                entries = [location.volume.stat(location.path)]
            infos = [self._info_of(location.full(entry.path), entry) for entry in entries]
            return sorted(infos, key=lambda info: str(info["name"]))

    def _listed(self, path: str) -> list[Info] | None:
        """The listing that is kept."""
        kept: list[Info] | None = self.dircache.get(path)
        return None if kept is None else [dict(info) for info in kept]

    def _info_or_none(self, path: str, **kwargs: Any) -> Info | None:
        try:
            return self.info(path, **kwargs)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _remove_directory(self, path: str, *, may_remain: bool) -> None:
        with as_os_errors(path):
            location = self._locations.find(path)
            try:
                location.volume.remove_directory(location.path)
            except DirectoryNotEmpty:
                if not may_remain:
                    raise
        self.invalidate_cache(path)

    def _refuse_root(self, path: str) -> None:
        if self._locations.is_root(path):
            reason = "a volume, and what is above it, can be removed in Unity Catalog only"
            raise PermissionError(EPERM, reason, path)
