"""What the verbs of fsspec do over every kind of volume."""

from __future__ import annotations

import errno
import io
import os
import pickle
import uuid
from datetime import UTC, datetime
from pathlib import Path

import fsspec
import pytest
from tests.files.conftest import ROOT, TOKEN
from tests.files.fsspec_over import over

from trainmount_files import (
    AlreadyExists,
    DirectoryNotEmpty,
    NotFound,
    PreconditionFailed,
    Volume,
    VolumeError,
)
from trainmount_files.bucket import BucketVolume, Location
from trainmount_files.filesystem import VolumesFileSystem
from trainmount_files.server import LocalServer
from trainmount_files.server.faults import Fault

ODD_NAMES = ["file[1].txt", "file1.txt", "file?", "a*b", "axb", "[!a]", "a b+%20#c"]


@pytest.fixture
def fs(volume: Volume) -> VolumesFileSystem:
    return over(volume)


@pytest.fixture
def named(server: LocalServer) -> VolumesFileSystem:
    """Of all volumes of a server, by their full paths."""
    return VolumesFileSystem(host=server.url, token=TOKEN, skip_instance_cache=True)


def cause(error: pytest.ExceptionInfo[BaseException]) -> type:
    return type(error.value.__cause__)


@pytest.mark.parametrize(
    "written",
    [
        "/Volumes/c/s/v/a",
        "volumes:///Volumes/c/s/v/a",
        "volumes://Volumes/c/s/v/a/",
        "volumes:/Volumes/c/s/v/a",
        "dbfs:/Volumes/c/s/v//a",
    ],
)
def test_every_spelling_of_a_path_is_one_path(written: str) -> None:
    fs = VolumesFileSystem()
    assert fs._strip_protocol(written) == "/Volumes/c/s/v/a"
    assert fs._strip_protocol([written, Path("/x")]) == ["/Volumes/c/s/v/a", "/x"]
    assert fs.unstrip_protocol(written) == "volumes:///Volumes/c/s/v/a"
    assert VolumesFileSystem._get_kwargs_from_urls(written) == {}


def test_fsspec_finds_the_filesystem_by_its_protocol(named: VolumesFileSystem) -> None:
    host = named.storage_options["host"]
    url = f"volumes://{ROOT}/new/file"
    with fsspec.open(url, "wb", host=host, token=TOKEN) as file:
        file.write(b"content")
    fs, path = fsspec.url_to_fs(url, host=host, token=TOKEN)
    assert (type(fs), path) == (VolumesFileSystem, f"{ROOT}/new/file")
    assert fs.cat_file(path) == b"content"


def test_what_is_above_a_volume_is_listed(named: VolumesFileSystem) -> None:
    named.pipe_file(f"{ROOT}/file", b"1")
    assert named.ls("/", detail=False) == ["/Volumes"]
    assert named.ls("volumes://", detail=False) == ["/Volumes"]
    assert named.ls("/Volumes", detail=False) == ["/Volumes/main"]
    assert named.ls("/Volumes/main/default", detail=False) == [ROOT]
    assert named.find("/Volumes/main") == [f"{ROOT}/file"]
    assert named.glob("/Volumes/*/*/*/f*") == [f"{ROOT}/file"]
    assert named.isdir("/Volumes/main/default")
    assert not named.exists("/Volumes/other")
    assert not named.exists("/elsewhere/file")
    with pytest.raises(OSError, match="made in Unity Catalog"):
        named.makedirs("/Volumes/main/new")


@pytest.mark.parametrize("path", ["/Volumes/main/default/data", "/Volumes/main", "/Volumes", "/"])
def test_the_root_of_a_volume_is_never_removed(named: VolumesFileSystem, path: str) -> None:
    named.pipe_file(f"{ROOT}/file", b"1")
    for remove in (lambda: named.rm(path, recursive=True), lambda: named.rmdir(path)):
        with pytest.raises(PermissionError, match="Unity Catalog only"):
            remove()
    assert named.cat_file(f"{ROOT}/file") == b"1"


