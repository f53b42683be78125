"""What a Python program needs in an image: interpreter, packages, shared libraries, our wheel.

Everything comes from the environment that runs this: its interpreter, and the versions of packages
that are installed in it. torch and its libraries for GPUs (5 GB) are not packed: the nodes mount
them (`host_site_packages`).
"""

from __future__ import annotations

import compileall
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rig.archive import Entry, Link, tree
from rig.errors import SetupError
from rig.locations import PROJECT, Progress, digest_of

__all__ = [
    "VERSION",
    "ensure_site_packages",
    "host_site_packages",
    "interpreter",
    "libraries_of",
    "loader_and_libraries",
    "project_key",
    "project_wheel",
    "requirements",
    "torch_packages",
]

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
_LEFT_OUT = frozenset(
    # What no program in a pod uses: 250 MB.
    [
        *("ensurepip", "idlelib", "lib2to3", "test", "tests", "tkinter", "turtledemo"),
        *("dist-packages", "site-packages"),
    ]
)
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x", re.MULTILINE)
_UNPACKED_ENVIRONMENT = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}


def interpreter() -> Iterator[Entry]:
    """The interpreter and its standard library under usr/local, where it finds itself again."""
    program = Path(sys.executable).resolve()
    yield Entry(f"usr/local/bin/{VERSION}", program)
    for alias in ("python", "python3"):
        yield Entry(f"usr/local/bin/{alias}", Link(VERSION))
    standard_library = Path(sysconfig.get_path("stdlib"))
    yield Entry(f"usr/local/lib/{VERSION}", None)
    for entry in tree(standard_library, f"usr/local/lib/{VERSION}", skip=_LEFT_OUT):
        if not entry.name.startswith(f"usr/local/lib/{VERSION}/config-"):
            yield entry


def loader_and_libraries(programs: Iterable[Path]) -> Iterator[Entry]:
    """The dynamic loader and the system's shared libraries that `programs` are linked with."""
    folder = f"usr/lib/{sysconfig.get_config_var('MULTIARCH') or 'x86_64-linux-gnu'}"
    for library in libraries_of(programs):
        real = library.resolve()
        if library.name.startswith("ld-linux"):  # programs name it by its whole path
            yield Entry(f"usr{library}" if library.parts[1] != "usr" else str(library)[1:], real)
        # The loader looks into this folder by itself, so no path has to be set.
        yield Entry(f"{folder}/{library.name}", real)


def libraries_of(programs: Iterable[Path]) -> list[Path]:
    """Shared libraries outside of the packages and the interpreter's folder, sorted by name.

    Two programs that need different files of one name get the first: they come from one system.
    """
    found: dict[str, Path] = {}
    batch = [str(program) for program in programs]
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    for start in range(0, len(batch), 100):
        done = subprocess.run(
            ["ldd", *batch[start : start + 100]], capture_output=True, text=True, env=environment
        )
        for match in _LIBRARY.finditer(done.stdout):
            library = Path(match.group(1))
            if "site-packages" not in library.parts:
                found.setdefault(library.name, library)
    return [found[name] for name in sorted(found)]


