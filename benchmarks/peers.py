"""The programs that a mount is compared with, and the S3 server that all of them mount.

rclone (MIT) and s3fs (GPL-2.0) are run as the distribution has them, `apt install rclone s3fs`;
nothing of theirs is part of this project. versitygw (Apache-2.0) is built from its Go module, as
for the tests. fuse4dbricks (MIT), which mounts volumes of Unity Catalog, gets an environment of its
own in the cache folder, and so does databricks-sdk-air (proprietary), which is run as it is. What
is not installed is left out. Called by `mount_peers` and `checkpoints`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from measure import Sample, Timing, say
from places import ROOT, Mount, Store, end_process, mounted, sample_with, wait_until
from tests.external.s3_server import BUCKET, running_s3_server

from trainmount_fuse.session.mounting import find_mount, unmount

__all__ = [
    "AIR",
    "BUCKET_URL",
    "FUSE4DBRICKS",
    "S3FS",
    "AnyMount",
    "Bucket",
    "Peer",
    "PeerMount",
    "air_python",
    "below_volumes",
    "delaying",
    "mounted_by_fuse4dbricks",
    "mounted_side_by_side",
    "serving_bucket",
    "tag_object",
]

BUCKET_URL: Final = f"s3://{BUCKET}"

_DELAY: Final = Path(__file__).with_name("delay.py")


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A running S3 server and the directory that it serves as the bucket of `BUCKET_URL`."""

    endpoint: str
    access_key: str
    secret_key: str
    directory: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """What the client, the mount and the peers find the server by."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.endpoint,
            "RCLONE_S3_PROVIDER": "Other",
            "RCLONE_S3_ENV_AUTH": "true",
            "RCLONE_S3_REGION": "us-east-1",
            "RCLONE_S3_ENDPOINT": self.endpoint,
            # None of a configuration that this machine may have.
            "RCLONE_CONFIG": "/dev/null",
        }


@contextmanager
def serving_bucket(folder: Path) -> Iterator[Bucket]:
    """An S3 server of its own process with an empty bucket below `folder`."""
    folder.mkdir(parents=True)
    with running_s3_server(folder) as server:
        yield Bucket(
            endpoint=server.endpoint,
            access_key=server.access_key,
            secret_key=server.secret_key,
            directory=server.directory / BUCKET,
        )


@contextmanager
def delaying(bucket: Bucket, milliseconds: float, folder: Path) -> Iterator[Bucket]:
    """The same bucket at an endpoint where every request takes so much longer to arrive."""
    folder.mkdir(parents=True)
    ready, log = folder / "ready", folder / "log"
    command = [sys.executable, str(_DELAY), bucket.endpoint.removeprefix("http://")]
    with log.open("wb") as output:
        relay = subprocess.Popen(
            [*command, str(milliseconds), str(ready)], stdout=output, stderr=output
        )
    try:
        wait_until(ready.exists, relay, log, "the relay")
        yield replace(bucket, endpoint=f"http://{ready.read_text()}")
    finally:
        end_process(relay)


def tag_object(path: Path) -> None:
    """Let the server know a file that was put into its directory as an object with an ETag; hard
    links share it.
    """
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    os.setxattr(path, "user.etag", digest.encode())


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A program that mounts a bucket, with options."""

    name: str
    program: str
    command: Callable[[Bucket, Path, Path], Sequence[str]]
    """Of the bucket, the mountpoint and the directory of its cache; stays in the foreground."""


def _rclone(*options: str) -> Callable[[Bucket, Path, Path], Sequence[str]]:
    def command(_bucket: Bucket, path: Path, cache: Path) -> Sequence[str]:
        mount = ("rclone", "mount", f":s3:{BUCKET}", str(path), "--cache-dir", str(cache))
        return [*mount, "--vfs-cache-mode", "full", *options]

    return command