def test_a_file_is_described_alike_by_itself_and_in_its_directory(fs: VolumesFileSystem) -> None:
    before = datetime.now(UTC).timestamp() - 2
    fs.pipe_file("/dir/file", b"12345")
    info = fs.info("/dir/file")
    (listed,) = fs.ls("/dir")
    assert {name: info[name] for name in ("name", "size", "type")} == {
        "name": "/dir/file",
        "size": 5,
        "type": "file",
    }
    assert listed["version"] == info["version"] == info["ETag"]
    assert before < fs.modified("/dir/file").timestamp() < before + 60
    assert fs.ls("/dir/file", detail=False) == ["/dir/file"]
    assert fs.info("/dir")["type"] == "directory"
    assert fs.du("/", total=False) == {"/dir/file": 5}
    assert (fs.size("/dir/file"), fs.sizes(["/dir/file"])) == (5, [5])


def test_a_changed_file_has_another_key(fs: VolumesFileSystem) -> None:
    fs.pipe_file("/file", b"1")
    before = fs.ukey("/file"), fs.checksum("/file")
    assert before == (fs.ukey("file"), fs.checksum("/file"))
    fs.pipe_file("/file", b"22")
    assert fs.ukey("/file") != before[0]
    assert fs.checksum("/file") != before[1]


def test_what_is_asked_first_does_not_change_the_answers(fs: VolumesFileSystem) -> None:
    fs.pipe_file("/dir/file", b"1")
    for path, is_file, is_dir in [
        ("/dir/file", True, False),
        ("/dir", False, True),
        ("/dir/none", False, False),
        ("/dir/file/none", False, False),
    ]:
        for _ in range(2):
            assert (fs.isfile(path), fs.isdir(path), fs.exists(path)) == (
                is_file,
                is_dir,
                is_file or is_dir,
            )
            assert (fs.isdir(path), fs.isfile(path)) == (is_dir, is_file)


@pytest.mark.parametrize("cached", [False, True])
def test_a_name_that_is_both_a_file_and_a_directory_is_the_file(cached: bool) -> None:
    fs = over(bucket_with_both(), use_listings_cache=cached)
    for _ in range(2):
        assert (fs.isfile("/p"), fs.isdir("/p")) == (True, False)
        assert fs.cat_file("/p") == b"file"
        assert {(info["name"], info["type"]) for info in fs.ls("/")} == {
            ("/p", "file"),
            ("/p", "directory"),
        }
        assert fs.find("/") == ["/p", "/p/f"]
    fs.rm("/p/f")
    assert fs.find("/") == ["/p"]


def bucket_with_both() -> BucketVolume:
    volume = BucketVolume(Location("memory", uuid.uuid4().hex, ""))
    volume.put("p/f", b"below")
    # As another program would.
    opened = volume._here("put").opened
    opened.library.put(opened.store, "p", b"file")
    return volume


@pytest.mark.parametrize("path", ["/missing", "/missing/file", "/dir/missing"])
def test_nothing_there_is_a_file_not_found(fs: VolumesFileSystem, path: str) -> None:
    fs.makedirs("/dir")
    calls = [fs.info, fs.ls, fs.cat_file, fs.open, fs.rm_file, fs.rmdir, fs.rm, fs.size, fs.head]
    for call in calls:
        with pytest.raises(FileNotFoundError) as error:
            call(path)
        assert isinstance(error.value.__cause__, NotFound)
        assert path in str(error.value)
    with pytest.raises(FileNotFoundError):
        fs.rm(path, recursive=True)
    assert fs.find(path) == []
    assert not fs.exists(path)


