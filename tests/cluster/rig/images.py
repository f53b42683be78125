"""The images of the test cluster: pause, busybox and CoreDNS, and the project's own two.

`localhost/trainmount:0.1.0` is operator, driver, mount pods and server;
`localhost/trainmount-runtime:0.1.0` is for training. Both have this machine's Python in /opt/venv;
the project's code is their last layer, so that a change of code writes a small layer only. No
engine and no registry are needed.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from rig.archive import Entry, Image, Layer, Link, cached_layer, tree, write_archive
from rig.binaries import Binaries
from rig.errors import SetupError
from rig.locations import PROJECT, Progress, cache_folder, digest_of, locked
from rig.python_files import (
    VERSION,
    ensure_site_packages,
    host_site_packages,
    interpreter,
    loader_and_libraries,
    project_key,
    project_wheel,
    requirements,
    torch_packages,
)

__all__ = [
    "HOST_PACKAGES_PATH",
    "PAUSE_IMAGE",
    "ensure_project_images",
    "ensure_system_images",
    "project_image",
    "runtime_image",
]

PAUSE_IMAGE = "localhost/pause:1"
HOST_PACKAGES_PATH = "/opt/host-packages"
"""Where nodes mount this machine's packages, read only, for torch."""

_RECIPE = "4"
"""Changes when the layers are made in another way, so that caches of the old way are not used."""

_VENV = "opt/venv"
_SITE = f"{_VENV}/lib/{VERSION}/site-packages"
_PATH = "/opt/venv/bin:/usr/local/bin:/usr/bin:/bin"
_KEPT_ARCHIVES = 3
_KEPT_DAYS = 14
_NOT_IN_RUNTIME = frozenset(
    ["torch", "kopf", "kubernetes", "pyfuse3", "trio", "grpcio", "protobuf", "typer", "rich"]
)


