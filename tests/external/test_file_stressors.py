"""Debian's stress-ng and fio on a mount of the local Files API: every stressor of files that checks
what it reads or that no call fails, and fio's own checksums.

What is left out, and why, stands in LEFT_OUT.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from tests.mount.conftest import FilesServer, MountProcess, make_mounts

SECONDS: Final = int(os.environ.get("TRAINMOUNT_STRESS_SECONDS", "3"))
"""Of each stressor; a long run has 60."""

TIMEOUT_SECONDS: Final = 120 + 10 * SECONDS

STRESSORS: Final[dict[str, list[str]]] = {
    "access": [],
    "chmod": [],
    "dentry": ["--dentries", "64"],
    "dir": ["--dir-dirs", "64"],
    "dirdeep": ["--dirdeep-dirs", "1", "--dirdeep-inodes", "200"],
    "dirmany": [],
    "dup": [],
    "fcntl": [],
    "filename": ["--filename-opts", "posix"],
    "flock": [],
    "fpunch": [],
    "fstat": [],
    "getdent": [],
    "hdd": ["--hdd-bytes", "8m", "--hdd-opts", "wr-rnd,rd-rnd"],
    "iomix": ["--iomix-bytes", "8m"],
    "lease": [],
    "lockf": [],
    "locka": [],
    "lockofd": [],
    "mmap": ["--mmap-file", "--mmap-bytes", "4m"],
    "msync": ["--msync-bytes", "4m"],
    "open": ["--open-max", "64"],
    "readahead": ["--readahead-bytes", "4m"],
    "rename": [],
    "revio": ["--revio-bytes", "4m"],
    "seek": ["--seek-size", "4m"],
    "sendfile": ["--sendfile-size", "1m"],
    "sync-file": ["--sync-file-bytes", "4m"],
    "touch": [],
    "utime": [],
}

LEFT_OUT: Final = {
    "acl": "a volume keeps no access control lists: EOPNOTSUPP",
    "chown": "owner and group of a mount are fixed",
    "fallocate, fiemap, file-ioctl": "a volume has no extents, and no ioctl: EOPNOTSUPP, ENOTTY",
    "link, symlink, metamix": "a volume has no links: EPERM",
    "mknod": "a volume has files and directories only: EPERM",
    "xattr": "a volume keeps no attributes of programs: EOPNOTSUPP",
    "aio, aiol, io-uring": "fio does the same with checksums",
    "copy-file": "copies at least 128 MB, over and over",
    "unlink": "came after Debian 12's stress-ng; `dentry`, `dir` and `open` unlink",
    "inotify, dnotify, fanotify": "work in the kernel, above any file system",
    "verity, bind-mount, chroot, mount": "are about other file systems",
}

FIO_JOBS: Final[dict[str, list[str]]] = {
    "sequential": ["--rw=write", "--bs=256k", "--ioengine=psync"],
    "random": ["--rw=randwrite", "--bs=16k", "--ioengine=psync"],
    "mapped": ["--rw=randwrite", "--bs=16k", "--ioengine=mmap"],
    "read and written at random": ["--rw=randrw", "--bs=4k-64k", "--ioengine=psync"],
    "appended by several": ["--rw=write", "--bs=64k", "--ioengine=psync", "--numjobs=4"],
    "asynchronous": ["--rw=randwrite", "--bs=16k", "--ioengine=libaio", "--iodepth=16"],
}


def _needs(program: str) -> pytest.MarkDecorator:
    missing = shutil.which(program) is None
    return pytest.mark.skipif(missing, reason=f"needs {program}: apt-get install {program}")


pytestmark = [
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/fuse").exists(), reason="needs root and /dev/fuse"
    ),
    pytest.mark.timeout(TIMEOUT_SECONDS + 60),
]


@pytest.fixture(scope="module")
def mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MountProcess]:
    folder = tmp_path_factory.mktemp("stress")
    server = FilesServer(folder)
    server.start("--no-fsync")
    with make_mounts(folder) as start:
        yield start(server.source, environment=server.environment())
    server.stop()


@pytest.fixture
def place(mount: MountProcess, request: Any) -> Iterator[Path]:
    folder = mount.mountpoint / re.sub(r"\W+", "-", request.node.name)
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)
    # Whatever a stressor leaves open or unsent would be there.
    assert not [path.name for path in folder.parent.iterdir()]


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@_needs("stress-ng")
@pytest.mark.parametrize("name", STRESSORS)
def test_stress_ng_finds_nothing_wrong(place: Path, name: str) -> None:
    told = _run(
        [
            "stress-ng",
            f"--{name}",
            "2",
            *STRESSORS[name],
            "--temp-path",
            str(place),
            "--timeout",
            f"{SECONDS}s",
            "--verify",
            "--metrics-brief",
        ],
        place,
    )
    assert "fail:" not in told, told
    # It says so, and exits with 0, where it could do nothing at all.
    assert "skipped: 0" in told or "skipped" not in told, told


@_needs("fio")
@pytest.mark.parametrize("name", FIO_JOBS)
def test_fio_reads_back_what_it_wrote(place: Path, name: str) -> None:
    common = ["fio", "--name=job", f"--directory={place}", "--size=12m", "--verify=crc32c"]
    common += ["--verify_fatal=1", "--do_verify=1", "--end_fsync=1", "--group_reporting"]
    _run([*common, *FIO_JOBS[name]], place)
    # Once more from the store alone, with no page in the kernel.
    _run([*common, *FIO_JOBS[name], "--verify_only"], place)