def test_errors_are_the_operating_systems(fs: VolumesFileSystem) -> None:
    fs.pipe_file("/dir/file", b"1")
    with pytest.raises(IsADirectoryError):
        fs.open("/dir")
    with pytest.raises(IsADirectoryError):
        fs.cat_file("/dir")
    with pytest.raises(IsADirectoryError):
        fs.rm("/dir")
    with pytest.raises(NotADirectoryError):
        fs.rmdir("/dir/file")
    with pytest.raises(OSError, match="remove directory") as error:
        fs.rmdir("/dir")
    assert (cause(error), error.value.errno) == (DirectoryNotEmpty, errno.ENOTEMPTY)
    with pytest.raises(FileExistsError):
        fs.makedirs("/dir")
    with pytest.raises(FileExistsError):
        fs.makedirs("/dir/file", exist_ok=True)
    with pytest.raises(FileExistsError):
        fs.mkdir("/dir")
    with pytest.raises(FileNotFoundError):
        fs.mkdir("/none/dir", create_parents=False)
    with pytest.raises(OSError, match=r"without empty, '\.' or '\.\.' names"):
        fs.info("/dir/../file")
    with pytest.raises(FileExistsError) as exists:
        fs.pipe_file("/dir/file", b"2", mode="create")
    assert cause(exists) is AlreadyExists
    fs.makedirs("/dir", exist_ok=True)
    fs.rm_file("/dir/file")


@pytest.mark.parametrize("mode", ["ab", "a", "r+b", "r+"])
def test_append_and_writes_in_place_are_refused(fs: VolumesFileSystem, mode: str) -> None:
    with pytest.raises(io.UnsupportedOperation, match="neither append nor writes in place"):
        fs.open("/file", mode)


