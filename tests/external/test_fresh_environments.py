"""The wheel of this tree in virtual environments of its own: what comes along, what an import
costs, the oldest versions that are declared, and each extra alone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings

TREE = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
TOKEN = "dapi-0123456789abcdef"

OLDEST = ("databricks-sdk==0.49.0", "urllib3==2.2.0", "certifi==2024.7.4")

NOT_NEEDED = {
    "aiohttp",
    "fsspec",
    "grpcio",
    "kopf",
    "kubernetes",
    "obstore",
    "pyfuse3",
    "torch",
    "trio",
    "typer",
}

LATE = {"certifi", "databricks", "http", "requests", "ssl", "urllib3", "email", "ctypes", "asyncio"}
"""What the first use of a volume brings, and `import trainmount_files` does not."""

IMPORT_SECONDS = 0.25

CORE = """
import sys, tempfile
from pathlib import Path
from trainmount_files import AlreadyExists, ByteRange, NotFound, list_directory, open_volume
from trainmount_files.transfer import download_file, open_writer

volume = open_volume("/Volumes/main/default/data", **eval(sys.argv[1]))
data = bytes(range(256)) * (52 << 12)
with tempfile.TemporaryDirectory() as name:
    local = Path(name, "local")
    local.write_bytes(data)
    with local.open("rb") as source:
        assert volume.upload("dir/large", source, len(data)).size_bytes == len(data) == 52 << 20
    download_file(volume, "dir/large", Path(name, "back"))
    assert Path(name, "back").read_bytes() == data
assert volume.put("dir/small", b"0123456789").size_bytes == 10
buffer = bytearray(4)
volume.read_into("dir/small", ByteRange(3, 7), buffer)
assert buffer == b"3456"
with open_writer(volume, "dir/stream") as writer:
    writer.write(b"abc")
found = {entry.name: entry.size_bytes for entry in list_directory(volume, "dir")}
assert found == {"large": 52 << 20, "small": 10, "stream": 3}, found
assert volume.stat("dir").is_directory
try:
    volume.put("dir/small", b"", overwrite=False)
    raise SystemExit("overwritten")
except AlreadyExists:
    pass
volume.rename("dir/small", "dir/other")
for path in ("dir/other", "dir/large", "dir/stream"):
    volume.delete(path)
volume.remove_directory("dir")
try:
    volume.stat("dir/large")
    raise SystemExit("still there")
except NotFound:
    pass