def _s3fs(bucket: Bucket, path: Path, cache: Path) -> Sequence[str]:
    options = (
        f"url={bucket.endpoint}",
        "use_path_request_style",
        f"use_cache={cache}",
        # Objects that others wrote have no mode.
        "complement_stat",
        # Page cache across opens, and a name that was not there is believed for as long as others.
        "kernel_cache",
        "enable_noobj_cache",
        "parallel_count=8",
        "multipart_size=10",
        "multireq_max=20",
        "max_stat_cache_size=200000",
    )
    return ["s3fs", BUCKET, str(path), "-f", *(f"-o{option}" for option in options)]


RCLONE: Final = Peer(
    name="rclone mount, `--vfs-cache-mode full`", program="rclone", command=_rclone()
)
"""Nothing else said: names are believed for five minutes."""

RCLONE_TUNED: Final = Peer(
    name="rclone mount, tuned",
    program="rclone",
    command=_rclone(
        # "It is recommended that --buffer-size is not set too large and --vfs-read-ahead is set
        # large if required."
        "--vfs-read-ahead=128Mi",
        "--vfs-read-chunk-size=32Mi",
        "--max-read-ahead=1Mi",
        # On S3 the time of a file is one more request, and so is each look for a newer version.
        "--no-modtime",
        "--vfs-fast-fingerprint",
        "--no-checksum",
        "--dir-cache-time=1h",
        "--attr-timeout=1m",
        "--transfers=8",
    ),
)
"""What its documentation offers for data that nobody changes."""

S3FS: Final = Peer(name="s3fs, `use_cache`", program="s3fs", command=_s3fs)


FUSE4DBRICKS: Final = "fuse4dbricks 0.7.5"
_FUSE4DBRICKS_PACKAGE: Final = "fuse4dbricks==0.7.5"

AIR: Final = "databricks-sdk-air 0.1.1"
_AIR_PACKAGE: Final = "databricks-sdk-air==0.1.1"
# What its extra `data` brings, but for torch, which is this environment's.
_AIR_NEEDS: Final = ("mlflow-skinny>=2.17,<4", "sqlalchemy", "alembic")

_INSTALL_SECONDS: Final = 300


@dataclass(frozen=True, kw_only=True)
class PeerMount:
    """A peer's mount, as far as `places.Mount` is measured."""

    path: Path
    cache: Path
    daemon_pid: int

    def sample(self, measure: Callable[[], Timing]) -> Sample:
        """Run something on this mount; with the daemon's peak memory and processor time."""
        return sample_with(self.daemon_pid, measure)


AnyMount = Mount | PeerMount


@contextmanager
def mounted_side_by_side(
    bucket: Bucket, folder: Path, ours: Mapping[str, Sequence[str]]
) -> Iterator[dict[str, AnyMount]]:
    """Our mounts, each with its options, and those of the peers that this machine has; by name,
    ours first.
    """
    with ExitStack() as stack:
        enter = stack.enter_context
        mounts: dict[str, AnyMount] = {}
        for number, (name, options) in enumerate(ours.items()):
            place = folder / f"ours-{number}"
            mounts[name] = enter(mounted(bucket, place, options, source=BUCKET_URL))
        for number, peer in enumerate((RCLONE, RCLONE_TUNED, S3FS)):
            if shutil.which(peer.program) is None:
                say(f"{peer.program} is left out; on Debian: apt install {peer.program}")
                continue
            mounts[peer.name] = enter(_mounted_peer(peer, bucket, folder / f"peer-{number}"))
        yield mounts


@contextmanager
def _mounted_peer(peer: Peer, bucket: Bucket, folder: Path) -> Iterator[PeerMount]:
    """The bucket, mounted by a peer at `folder`/mnt with an empty cache."""
    path, cache, log = folder / "mnt", folder / "cache", folder / "log"
    path.mkdir(parents=True)
    cache.mkdir()
    with log.open("wb") as output:
        process = subprocess.Popen(
            peer.command(bucket, path, cache),
            stdout=output,
            stderr=output,
            env={**_without_ca_bundle(os.environ), **bucket.environment},
        )
    try:
        wait_until(lambda: find_mount(path) is not None, process, log, peer.name)
        yield PeerMount(path=path, cache=cache, daemon_pid=process.pid)
    finally:
        end_process(process)
        while find_mount(path) is not None:
            unmount(path, lazy=True)