def test_a_refused_identity_is_a_permission_error(
    named: VolumesFileSystem, server: LocalServer
) -> None:
    named.pipe_file(f"{ROOT}/file", b"1")
    stranger = VolumesFileSystem(host=server.url, token="wrong", skip_instance_cache=True)
    for call in (stranger.exists, stranger.isdir, stranger.cat_file, stranger.find):
        with pytest.raises(PermissionError):
            call(f"{ROOT}/file")
    server.inject(Fault(route="head_file", status=403))
    with pytest.raises(PermissionError):
        named.info(f"{ROOT}/file")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_name_is_taken_as_it_is(fs: VolumesFileSystem, tmp_path: Path, name: str) -> None:
    contents = {f"/dir/{each}": each.encode() for each in ODD_NAMES}
    fs.pipe(contents)
    path = f"/dir/{name}"
    with fs.open(path) as file:
        assert file.read() == name.encode()
    assert fs.cat(path) == name.encode()
    fs.get(path, str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == name.encode()

    (tmp_path / name).write_bytes(b"from here")
    (tmp_path / "file1.txt").write_bytes(b"other")
    fs.put(str(tmp_path / name), "/put/")
    fs.put(str(tmp_path / name), "/copy")
    assert fs.find("/put") == [f"/put/{name}"]
    assert fs.cat_file("/copy") == (tmp_path / name).read_bytes()
    fs.cp(path, "/second/")
    assert fs.find("/second") == [f"/second/{name}"]

    fs.rm(path, recursive=True)
    left = dict(contents)
    del left[path]
    assert fs.cat("/dir", recursive=True) == left
    fs.rm("/dir", recursive=True)
    assert not fs.exists("/dir")


def test_a_pattern_matches_where_nothing_has_its_name(fs: VolumesFileSystem) -> None:
    fs.pipe({"/dir/a1": b"1", "/dir/a2": b"2", "/dir/sub/a3": b"3", "/dir/b": b"4"})
    assert fs.glob("/dir/a*") == ["/dir/a1", "/dir/a2"]
    assert fs.glob("/dir/**/a?") == ["/dir/a1", "/dir/a2", "/dir/sub/a3"]
    assert fs.cat("/dir/a*") == {"/dir/a1": b"1", "/dir/a2": b"2"}
    fs.rm("/dir/a*")
    assert fs.find("/dir") == ["/dir/b", "/dir/sub/a3"]
    with pytest.raises(FileNotFoundError):
        fs.rm("/dir/a*")


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_directory_is_copied_into_one_that_is_there(
    fs: VolumesFileSystem, tmp_path: Path, slash: str
) -> None:
    (tmp_path / "src" / "empty").mkdir(parents=True)
    (tmp_path / "src" / "a").write_bytes(b"1")
    fs.pipe_file("/src/a", b"1")
    fs.makedirs("/src/empty")
    trees: list[set[str]] = []
    for copy, root in [
        (lambda: fs.put(f"{tmp_path}/src{slash}", "/put", recursive=True), "/put"),
        (lambda: fs.cp(f"/src{slash}", "/cp", recursive=True), "/cp"),
    ]:
        for _ in range(2):
            copy()
            trees.append({path.removeprefix(root) for path in fs.find(root, withdirs=True)})
    for _ in range(2):
        fs.get(f"/src{slash}", str(tmp_path / "get"), recursive=True)
        found = (tmp_path / "get").rglob("*")
        trees.append({""} | {str(path).removeprefix(f"{tmp_path}/get") for path in found})
    once = {"", "/a", "/empty"}
    twice = once if slash else once | {"/src", "/src/a", "/src/empty"}
    assert trees == [once, twice] * 3


def test_a_file_put_into_a_missing_directory_makes_it(
    fs: VolumesFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"1")
    fs.put(str(tmp_path / "f"), "/new/")
    assert fs.find("/", withdirs=True) == ["/", "/new", "/new/f"]
    fs.get("/new/f", f"{tmp_path}/local/")
    assert (tmp_path / "local" / "f").read_bytes() == b"1"


def test_a_link_to_a_directory_is_named_and_not_copied_as_an_empty_one(
    fs: VolumesFileSystem, tmp_path: Path
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a").write_bytes(b"1")
    (tmp_path / "src" / "link").symlink_to(tmp_path)
    with pytest.raises(IsADirectoryError, match="src/link"):
        fs.put(f"{tmp_path}/src", "/dst", recursive=True)
    assert fs.find("/") == []
    (tmp_path / "src" / "link").unlink()
    (tmp_path / "src" / "b").symlink_to(tmp_path / "src" / "a")
    (tmp_path / "whole").symlink_to(tmp_path / "src")
    fs.put(f"{tmp_path}/whole", "/dst", recursive=True)
    assert fs.cat("/dst", recursive=True) == {"/dst/a": b"1", "/dst/b": b"1"}


def test_files_and_directories_are_moved(fs: VolumesFileSystem) -> None:
    fs.pipe({"/a/x": b"1", "/a/sub/y": b"2"})
    fs.mv("/a/x", "/b")
    assert (fs.cat_file("/b"), fs.exists("/a/x")) == (b"1", False)
    fs.mv("/a", "/c", recursive=True)
    assert fs.find("/", withdirs=True) == ["/", "/b", "/c", "/c/sub", "/c/sub/y"]
    with pytest.raises(IsADirectoryError):
        fs.mv("/c", "/d")
    with pytest.raises(ValueError, match="into itself"):
        fs.mv("/c", "/c/sub/c", recursive=True)
    with pytest.raises(FileNotFoundError):
        fs.mv("/none", "/d")
    fs.mv("/c", "/c", recursive=True)
    assert fs.cat("/", recursive=True) == {"/b": b"1", "/c/sub/y": b"2"}


def test_a_file_is_moved_between_volumes(named: VolumesFileSystem, tmp_path: Path) -> None:
    (tmp_path / "served" / "main" / "default" / "other").mkdir()
    named.pipe_file(f"{ROOT}/file", b"1")
    named.mv(f"{ROOT}/file", "/Volumes/main/default/other/file")
    assert named.find("/Volumes/main") == ["/Volumes/main/default/other/file"]


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (None, None),
        (0, 3),
        (100, 150),
        (990, 2000),
        (-10, None),
        (None, -990),
        (-5, -2),
        (7, 3),
        (1000, None),
        (5000, 6000),
        (3, 3),
    ],
)
def test_a_range_is_what_a_slice_is(
    fs: VolumesFileSystem, start: int | None, end: int | None
) -> None:
    content = os.urandom(1000)
    fs.pipe_file("/file", content)
    assert fs.cat_file("/file", start, end) == content[start:end]
    assert fs.cat_ranges(["/file", "/none"], start, end)[0] == content[start:end]