volume.close()
print("done", "databricks.sdk" in sys.modules)
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the wheel in it."""

    path: Path

    def run(self, code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """A fresh interpreter that sees nothing of this process' environment but what it needs."""
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return subprocess.run(
            [self.path / "bin" / "python", "-c", code, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**kept, **variables},
            cwd=self.path,
        )

    def output(self, code: str, *arguments: str, **variables: str) -> str:
        done = self.run(code, *arguments, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def packages(self) -> set[str]:
        listed = uv("pip", "list", "--format", "json", "--python", str(self.path))
        return {package["name"] for package in json.loads(listed)}


def uv(*arguments: str, cwd: Path | None = None) -> str:
    done = subprocess.run([UV, *arguments], capture_output=True, text=True, timeout=600, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


MakeEnvironment = Callable[..., Environment]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeEnvironment:
    """Makes an environment from the wheel, with an extra and with constraints."""
    place = tmp_path_factory.mktemp("environments")
    # The stubs of the protocols are generated in place while the wheel is built: in a copy.
    copy = place / "tree"
    copy.mkdir()
    for name in ("operator", "fuse", "runtime"):
        shutil.copytree(TREE / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(TREE / name, copy / name)
    uv("build", "--wheel", "--out-dir", str(place / "dist"), str(copy))
    (wheel,) = (place / "dist").glob("*.whl")

    def make(name: str, extra: str = "", pinned: tuple[str, ...] = ()) -> Environment:
        path = place / name
        uv("venv", "--python", sys.executable, str(path))
        target = f"trainmount[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        uv("pip", "install", "--compile-bytecode", "--python", str(path), target, *pinned)
        return Environment(path)

    return make


@pytest.fixture(scope="module")
def plain(make: MakeEnvironment) -> Environment:
    return make("plain")


@pytest.fixture
def host(tmp_path: Path) -> Iterator[str]:
    settings = ServerSettings(
        directory=tmp_path, token=TOKEN, volumes=("main.default.data",), fsync=False
    )
    with LocalServer(settings) as server:
        yield server.url


def test_a_plain_install_brings_nothing_that_only_some_need(plain: Environment) -> None:
    packages = plain.packages()
    assert {"trainmount", "databricks-sdk", "urllib3", "certifi"} <= packages
    assert packages & NOT_NEEDED == set()


def test_the_import_loads_no_client_and_is_quick(plain: Environment) -> None:
    loaded = plain.output(
        "import sys; before = set(sys.modules); import trainmount_files; "
        "print(*sorted(set(sys.modules) - before))"
    ).split()
    assert {name.partition(".")[0] for name in loaded} & LATE == set()
    # Processor time, which other programs on the machine do not lengthen as they do the clock's.
    cost = "import resource; u = resource.getrusage(resource.RUSAGE_SELF); print(u[0] + u[1])"
    bare = sorted(float(plain.output(cost)) for _ in range(7))
    full = sorted(float(plain.output(f"import trainmount_files; {cost}")) for _ in range(7))
    print(f"import trainmount_files: {full[3]:.3f} s, bare interpreter: {bare[3]:.3f} s")
    assert full[3] < IMPORT_SECONDS


def test_everything_works_after_a_plain_install(plain: Environment, host: str) -> None:
    said = plain.output(CORE, repr({"host": host, "token": TOKEN}))
    assert said == "done False\n"


def test_everything_works_with_the_oldest_versions_declared(
    make: MakeEnvironment, host: str, tmp_path: Path
) -> None:
    oldest = make("oldest", pinned=OLDEST)
    # A profile of the environment is the SDK's to read, so that the oldest SDK is used too.
    profiles = tmp_path / "profiles"
    profiles.write_text(f"[old]\nhost = {host}\ntoken = {TOKEN}\n")
    said = oldest.output(
        CORE, "{}", DATABRICKS_CONFIG_FILE=str(profiles), DATABRICKS_CONFIG_PROFILE="old"
    )
    assert said == "done True\n"


def test_the_oldest_versions_tested_are_the_ones_declared() -> None:
    declared = (TREE / "pyproject.toml").read_text()
    for pin in OLDEST:
        name, _, version = pin.partition("==")
        lower_bound = f'"{name}>={version.rpartition(".")[0]}"'
        assert lower_bound in declared


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            "import trainmount_files as t; t.open_volume('s3://bucket/x')",
            "pip install 'trainmount[bucket]'",
        ),
        ("import trainmount_files.filesystem", "pip install 'trainmount[fsspec]'"),
        ("import trainmount_files.server", "pip install 'trainmount[server]'"),
        ("from trainmount_cli.app import main; main()", "pip install 'trainmount[cli]'"),
    ],
)
def test_a_missing_extra_is_named_with_what_to_type(
    plain: Environment, code: str, says: str
) -> None:
    done = plain.run(code)
    assert done.returncode != 0
    assert says in done.stderr.splitlines()[-1]


def test_the_extra_bucket_alone_opens_buckets(make: MakeEnvironment) -> None:
    bucket = make("bucket", "bucket")
    code = (
        "from trainmount_files import open_volume; "
        "print(open_volume('s3://bucket/x', options={'region': 'eu-west-1'}).url)"
    )
    assert bucket.output(code) == "s3://bucket/x\n"
    assert bucket.packages() & NOT_NEEDED == {"obstore"}


def test_the_extra_fsspec_alone_registers_the_filesystem(make: MakeEnvironment) -> None:
    environment = make("fsspec", "fsspec")
    code = "import fsspec; print(fsspec.get_filesystem_class('volumes').__name__)"
    assert environment.output(code) == "VolumesFileSystem\n"
    assert environment.packages() & NOT_NEEDED == {"fsspec"}


def test_the_extra_server_alone_serves(make: MakeEnvironment, tmp_path: Path) -> None:
    environment = make("server", "server")
    code = f"""
from pathlib import Path
from trainmount_files import open_volume
from trainmount_files.server import LocalServer, ServerSettings
settings = ServerSettings(
    directory=Path({str(tmp_path)!r}), token={TOKEN!r}, volumes=("main.default.data",)
)
with LocalServer(settings) as server:
    volume = open_volume("/Volumes/main/default/data", host=server.url, token={TOKEN!r})
    print(volume.put("a", b"123").size_bytes)
    volume.close()
"""
    assert environment.output(code) == "3\n"
    assert environment.packages() & NOT_NEEDED == {"aiohttp"}
