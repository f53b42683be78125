"""The unmodified databricks SDK, in the versions that people pin, against a real server process.

Each version has a virtual environment of its own, made once by uv into the cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import urllib3
from tests.environments import environment

from trainmount_files.server.faults import Fault

SUITE = Path(__file__).with_name("sdk_suite.py")
TOKEN = "dapi-token-of-the-tests"
ROOT = "/Volumes/main/default/data"
BASIC = ["check_small_files", "check_directories", "check_listing", "check_odd_names"]
BASIC += ["check_overwrite_false"]
LARGE = ["check_large_files", "check_streams"]

# 0.155 sends a stream in parts however short it is.
_SMALL_STREAMS_IN_PARTS = {"0.162.0": 0, "0.155.0": 1}

Serve = Callable[..., str]


def sdk_python(version: str) -> Path:
    """The interpreter of an environment that has this version of the SDK and what it needs."""
    return environment("sdk", version, [f"databricks-sdk=={version}"]) / "bin" / "python"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(*options)` starts a server of one volume, with 2,500 files in `many`, and returns its
    URL.
    """
    many = tmp_path / "served/main/default/data/many"
    many.mkdir(parents=True)
    for index in range(2500):
        (many / f"entry-{index}").touch()
    with contextlib.ExitStack() as stack:

        def start(*options: str) -> str:
            ready = tmp_path / "ready"
            command = [sys.executable, "-m", "trainmount_files.server", str(tmp_path / "served")]
            command += ["--no-fsync", "--admin", "--ready-file", str(ready), *options]
            environment = {**os.environ, "TRAINMOUNT_SERVE_TOKEN": TOKEN}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            deadline = time.monotonic() + 60
            while not ready.exists():
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            return ready.read_text()

        yield start


def run_suite(python: Path, url: str, scratch: Path, *checks: str) -> list[str]:
    """The names of the checks that passed; an assertion with the traceback if one did not."""
    scratch.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(scratch),  # no ~/.databrickscfg
        "DATABRICKS_HOST": url,
        "DATABRICKS_TOKEN": TOKEN,
    }
    if checks:
        environment["SDK_SUITE_CHECKS"] = ",".join(checks)
    done = subprocess.run(
        [str(python), str(SUITE), ROOT, str(scratch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.split()


def admin(url: str, method: str, target: str, **options: Any) -> Any:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    answer = urllib3.request(method, url + target, headers=headers, **options)
    assert answer.status == 200, answer.data
    return answer.json()


def counts(url: str) -> dict[str, int]:
    """Requests by route; nothing may be left of any upload."""
    statistics = admin(url, "GET", "/admin/statistics")
    assert statistics["staged_bytes"] == 0
    requests = statistics["requests"]
    assert isinstance(requests, dict)
    return requests


@pytest.mark.parametrize("version", ["0.162.0", "0.155.0"])
def test_an_sdk_with_parallel_transfers_moves_files_of_every_size(
    serve: Serve, tmp_path: Path, version: str
) -> None:
    url = serve()

    assert run_suite(sdk_python(version), url, tmp_path / "scratch") == BASIC + LARGE

    requests = counts(url)
    # 60 MiB twice in 10 MiB parts, 55 MiB twice; one more upload is refused at its beginning.
    assert requests["presigned_put"] == 2 * 6 + 2 * 6 + _SMALL_STREAMS_IN_PARTS[version]
    assert requests["complete_upload"] == 4 + _SMALL_STREAMS_IN_PARTS[version]
    assert requests["list_directory"] >= 3 + 4


def test_an_sdk_from_before_them_moves_files_in_one_request(serve: Serve, tmp_path: Path) -> None:
    url = serve()

    assert run_suite(sdk_python("0.49.0"), url, tmp_path / "scratch") == BASIC

    assert "initiate_upload" not in counts(url)


def test_an_sdk_that_knows_resumable_uploads_uses_them(serve: Serve, tmp_path: Path) -> None:
    url = serve("--resumable")

    assert run_suite(sdk_python("0.155.0"), url, tmp_path / "scratch", *LARGE) == LARGE

    requests = counts(url)
    assert requests["presigned_resumable"] == 4 * 6
    assert "presigned_put" not in requests


def test_a_newer_sdk_sends_one_request_where_uploads_are_resumable(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve("--resumable")
    check = "check_large_files"

    assert run_suite(sdk_python("0.162.0"), url, tmp_path / "scratch", check) == [check]

    assert counts(url)["put_file"] == 2


def inject(url: str, *faults: Fault) -> None:
    rules = [
        {name: value for name, value in vars(fault).items() if value != getattr(Fault(), name)}
        for fault in faults
    ]
    admin(url, "PUT", "/admin/faults", body=json.dumps({"seed": 1, "faults": rules}))


# 0.155 sends an empty part after an expired URL in a parallel upload, and gives up a parallel
# download that is cut: its own mistakes, which no server can mend.
_OF_VERSION = {
    "0.162.0": (
        Fault(route="presigned_put", expired_url=True, skip=2, count=1),
        Fault(
            route="presigned_put",
            expired_url=True,
            expired_code="AuthenticationFailed",
            skip=3,
            count=1,
        ),
        Fault(route="presigned_get", path="*/large-True", cut_after_bytes=9_000_000, count=1),
    ),
    "0.155.0": (),
}


@pytest.mark.parametrize("version", ["0.162.0", "0.155.0"])
def test_a_store_on_a_bad_day_costs_an_sdk_time_and_no_bytes(
    serve: Serve, tmp_path: Path, version: str
) -> None:
    url = serve()
    unavailable = {"status": 503, "retry_after": "1", "count": 1}
    expired = {"expired_url": True, "count": 1}
    azure = "AuthenticationFailed"
    inject(
        url,
        *_OF_VERSION[version],
        Fault(route="presigned_put", status=503, skip=5, count=1),
        Fault(route="complete_upload", **unavailable),
        Fault(route="initiate_upload", **unavailable),
        Fault(route="list_directory", **unavailable),
        Fault(route="put_file", **unavailable),
        Fault(route="presigned_get", path="*/large-False", expired_code=azure, **expired),
        Fault(route="presigned_get", path="*/large-False", cut_after_bytes=9_000_000, count=1),
        Fault(route="presigned_get", path="*/streamed", status=503, count=1),
    )

    assert run_suite(sdk_python(version), url, tmp_path / "scratch") == BASIC + LARGE

    # One of them was told to come again.
    assert counts(url)["complete_upload"] == 5 + _SMALL_STREAMS_IN_PARTS[version]


def test_a_resumable_upload_goes_on_after_a_cut_and_a_lost_answer(
    serve: Serve, tmp_path: Path
) -> None:
    url = serve("--resumable")
    inject(
        url,
        Fault(route="presigned_resumable", cut_after_bytes=3_000_000, skip=1, count=1),
        Fault(route="presigned_resumable", lose_reply=True, status=503, skip=3, count=1),
    )

    assert run_suite(sdk_python("0.155.0"), url, tmp_path / "scratch", *LARGE) == LARGE