def test_many_ranges_come_in_order_with_their_errors_in_place(fs: VolumesFileSystem) -> None:
    content = os.urandom(1000)
    fs.pipe({"/a": content, "/b": b"12345"})
    got = fs.cat_ranges(["/a", "/b", "/none", "/a"], [0, 1, 0, -10], [10, 3, 1, None])
    assert [got[0], got[1], got[3]] == [content[:10], b"23", content[-10:]]
    assert isinstance(got[2], FileNotFoundError)
    with pytest.raises(FileNotFoundError):
        fs.cat_ranges(["/a", "/none"], 0, 1, on_error="raise")
    assert fs.cat(["/a", "/b"], on_error="omit") == {"/a": content, "/b": b"12345"}
    assert (fs.head("/a", 5), fs.tail("/a", 5)) == (content[:5], content[-5:])
    assert (fs.tail("/a", 0), fs.read_block("/b", 1, 3)) == (b"", b"234")


def test_a_range_of_a_server_that_ignores_ranges_is_exact_or_an_error(
    named: VolumesFileSystem, server: LocalServer
) -> None:
    content = os.urandom(8 << 20)
    named.pipe_file(f"{ROOT}/file", content)
    server.inject(
        Fault(route="get_file", ignore_range=True), Fault(route="presigned_get", ignore_range=True)
    )
    for start, end in [(100, 150), (5 << 20, None)]:
        got = named.cat_ranges([f"{ROOT}/file"], [start], [end], on_error="return")[0]
        assert got == content[start:end] or isinstance(got.__cause__, VolumeError)


def test_a_broken_transfer_goes_on_at_the_first_missing_byte(
    named: VolumesFileSystem, server: LocalServer
) -> None:
    content = os.urandom(1 << 20)
    named.pipe_file(f"{ROOT}/file", content)
    cuts = [
        Fault(route="presigned_get", count=1, cut_after_bytes=1000 * number)
        for number in range(1, 6)
    ]
    server.inject(*cuts)
    assert named.cat_file(f"{ROOT}/file", 1, None) == content[1:]
    server.inject(*cuts)
    with named.open(f"{ROOT}/file") as file:
        assert file.read() == content


def test_a_reader_keeps_to_one_version(fs: VolumesFileSystem) -> None:
    fs.pipe_file("/file", b"a" * (3 << 20))
    with fs.open("/file", block_size=1 << 20) as file:
        first = file.read(10)
        fs.pipe_file("/file", b"b" * ((3 << 20) + 1))
        assert first == b"a" * 10
        file.seek(2 << 20)
        with pytest.raises(OSError, match="changed") as error:
            file.read()
        assert cause(error) is PreconditionFailed


def test_a_file_is_read_as_any_binary_file(fs: VolumesFileSystem) -> None:
    lines = [b"%d\n" % number for number in range(1000)]
    fs.pipe_file("/file", b"".join(lines))
    with fs.open("/file") as file:
        assert (file.size, file.mode, file.path, file.info()["size"]) == (
            len(b"".join(lines)),
            "rb",
            "/file",
            len(b"".join(lines)),
        )
        assert file.full_name == "volumes:///file"
        assert list(file) == lines
        file.seek(-4, 2)
        assert (file.read(), file.tell()) == (b"999\n", file.size)
        file.seek(2)
        assert file.readuntil(b"3") == b"1\n2\n3"
        assert file.readuntil(b"\n") == b"\n"
        buffer = bytearray(4)
        assert (file.readinto(buffer), bytes(buffer)) == (4, b"4\n5\n")
    with fs.open("/file", "r") as text:
        assert text.readlines()[-1] == "999\n"
    assert fs.read_text("/file", encoding="ascii").startswith("0\n1\n")
    with pytest.raises(ValueError, match="closed"):
        file.read()