@contextmanager
def mounted_by_fuse4dbricks(store: Store, folder: Path) -> Iterator[PeerMount | None]:
    """The volume `ROOT` of the store below fuse4dbricks' mount of all catalogs, with an empty
    cache; None where it cannot be installed.
    """
    program = _fuse4dbricks()
    if program is None:
        say("fuse4dbricks is left out; it takes uv and the package index")
        yield None
        return
    root, cache, log = folder / "mnt", folder / "cache", folder / "log"
    root.mkdir(parents=True)
    command = [str(program), "--workspace", store.url, "--single-principal"]
    command += ["--disk-cache-dir", str(cache), str(root)]
    # It is another environment, and no configuration of this machine counts.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {**store.environment, "HOME": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    path = root / ROOT.removeprefix("/Volumes/")
    try:
        wait_until(
            lambda: find_mount(root) is not None and path.is_dir(), process, log, program.name
        )
        yield PeerMount(path=path, cache=cache, daemon_pid=process.pid)
    finally:
        end_process(process)
        while find_mount(root) is not None:
            unmount(root, lazy=True)


def _fuse4dbricks() -> Path | None:
    """The program in its own environment, which is made where it is not there yet."""
    program = _environment(_FUSE4DBRICKS_PACKAGE, [[_FUSE4DBRICKS_PACKAGE]]) / "fuse4dbricks"
    return program if program.exists() else None


def air_python() -> Path | None:
    """The interpreter of an environment that has the library, and torch of this one; None where it
    cannot be installed.
    """
    programs = _environment(_AIR_PACKAGE, [["--no-deps", _AIR_PACKAGE], list(_AIR_NEEDS)])
    python = programs / "python"
    if not python.exists():
        say(f"{AIR} is left out; it takes uv and the package index")
        return None
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = programs.parent / "lib" / version / "site-packages"
    (site / "torch_of_this.pth").write_text(sysconfig.get_path("purelib"))
    return python


@contextmanager
def below_volumes(directory: Path) -> Iterator[Path | None]:
    """A name of the directory that begins with /Volumes, which databricks-sdk-air insists on; None
    where none can be made.
    """
    link = Path(f"/Volumes-benchmark-{os.getpid()}")
    try:
        link.symlink_to(directory)
    except OSError as error:
        say(f"{AIR} is left out: it takes paths below /Volumes only, and {error}")
        yield None
        return
    try:
        yield link
    finally:
        link.unlink()


def _environment(package: str, installs: Sequence[Sequence[str]]) -> Path:
    """The folder of the programs of an environment of its own, which is made where it is not there
    yet; where that does not go, nothing is there.
    """
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    cache = Path(home) / "trainmount" / "peers"
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{package}-py{sys.version_info.major}.{sys.version_info.minor}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists() and uv is not None:
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            # Relocatable: it moves to its place once it is whole.
            make = [uv, "venv", "--quiet", "--relocatable", "--python", sys.executable]
            install = [uv, "pip", "install", "--quiet", "--python", str(partial / "bin/python")]
            steps = ([*make, str(partial)], *([*install, *packages] for packages in installs))
            if all(_succeeds(step) for step in steps):
                partial.rename(folder)
    return folder / "bin"


def _succeeds(command: Sequence[str]) -> bool:
    try:
        return subprocess.run(command, timeout=_INSTALL_SECONDS, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def _without_ca_bundle(environment: Mapping[str, str]) -> dict[str, str]:
    """rclone does not start with it, and the bucket here is asked without TLS."""
    return {name: value for name, value in environment.items() if name != "AWS_CA_BUNDLE"}