def requirements(extras: Iterable[str], *, without: frozenset[str] = frozenset()) -> list[str]:
    """The requirements of the project and of `extras`, through extras that name other extras."""
    project: dict[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
    wanted: set[str] = set()

    def add(texts: Iterable[str]) -> None:
        for text in texts:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", text)
            if own:
                for extra in own.group(1).split(","):
                    add(project["optional-dependencies"][extra.strip()])
            elif re.split(r"[^\w.-]", text)[0] not in without:
                wanted.add(text)

    add(project["dependencies"])
    add([f"{project['name']}[{extra}]" for extra in extras])
    return sorted(wanted)


def _required(wanted: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """What is installed here of `wanted` and of all that it requires, by name."""
    seen = set[tuple[str, str]]()
    waiting = [Requirement(text) for text in wanted]
    found: dict[str, importlib.metadata.Distribution] = {}
    while waiting:
        requirement = waiting.pop()
        extras = requirement.extras or {""}
        if all((requirement.name, extra) in seen for extra in extras):
            continue
        seen |= {(requirement.name, extra) for extra in extras}
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue  # optional, or of another platform
        found[distribution.metadata["Name"]] = distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


def _uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv is None:
        raise SetupError("uv is missing: pip install uv")
    return uv


def _run_uv(*arguments: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in _UNPACKED_ENVIRONMENT}
    done = subprocess.run([_uv(), *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        tail = " | ".join(done.stderr.strip().splitlines()[-5:])
        raise SetupError(f"`uv {arguments[0]} {arguments[1]}` failed: {tail}")


def ensure_site_packages(
    folder: Path, wanted: Iterable[str], progress: Progress
) -> tuple[Path, str]:
    """A folder below `folder` with `wanted` installed and compiled, and its key. Cached by
    versions."""
    wanted = list(wanted)
    # Images run the versions that are installed, and so tested, here; other packages don't count.
    installed = _required(wanted).items()
    constraints = "\n".join(sorted(f"{name}=={found.version}" for name, found in installed))
    key = digest_of([VERSION, *wanted, constraints])
    target = folder / f"site-{key}"
    if not target.is_dir():
        progress(f"installing {len(wanted)} packages for an image")
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        with tempfile.TemporaryDirectory() as temporary:
            limits = Path(temporary, "constraints.txt")
            limits.write_text(constraints)
            where = ("--python", sys.executable, "--target", str(partial))
            _run_uv("pip", "install", "-q", *where, "-c", str(limits), *wanted)
        # Scripts name the interpreter of this machine.
        shutil.rmtree(partial / "bin", ignore_errors=True)
        # A pod's user may not write beside the modules; and the kubernetes client alone takes
        # seconds to compile.
        compileall.compile_dir(partial, quiet=2, workers=0)
        partial.rename(target)
    target.touch()  # so that what is used is not forgotten
    return target, key


def host_site_packages() -> Path:
    """The folder with torch here, which the nodes mount into every container.

    Raises:
        SetupError: torch is not installed.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise SetupError("torch is missing here: install the project with its extra `runtime`")
    return Path(found.origin).parents[1]


def torch_packages() -> list[str]:
    """Names in `host_site_packages` that belong to torch and to what it requires."""
    files = {
        file.parts[0]
        for distribution in _required(["torch"]).values()
        for file in distribution.files or ()
    }
    return sorted(files - {"..", "__pycache__", "bin"})


def _project_files() -> list[Path]:
    build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    files = [PROJECT / "pyproject.toml", *PROJECT.glob("hatch_build.py")]
    for package in build["targets"]["wheel"]["packages"]:
        files += [
            path
            for path in sorted((PROJECT / package).rglob("*"))
            # What the build generates in place follows from the rest.
            if path.is_file() and "__pycache__" not in path.parts and "_pb2" not in path.name
        ]
    return files


def project_key() -> str:
    """A key of the project's own code: the same files, the same key."""
    parts: list[str | bytes] = []
    for path in _project_files():
        parts += [str(path.relative_to(PROJECT)), path.read_bytes()]
    return digest_of(parts)


def project_wheel(prefix: str) -> list[Entry]:
    """The project's wheel, built now, unpacked below `prefix`."""
    with tempfile.TemporaryDirectory() as temporary:
        _run_uv("build", "--wheel", "-q", "--out-dir", temporary, str(PROJECT))
        [wheel] = Path(temporary).glob("*.whl")
        unpacked = Path(temporary, "unpacked")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        compileall.compile_dir(unpacked, quiet=2, stripdir=str(unpacked), prependdir=f"/{prefix}")
        entries = []
        for entry in tree(unpacked, prefix):
            content = entry.source.read_bytes() if isinstance(entry.source, Path) else entry.source
            entries.append(Entry(entry.name, content, entry.mode, entry.mtime))
        return entries