def test_an_open_file_is_pickled_with_its_version_and_position(
    named: VolumesFileSystem, server: LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABRICKS_HOST", server.url)
    monkeypatch.setenv("DATABRICKS_TOKEN", TOKEN)
    fs = VolumesFileSystem()
    fs.pipe_file(f"{ROOT}/file", b"0123456789")
    with fs.open(f"{ROOT}/file") as file:
        file.seek(4)
        pickled = pickle.dumps(file)
        with pickle.loads(pickled) as copy:
            assert (copy.read(), copy.size) == (b"456789", 10)
        fs.pipe_file(f"{ROOT}/file", b"other bytes")
        with pickle.loads(pickled) as copy, pytest.raises(OSError, match="changed"):
            copy.read()


@pytest.fixture
def counted_listings(
    named: VolumesFileSystem, server: LocalServer
) -> tuple[VolumesFileSystem, LocalServer]:
    fs = VolumesFileSystem(
        host=server.url, token=TOKEN, use_listings_cache=True, skip_instance_cache=True
    )
    return fs, server


def test_kept_listings_forget_what_this_filesystem_changes(
    counted_listings: tuple[VolumesFileSystem, LocalServer], tmp_path: Path
) -> None:
    fs, server = counted_listings
    fs.pipe({f"{ROOT}/dir/a": b"1", f"{ROOT}/dir/b": b"2"})
    (tmp_path / "f").write_bytes(b"1")

    def names() -> list[str]:
        return [path.removeprefix(f"{ROOT}/dir/") for path in fs.ls(f"{ROOT}/dir", detail=False)]

    assert names() == names() == ["a", "b"]
    assert server.statistics()["requests"]["list_directory"] == 1
    assert fs.info(f"{ROOT}/dir/a")["size"] == 1
    assert "head_file" not in server.statistics()["requests"]
    # What a listing does not hold may have come since.
    assert not fs.exists(f"{ROOT}/dir/none")
    for change, after in [
        (lambda: fs.rm(f"{ROOT}/dir/a"), ["b"]),
        (lambda: fs.pipe_file(f"{ROOT}/dir/c", b""), ["b", "c"]),
        (lambda: fs.mv(f"{ROOT}/dir/c", f"{ROOT}/dir/d"), ["b", "d"]),
        (lambda: fs.cp(f"{ROOT}/dir/d", f"{ROOT}/dir/e"), ["b", "d", "e"]),
        (lambda: fs.put(str(tmp_path / "f"), f"{ROOT}/dir/f"), ["b", "d", "e", "f"]),
        (lambda: fs.makedirs(f"{ROOT}/dir/g/h"), ["b", "d", "e", "f", "g"]),
        (lambda: fs.rm(f"{ROOT}/dir/g", recursive=True), ["b", "d", "e", "f"]),
        (lambda: fs.write_text(f"{ROOT}/dir/a", "x"), ["a", "b", "d", "e", "f"]),
    ]:
        change()
        assert names() == after
    (tmp_path / "served/main/default/data/dir/z").write_bytes(b"")
    assert names() == ["a", "b", "d", "e", "f"]
    assert f"{ROOT}/dir/z" in fs.ls(f"{ROOT}/dir", detail=False, refresh=True)
    fs.invalidate_cache()
    assert names() == ["a", "b", "d", "e", "f", "z"]


def test_what_volumes_cannot_do_is_said(fs: VolumesFileSystem) -> None:
    fs.touch("/file")
    assert fs.cat_file("/file") == b""
    with pytest.raises(NotImplementedError):
        fs.touch("/file", truncate=False)
    with pytest.raises(NotImplementedError):
        fs.sign("/file")
    with pytest.raises(NotImplementedError):
        fs.created("/file")
    with pytest.raises(NotImplementedError):
        fs.cat_ranges(["/file"], 0, 1, max_gap=10)
    with pytest.raises(TypeError):
        VolumesFileSystem(tokn="x")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="synchronous"):
        VolumesFileSystem(asynchronous=True)
