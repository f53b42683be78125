"""The calls of the matrix, what a cell of it must come to, and the crew that runs cells at once.

A cell is one call with one fault on one of the requests that the call makes. What is looked at
afterwards, in every cell: the outcome and its bytes, the time, the number of requests, the text of
the error, what is at the path, uploads that are left open, connections that are left open, and
whether the same call then works.
"""

from __future__ import annotations

import io
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final

from tests.files.conftest import OPTIONS, ROOT, TOKEN
from tests.files.fault_table import BODIES, FAULTS, Fault
from tests.files.faulty_wire import FaultyWire, Rule

from trainmount_files import (
    AlreadyExists,
    ByteRange,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    PreconditionFailed,
    Unavailable,
    Unsupported,
    VolumeError,
    list_directory,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.transport import TransportOptions
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.settings import ServerSettings
from trainmount_files.transfer import (
    download_file,
    iterate,
    open_reader,
    open_writer,
    upload_file,
    upload_stream,
)

__all__ = ["ROWS", "Cell", "Crew", "Row", "Scene", "all_cells", "leftover_threads"]

OLD: Final = bytes((number * 5 + number // 253) % 256 for number in range(41_000))
NEW: Final = bytes((number * 11 + number // 241) % 256 for number in range(50_000))
RANGE: Final = ByteRange(1_000, 40_000)

ALWAYS: Final = 1 << 30

TIMES: Final = (1, 3, ALWAYS)

THRICE: Final = frozenset({"503", "reset", "lost-reply", "cut-0", "expired-aws"})

CALL_SECONDS: Final = 20.0
"""No call may take longer: deadlines are 0.3 s in cells that can only end by one, and 8 s in those
that must come through.
"""

MOST_REQUESTS: Final = 300

REFUSALS: Final = (InvalidRequest, NotFound, PermissionDenied, Unsupported)


@dataclass
class Scene:
    """Where a cell happens: a directory of its own at a server, a volume through the wire."""

    volume: FilesApiVolume
    path: str
    local: Path
    """A file that holds NEW."""
    served: Path
    """The volume's directory at the server."""

    def on_disk(self, path: str | None = None) -> bytes | None:
        found = self.served / (path or self.path)
        return found.read_bytes() if found.is_file() else None

    def read(self, span: ByteRange = RANGE, version: str | None = None) -> bytes:
        buffer = bytearray(b"\x55" * len(span))
        self.volume.read_into(self.path, span, buffer, version=version)
        return bytes(buffer)


@dataclass(frozen=True)
class Row:
    """One call, and one of the requests it makes."""

    name: str
    call: Callable[[Scene], Any]
    route: str
    expected: Callable[[Scene], Any] | None = None
    """What a success returns; None where the disk tells."""
    writes: bool = False
    """Afterwards NEW is at the path, or what was there before."""
    walks: bool = False
    """There is another way to the same end."""
    may_refuse: bool = False
    """A refusal of this request means that there are no parts: one request does it."""
    after: bool = False
    """The file is stored by then."""
    removes: bool = False
    exclusive: bool = False
    """`overwrite=False`: what was lost on the way cannot be told from another's file."""
    old: bytes | None = OLD
    options: dict[str, Any] = field(default_factory=dict)
    rules: Callable[[], Sequence[Rule]] = tuple
    versioned: bool = True
    """The reader knows which version it wants."""


def _stat(scene: Scene) -> Any:
    found = scene.volume.stat(scene.path)
    return found.size_bytes, found.is_directory


def _page(scene: Scene) -> Any:
    return sorted((e.name, e.size_bytes) for e in list_directory(scene.volume, scene.path + "-dir"))


def _upload(scene: Scene, **kwargs: Any) -> Any:
    with scene.local.open("rb") as source:
        return scene.volume.upload(scene.path, source, len(NEW), **kwargs)


def _by_parts(scene: Scene) -> Any:
    upload = scene.volume.start_upload(scene.path)
    try:
        for number in (2, 1, 3):
            upload.put_part(number, NEW[(number - 1) * 20_000 : number * 20_000])
        return upload.complete()
    finally:
        upload.abort()


def _rename(scene: Scene) -> Any:
    return scene.volume.rename(scene.path, scene.path + "-new")


def _middle(_: Scene) -> bytes:
    return OLD[RANGE.start : RANGE.end]


def _download(scene: Scene) -> bytes:
    """A file in a directory of its own, which is empty again after an error."""
    directory = Path(tempfile.mkdtemp(dir=scene.local.parent))
    try:
        download_file(scene.volume, scene.path, directory / "x", parallelism=3, range_bytes=15_000)
        return (directory / "x").read_bytes()
    except VolumeError:
        assert list(directory.iterdir()) == []
        raise
    finally:
        shutil.rmtree(directory)


def _iterate(scene: Scene) -> bytes:
    return b"".join(iterate(scene.volume, scene.path, block_bytes=15_000, read_ahead=2))


def _seek_and_read(scene: Scene) -> bytes:
    with open_reader(scene.volume, scene.path, block_bytes=15_000, read_ahead=2) as reader:
        reader.seek(20_000)
        end = reader.read(30_000)
        while len(end) < 21_000 and (more := reader.read(30_000)):
            end += more
        reader.seek(0)
        start = b""
        while len(start) < 20_000:
            start += reader.read(20_000 - len(start))
        return start + end


def _write(scene: Scene) -> Any:
    with open_writer(scene.volume, scene.path, part_bytes=16_000, parallelism=2) as writer:
        for start in range(0, len(NEW), 7_000):
            writer.write(NEW[start : start + 7_000])
    return writer.stored


def _stream(scene: Scene) -> Any:
    return upload_stream(scene.volume, scene.path, io.BytesIO(NEW))


SINGLE: Final = {"multipart_threshold_bytes": 1 << 20}
DIRECT: Final = {"direct_read_max_bytes": 1 << 30}


def _versioned(scene: Scene) -> bytes:
    return scene.read(version=scene.volume.stat(scene.path).version)


def _rows() -> list[Row]:
    rows = [
        Row("stat", _stat, "head_file", lambda _: (len(OLD), False)),
        Row(
            "stat a directory",
            lambda s: s.volume.stat(s.path + "-dir").is_directory,
            "head_directory",
            lambda _: True,
        ),
        Row("list", _page, "list_directory", lambda _: [("a", 3), ("b", 5)]),
        Row("read directly", _versioned, "get_file", _middle, options=DIRECT),
        Row(
            "read directly, any version",
            lambda s: s.read(ByteRange(7, 207)),
            "get_file",
            lambda _: OLD[7:207],
            options=DIRECT,
            versioned=False,
        ),
        Row("read by signed URL", _versioned, "create_download_url", _middle, walks=True),
        Row("read by signed URL", _versioned, "presigned_get", _middle, walks=True),
        Row("put", lambda s: s.volume.put(s.path, NEW), "put_file", writes=True),
        Row("put", lambda s: s.volume.put(s.path, NEW), "head_file", writes=True, after=True),
        Row(
            "put a new file",
            lambda s: s.volume.put(s.path, NEW, overwrite=False),
            "put_file",
            writes=True,
            exclusive=True,
            old=None,
        ),
        Row("upload in one", _upload, "put_file", writes=True, options=SINGLE),
        Row("upload in one", _upload, "head_file", writes=True, after=True, options=SINGLE),
        Row(
            "upload a new file",
            lambda s: _upload(s, overwrite=False),
            "complete_upload",
            writes=True,
            exclusive=True,
            old=None,
        ),
    ]
    for name, call, may_refuse in (("upload", _upload, True), ("parts", _by_parts, False)):
        rows += [
            Row(name, call, route, writes=True, may_refuse=may_refuse)
            for route in ("initiate_upload", "create_upload_part_urls", "presigned_put")
        ]
        rows.append(Row(name, call, "complete_upload", writes=True))
        rows.append(Row(name, call, "head_file", writes=True, after=True))
    rows += [
        Row("delete", lambda s: s.volume.delete(s.path), "delete_file", removes=True),
        Row("rename", _rename, "presigned_get", walks=True),
        Row("rename", _rename, "initiate_upload", may_refuse=True),
        Row("rename", _rename, "delete_file"),
        Row(
            "make directory",
            lambda s: s.volume.make_directory(s.path + "-made/x"),
            "make_directory",
        ),
        Row(
            "remove directory",
            lambda s: s.volume.remove_directory(s.path + "-empty"),
            "remove_directory",
        ),
    ]
    reads = {"download_file": _download, "iterate": _iterate, "open_reader": _seek_and_read}
    for name, call in reads.items():
        rows.append(Row(name, call, "head_file", lambda _: OLD))
        rows.append(Row(name, call, "presigned_get", lambda _: OLD, walks=True))
    for name, call in {"open_writer": _write, "upload_stream": _stream}.items():
        for route in ("initiate_upload", "presigned_put", "complete_upload"):
            may_refuse = route != "complete_upload"
            rows.append(Row(name, call, route, writes=True, may_refuse=may_refuse))
    rows.append(
        Row(
            "upload_file", lambda s: upload_file(s.volume, s.local, s.path), "put_file", writes=True
        )
    )
    return rows


ROWS: Final = _rows()

MAKING: Final = frozenset(
    {"put_file", "initiate_upload", "create_upload_part_urls", "presigned_put", "complete_upload"}
    | {"make_directory"}
)
"""Requests that something at the path can stand in the way of."""


@dataclass(frozen=True)
class Cell:
    row: Row
    fault: Fault
    times: int

    def __str__(self) -> str:
        often = "always" if self.times == ALWAYS else f"{self.times}x"
        return f"{self.row.name} | {self.row.route} | {self.fault.name} {often}"

    def outcomes(self) -> set[type[VolumeError] | None]:
        """What may come of it; None is success."""
        row, fault = self.row, self.fault
        error = fault.error
        if error is AlreadyExists and row.route not in MAKING:
            # Nothing was to be made: the conflict is about the request.
            error = InvalidRequest
        if fault.mends or (fault.name == "another-total" and not row.versioned):
            return {None}
        if fault.acts and row.exclusive and row.route == "put_file":
            return {Unavailable}
        if fault.name[:3] == "416" and row.versioned and row.route in BODIES:
            # The size is known, and the range lies within it: the file is another one now.
            error = PreconditionFailed
        if row.walks and error is not PreconditionFailed:
            return {None}
        if row.walks and row.route == "create_download_url":
            return {None}
        if row.may_refuse and error in REFUSALS:
            # The store may well take no parts; one request tells.
            return {None}
        if fault.passes and self.times != ALWAYS:
            return {None}
        if fault.passes and row.route == "complete_upload" and fault.acts:
            # Looked up at the path: it is there.
            return {None}
        return {error}


def all_cells() -> list[Cell]:
    cells = []
    routes: set[str] = set()
    for row in ROWS:
        is_first = row.route not in routes
        routes.add(row.route)
        for fault in FAULTS:
            if fault.routes is not None and row.route not in fault.routes:
                continue
            if "-after-" in fault.name and not is_first:
                # How long to wait is decided in one place, whatever the call.
                continue
            for times in TIMES:
                if times == 3 and fault.name not in THRICE:
                    continue
                if times != 1 and fault.name == "huge":
                    # 33 MiB again and again.
                    continue
                cells.append(Cell(row, fault, times))
    return cells


class Crew:
    """Servers and wires, each used by one cell at a time. Faults wait more than they work, so that
    many run at once.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self._workers: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all = [_Worker(directory / f"worker-{number}") for number in range(size)]
        for worker in self._all:
            self._workers.put(worker)

    def run(self, cells: Sequence[Cell]) -> list[str]:
        """What is wrong, a line for each cell that is."""

        def one(cell: Cell) -> str | None:
            worker = self._workers.get()
            try:
                problems = worker.run(cell)
            finally:
                self._workers.put(worker)
            return f"{cell}: {'; '.join(problems)}" if problems else None

        with ThreadPoolExecutor(len(self._all), thread_name_prefix="cell") as executor:
            return [line for line in executor.map(one, cells) if line is not None]

    def close(self) -> None:
        for worker in self._all:
            worker.close()


class _Worker:
    def __init__(self, directory: Path) -> None:
        served = directory / "served"
        self._served = served / "main" / "default" / "data"
        self._served.mkdir(parents=True)
        self._local = directory / "local"
        self._local.write_bytes(NEW)
        self._server = LocalServer(
            ServerSettings(
                directory=served, token=TOKEN, min_part_bytes=1, fsync=False, num_threads=2
            )
        )
        self._server.__enter__()
        self._wire = FaultyWire(self._server.url)
        self._number = 0

    def close(self) -> None:
        self._wire.close()
        self._server.close()

    def run(self, cell: Cell) -> list[str]:
        self._number += 1
        path = f"cell-{self._number}/file"
        row, fault = cell.row, cell.fault
        target = self._served / path
        for directory in (target.parent, Path(f"{target}-dir"), Path(f"{target}-empty")):
            directory.mkdir()
        Path(f"{target}-dir", "a").write_bytes(b"123")
        Path(f"{target}-dir", "b").write_bytes(b"12345")
        if row.old is not None:
            target.write_bytes(row.old)
        ends_by_deadline = cell.times == ALWAYS and not fault.mends
        options = replace(
            OPTIONS,
            multipart_threshold_bytes=row.options.get("multipart_threshold_bytes", 16 << 10),
            direct_read_max_bytes=row.options.get("direct_read_max_bytes", 0),
            retry=RetryPolicy(
                deadline_seconds=0.3 if ends_by_deadline else 8.0,
                first_delay_seconds=0.02,
                max_delay_seconds=0.1,
                retry_after_jitter_seconds=0.01,
            ),
            transport=TransportOptions(
                inactivity_timeout_seconds=1.0 if fault.name in ("silence", "stall") else 10.0
            ),
        )
        volume = self._open(options)
        scene = Scene(volume, path, self._local, self._served)
        open_before = self._server.statistics()["open_uploads"]
        self._wire.set(
            *row.rules(),
            Rule(
                fault.deed,
                routes=frozenset({row.route}),
                count=cell.times,
                cut_upload=fault.cut_upload,
            ),
        )
        began = monotonic()
        result, error = self._attempt(row, scene)
        seconds = monotonic() - began
        problems = [*self._judge(cell, result, error, scene)]
        if seconds > CALL_SECONDS:
            problems.append(f"took {seconds:.1f} s")
        counts = self._wire.counts()
        if sum(counts.values()) > MOST_REQUESTS:
            problems.append(f"{dict(counts)} requests")
        if self._wire.hits() == 0:
            problems.append("the fault was never met")
        problems += self._judge_again(cell, error, scene)
        volume.close()
        problems += self._leftovers(cell, open_before)
        return problems

    def _open(self, options: FilesApiOptions) -> FilesApiVolume:
        return FilesApiVolume(ROOT, Credentials(host=self._wire.url, token=TOKEN), options)

    def _attempt(self, row: Row, scene: Scene) -> tuple[Any, BaseException | None]:
        try:
            return row.call(scene), None
        except Exception as error:
            return None, error

    def _judge(
        self, cell: Cell, result: Any, error: BaseException | None, scene: Scene
    ) -> list[str]:
        row, fault = cell.row, cell.fault
        problems = []
        allowed = cell.outcomes()
        if (None if error is None else type(error)) not in allowed:
            names = sorted("success" if kind is None else kind.__name__ for kind in allowed)
            problems.append(f"{error!r} instead of {' or '.join(names)}")
        if error is None and row.expected is not None and result != row.expected(scene):
            problems.append(f"wrong result: {str(result)[:80]}")
        if isinstance(error, VolumeError):
            problems += _judge_text(error, scene)
        if row.writes:
            found = scene.on_disk()
            stored = error is None or row.after
            allowed_now = {NEW} if stored else {row.old, NEW} if fault.acts else {row.old}
            if found not in allowed_now:
                size = None if found is None else len(found)
                problems.append(f"{size} bytes are at the path")
            if error is None and result.size_bytes != len(NEW):
                problems.append("the result has another size")
        if row.name == "rename":
            problems += _judge_rename(error, scene)
        return problems

    def _judge_again(self, cell: Cell, error: BaseException | None, scene: Scene) -> list[str]:
        """With the fault gone, the same call on the same volume works."""
        self._wire.set()
        row = cell.row
        if (
            error is None
            or row.exclusive
            or row.removes
            or row.name in ("rename", "remove directory")
        ):
            return []
        result = None
        deadline = monotonic() + CALL_SECONDS
        while True:
            try:
                result = row.call(scene)
                break
            except Unavailable as failure:
                # A busy machine may not answer within a deadline of 0.3 s.
                if monotonic() > deadline:
                    return [f"again: {failure!r}"]
            except Exception as failure:
                return [f"again: {failure!r}"]
        if row.expected is not None and result != row.expected(scene):
            return ["again: wrong result"]
        if row.writes and scene.on_disk() != NEW:
            return ["again: wrong bytes at the path"]
        return []

    def _leftovers(self, cell: Cell, open_before: int) -> list[str]:
        lost = cell.row.route == "initiate_upload"
        deadline = monotonic() + 5
        while True:
            found = self._server.statistics()
            problems = []
            # An upload whose token never arrived can only end by itself.
            if found["open_uploads"] != open_before and not lost:
                problems.append(f"{found['open_uploads'] - open_before} open uploads")
            if found["open_uploads"] == open_before and found["staged_bytes"]:
                problems.append(f"{found['staged_bytes']} staged bytes")
            if self._wire.num_connections:
                problems.append(f"{self._wire.num_connections} connections")
            if not problems or monotonic() > deadline:
                return problems
            sleep(0.01)


def _judge_text(error: VolumeError, scene: Scene) -> list[str]:
    problems = []
    text = str(error)
    if "\n" in text or len(text) > 400:
        problems.append("the text is not one line")
    if not error.path.startswith(scene.path) or not text.startswith(error.operation):
        problems.append(f"the text lacks operation or path: {text}")
    everything = text + repr(error) + repr(error.__cause__) + repr(error.__context__)
    secrets = (TOKEN, "/presigned", "session_token=", "http://", "127.0.0.1")
    problems += [f"the text holds {secret}" for secret in secrets if secret in everything]
    return problems


def _judge_rename(error: BaseException | None, scene: Scene) -> list[str]:
    old, new = scene.on_disk(), scene.on_disk(scene.path + "-new")
    if error is None:
        return [] if (old, new) == (None, OLD) else ["not moved"]
    return [] if new in (None, OLD) and OLD in (old, new) else ["a rename lost bytes"]


def leftover_threads(before: set[threading.Thread]) -> list[str]:
    """Names of threads that were not there before, once those under way have had a moment."""
    deadline = monotonic() + 5
    while True:
        left = [one.name for one in threading.enumerate() if one not in before]
        if not left or monotonic() > deadline:
            return left
        sleep(0.01)
