"""Writes container images as docker-archive files, without a container engine.

An archive is a tar with one tar for each layer, one JSON for each image and a manifest; several
images in one archive share layers. `images.py` says what is in them; `ctr images import`, `kind
load image-archive` and `docker load` read them.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Entry", "Image", "Layer", "Link", "cached_layer", "tree", "write_archive"]

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Link:
    """A symbolic link's target."""

    target: str


@dataclass(frozen=True)
class Entry:
    """One path in a layer: a file of this machine, its content, a link, or (None) a directory."""

    name: str
    source: Path | bytes | Link | None
    mode: int = 0o755
    mtime: int = 0


@dataclass(frozen=True)
class Layer:
    """A tar of files and its SHA-256, by which an image refers to it."""

    path: Path
    digest: str


@dataclass(frozen=True, kw_only=True)
class Image:
    """A named image: layers from the lowest to the topmost, and how it is run."""

    name: str
    layers: tuple[Layer, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    """Number of the user that runs it; root if empty."""


def tree(folder: Path, prefix: str, *, skip: frozenset[str] = frozenset()) -> Iterator[Entry]:
    """Entries for everything below `folder`, named below `prefix`, in a stable order.

    A file or folder whose name is in `skip` is left out with what is below it. Times are kept, or
    Python would not use the compiled files that lie beside its modules.
    """
    for path in sorted(folder.iterdir()):
        if path.name in skip:
            continue
        name = f"{prefix}/{path.name}"
        status = path.lstat()
        if path.is_symlink():
            yield Entry(name, Link(str(path.readlink())))
        elif path.is_dir():
            yield Entry(name, None)
            yield from tree(path, name, skip=skip)
        elif path.is_file():
            # Readable by any user: the image runs under user ids that this machine does not know.
            mode = 0o755 if status.st_mode & 0o100 else 0o644
            yield Entry(name, path, mode, int(status.st_mtime))


class _HashingWriter(io.RawIOBase):
    """A file that knows the digest of what was written to it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        self._digest.update(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def cached_layer(path: Path, entries: Iterable[Entry]) -> Layer:
    """The layer at `path`, written from `entries` unless it is there; its name says what is in
    it."""
    digest_path = path.with_suffix(".sha256")
    if digest_path.exists():
        path.touch()  # so that what is used is not forgotten
        digest_path.touch()
    else:
        partial = path.with_suffix(".partial")
        with _HashingWriter(partial) as raw:
            with tarfile.open(fileobj=raw, mode="w|", bufsize=_BLOCK_BYTES) as tar:
                _add(tar, entries)
            digest = raw.hexdigest()
        partial.rename(path)
        digest_path.write_text(digest)
    return Layer(path, digest_path.read_text())


def _add(tar: tarfile.TarFile, entries: Iterable[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            continue  # the first one counts; folders come again and again
        seen.add(entry.name)
        info = tarfile.TarInfo(entry.name)
        info.mode, info.mtime = entry.mode, entry.mtime
        match entry.source:
            case None:
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
            case Link(target):
                info.type, info.linkname = tarfile.SYMTYPE, target
                tar.addfile(info)
            case bytes() as content:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            case path:
                with path.open("rb") as file:
                    info.size = path.stat().st_size
                    tar.addfile(info, file)


def write_archive(path: Path, images: Iterable[Image]) -> None:
    """Write `images` to `path`, atomically; a layer they share is in it once."""
    partial = path.with_suffix(".partial")
    manifest: list[dict[str, object]] = []
    with tarfile.open(partial, "w") as tar:
        written: set[str] = set()
        for image in images:
            for layer in image.layers:
                if layer.digest not in written:
                    written.add(layer.digest)
                    tar.add(layer.path, arcname=f"{layer.digest}.tar")
            configuration = _configuration(image)
            name = f"{hashlib.sha256(configuration).hexdigest()}.json"
            if name not in written:
                written.add(name)
                _add(tar, [Entry(name, configuration, 0o644)])
            layers = [f"{layer.digest}.tar" for layer in image.layers]
            manifest.append({"Config": name, "RepoTags": [image.name], "Layers": layers})
        _add(tar, [Entry("manifest.json", json.dumps(manifest).encode(), 0o644)])
    partial.rename(path)


def _configuration(image: Image) -> bytes:
    run: dict[str, object] = {
        "Env": [f"{name}={value}" for name, value in image.environment.items()],
        "Entrypoint": list(image.entrypoint),
        "Cmd": list(image.command),
        "User": image.user,
    }
    return json.dumps(
        {
            "architecture": _ARCHITECTURES[platform.machine()],
            "os": "linux",
            "config": {key: value for key, value in run.items() if value},
            "rootfs": {
                "type": "layers",
                "diff_ids": [f"sha256:{layer.digest}" for layer in image.layers],
            },
        }
    ).encode()