def project_version() -> str:
    """The version in the project's metadata, which is the images' tag."""
    return str(tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"])


def project_image() -> str:
    """The name of the image of operator and driver."""
    return f"localhost/trainmount:{project_version()}"


def runtime_image() -> str:
    """The name of the image that trains."""
    return f"localhost/trainmount-runtime:{project_version()}"


def ensure_system_images(binaries: Binaries, progress: Progress) -> Path:
    """The archive with what a node needs to become ready; from the cache if nothing changed."""
    with _cache(progress) as folder:
        return _system_archive(folder, binaries)


def ensure_project_images(progress: Progress, *, with_torch: bool = False) -> Path:
    """The archive with the project's images, of the code as it is now.

    `with_torch` packs torch too (5 GB), for a cluster whose nodes do not mount it.

    Raises:
        SetupError: a package or program is missing, or the wheel can't be built.
    """
    with _cache(progress) as folder:
        return _project_archive(folder, progress, with_torch=with_torch)


@contextlib.contextmanager
def _cache(progress: Progress) -> Iterator[Path]:
    with locked("images", progress):
        folder = cache_folder() / "images"
        folder.mkdir(exist_ok=True)
        yield folder
        _forget_unused(folder)


def _forget_unused(folder: Path) -> None:
    limit = time.time() - _KEPT_DAYS * 24 * 3600
    for path in folder.iterdir():
        if path.stat().st_mtime < limit:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _system_archive(folder: Path, binaries: Binaries) -> Path:
    busybox = _busybox_layer(folder)
    coredns = cached_layer(
        folder / f"coredns-{binaries.folder.name}.tar",
        [Entry("coredns", binaries.folder / "coredns")],
    )
    wait = "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait; done"
    environment = {"PATH": "/usr/bin:/bin"}
    images = [
        Image(
            name=PAUSE_IMAGE,
            layers=(busybox,),
            environment=environment,
            entrypoint=("/bin/sh", "-c", wait),
        ),
        Image(
            name="localhost/busybox:1", layers=(busybox,), environment=environment, command=("sh",)
        ),
        Image(name="localhost/coredns:1", layers=(busybox, coredns), entrypoint=("/coredns",)),
    ]
    return _archive(folder, "system", images)


def _project_archive(folder: Path, progress: Progress, *, with_torch: bool) -> Path:
    version = project_version()
    common = (_busybox_layer(folder), _interpreter_layer(folder, progress))
    environment = {"PATH": _PATH, "LANG": "C.UTF-8", "PYTHONUNBUFFERED": "1"}
    operator_site = _site_layer(
        folder, requirements(["operator", "csi", "server", "cli"]), progress
    )
    runtime_site = _site_layer(
        folder, requirements(["runtime", "server", "demo"], without=_NOT_IN_RUNTIME), progress
    )
    own = folder / f"project-{_RECIPE}-{project_key()}.tar"
    if not own.exists():
        progress("building the project's wheel for the images")
    project = cached_layer(own, _project_entries())
    torch = (_torch_layer(folder, progress),) if with_torch else ()
    images = [
        Image(
            name=f"localhost/trainmount:{version}",
            layers=(*common, operator_site, project),
            environment=environment,
            command=("python3",),
            user="65534",
        ),
        Image(
            name=f"localhost/trainmount-runtime:{version}",
            layers=(*common, runtime_site, *torch, project),
            environment=environment,
            command=("bash",),
        ),
    ]
    return _archive(folder, "project", images, progress)


def _project_entries() -> Iterator[Entry]:
    """The project's layer; being a generator, it builds the wheel only when it is asked."""
    yield from _folders(_SITE)
    yield from project_wheel(_SITE)


def _archive(
    folder: Path, name: str, images: list[Image], progress: Progress | None = None
) -> Path:
    key = digest_of(
        f"{image.name} {[layer.digest for layer in image.layers]} {image.entrypoint}"
        f" {image.command} {image.user} {dict(image.environment)}"
        for image in images
    )
    path = folder / f"{name}-images-{key}.tar"
    if not path.exists():
        if progress:
            progress(f"writing the {name} images")
        write_archive(path, images)
    path.touch()
    by_age = sorted(folder.glob(f"{name}-images-*.tar"), key=lambda file: -file.stat().st_mtime)
    for old in by_age[_KEPT_ARCHIVES:]:
        old.unlink()
    return path


def _folders(path: str) -> Iterator[Entry]:
    """Entries of `path` and all folders above it."""
    parts = Path(path).parts
    for end in range(1, len(parts) + 1):
        yield Entry("/".join(parts[:end]), None)


def _busybox_layer(folder: Path) -> Layer:
    """A root file system with a shell and the usual small programs, all one static file."""
    found = shutil.which("busybox", path="/usr/bin:/bin")
    if found is None:
        raise SetupError("busybox is missing; run: sudo apt-get install -y busybox-static")
    busybox = Path(found)
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    users = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/tmp:/bin/sh\n"

    def entries() -> Iterator[Entry]:
        for name in (
            "dev",
            "etc",
            "home",
            "mnt",
            "opt",
            "proc",
            "root",
            "run",
            "srv",
            "sys",
            "var",
        ):
            yield Entry(name, None)
        for name in (
            "usr",
            "usr/bin",
            "usr/lib",
            "usr/lib64",
            "usr/local",
            "usr/local/bin",
            "var/lib",
        ):
            yield Entry(name, None)
        for name in ("tmp", "var/tmp"):
            yield Entry(name, None, 0o1777)
        for name in ("bin", "lib", "lib64"):
            yield Entry(name, Link(f"usr/{name}"))
        yield Entry("sbin", Link("usr/bin"))
        yield Entry("usr/sbin", Link("bin"))
        yield Entry("etc/passwd", users, 0o644)
        yield Entry("etc/group", b"root:x:0:\nnobody:x:65534:\n", 0o644)
        yield Entry("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n", 0o644)
        yield Entry("usr/bin/busybox", busybox)
        for applet in applets.stdout.split():
            if applet not in ("busybox", "bash"):
                yield Entry(f"usr/bin/{applet}", Link("busybox"))

    key = digest_of([_RECIPE, busybox.read_bytes()])
    return cached_layer(folder / f"busybox-{key}.tar", entries())


def _interpreter_layer(folder: Path, progress: Progress) -> Layer:
    bash = Path("/bin/bash")
    path = (
        folder / f"interpreter-{_RECIPE}-{digest_of([VERSION, sysconfig.get_path('stdlib')])}.tar"
    )
    if not path.exists():
        progress("packing the interpreter")

    def entries() -> Iterator[Entry]:
        yield from _folders(_SITE)
        yield Entry("usr/bin/bash", bash)
        yield from interpreter()
        extensions = Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")
        torch = host_site_packages() / "torch"
        programs = [bash, Path(sys.executable).resolve(), *extensions]
        yield from loader_and_libraries([*programs, *_extensions(torch)])
        certificates = Path("/etc/ssl/certs/ca-certificates.crt")
        if certificates.exists():
            yield from _folders("etc/ssl/certs")
            yield Entry("etc/ssl/certs/ca-certificates.crt", certificates, 0o644)
        yield Entry(f"{_VENV}/pyvenv.cfg", b"home = /usr/local/bin\n", 0o644)
        yield from _folders(f"{_VENV}/bin")
        for name in ("python", "python3", VERSION):
            yield Entry(f"{_VENV}/bin/{name}", Link(f"/usr/local/bin/{VERSION}"))
        yield from _scripts()
        # A path file and not PYTHONPATH: the image's own packages come first, and what the nodes
        # mount adds only what they lack. A path that is not there is passed over.
        yield Entry(f"{_SITE}/host.pth", f"{HOST_PACKAGES_PATH}\n".encode(), 0o644)

    return cached_layer(path, entries())


def _scripts() -> Iterator[Entry]:
    """The programs that people call by name, as pip would have made them."""
    scripts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in {**scripts, "torchrun": "torch.distributed.run:main"}.items():
        module, function = target.split(":")
        lines = ["#!/opt/venv/bin/python", "import sys", f"from {module} import {function}"]
        text = "\n".join([*lines, f"sys.exit({function}())", ""])
        yield Entry(f"{_VENV}/bin/{name}", text.encode())


def _extensions(folder: Path) -> Iterable[Path]:
    return sorted(
        path for path in folder.rglob("*.so*") if path.is_file() and not path.is_symlink()
    )


def _site_layer(folder: Path, wanted: list[str], progress: Progress) -> Layer:
    site, key = ensure_site_packages(folder, wanted, progress)

    def entries() -> Iterator[Entry]:
        yield from _folders(_SITE)
        yield from tree(site, _SITE, skip=frozenset(["tests"]))
        # Libraries that the interpreter has already are written again: they are the same files.
        yield from loader_and_libraries(_extensions(site))

    return cached_layer(folder / f"site-layer-{_RECIPE}-{key}.tar", entries())


def _torch_layer(folder: Path, progress: Progress) -> Layer:
    names, site = torch_packages(), host_site_packages()
    path = folder / f"torch-{_RECIPE}-{digest_of([VERSION, *names])}.tar"
    if not path.exists():
        progress("packing torch (5 GB)")

    def entries() -> Iterator[Entry]:
        base = HOST_PACKAGES_PATH[1:]
        yield from _folders(base)
        for name in names:
            source = site / name
            if source.is_dir():
                yield Entry(f"{base}/{name}", None)
                yield from tree(source, f"{base}/{name}")
            else:
                yield Entry(f"{base}/{name}", source, 0o644)

    return cached_layer(path, entries())
