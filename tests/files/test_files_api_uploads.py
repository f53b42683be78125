"""Uploads over a bad wire: the whole file at the path, or the old one and an error."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.files.conftest import OPTIONS, ROOT, TOKEN, MakeVolume, Request, Scripted, ScriptedServer

from trainmount_files import (
    AlreadyExists,
    Cancelled,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    TooLarge,
    Unavailable,
    VolumeError,
)
from trainmount_files.files_api import FilesApiVolume
from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.upload import part_size_for
from trainmount_files.retry import RetryPolicy
from trainmount_files.server.embedded import LocalServer
from trainmount_files.server.faults import Fault
from trainmount_files.volume import MIB

DATA = bytes((number * 7 + number // 256) % 256 for number in range(100_000))
PARTS = 7
GIB = 1 << 30


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "local"
    path.write_bytes(DATA)
    return path


def upload(volume: FilesApiVolume, local: Path, **options: Any) -> int:
    with local.open("rb") as source:
        return volume.upload("file", source, len(DATA), **options).size_bytes


HASTY = RetryPolicy(deadline_seconds=0.2, first_delay_seconds=0.01)


def replaced(
    volume: FilesApiVolume, server: ScriptedServer | LocalServer, **options: Any
) -> FilesApiVolume:
    volume.close()
    credentials = Credentials(host=server.url, token=TOKEN)
    return FilesApiVolume(ROOT, credentials, replace(OPTIONS, **options))


def count(server: LocalServer, route: str) -> int:
    return int(server.statistics()["requests"].get(route, 0))


def assert_nothing_is_left(server: LocalServer) -> None:
    statistics = server.statistics()
    assert (statistics["open_uploads"], statistics["staged_bytes"]) == (0, 0)


@pytest.mark.parametrize("route", ["initiate_upload", "create_upload_part_urls", "presigned_put"])
@pytest.mark.parametrize("status", [429, 500, 503])
def test_one_failure_on_the_way_is_ridden_out(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, route: str, status: int
) -> None:
    server.inject(Fault(route=route, status=status, count=1))
    assert upload(remote, local) == len(DATA)
    assert (served / "file").read_bytes() == DATA
    assert_nothing_is_left(server)


def test_a_part_that_was_taken_and_refused_is_sent_whole_again(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path
) -> None:
    server.inject(Fault(route="presigned_put", lose_reply=True, skip=1, count=2))
    assert upload(remote, local) == len(DATA)
    assert (served / "file").read_bytes() == DATA
    assert count(server, "presigned_put") == PARTS + 2


def test_a_small_file_whose_reply_was_lost_is_sent_whole_again(
    remote: FilesApiVolume, server: LocalServer, served: Path
) -> None:
    server.inject(Fault(route="put_file", status=503, lose_reply=True, count=1))
    assert remote.put("file", memoryview(DATA)[:1000]).size_bytes == 1000
    assert (served / "file").read_bytes() == DATA[:1000]
    assert count(server, "put_file") == 2


def test_a_store_that_never_begins_an_upload_leaves_nothing(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path
) -> None:
    server.inject(Fault(route="initiate_upload", status=503))
    volume = replaced(remote, server, retry=HASTY)
    with pytest.raises(Unavailable, match="HTTP 503"):
        upload(volume, local)
    volume.close()
    assert not (served / "file").exists()
    assert count(server, "put_file") == 0


@pytest.mark.parametrize("status", [400, 403, 404, 501])
@pytest.mark.parametrize("route", ["initiate_upload", "presigned_put"])
def test_a_store_that_takes_no_parts_gets_the_file_in_one_request(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, route: str, status: int
) -> None:
    server.inject(Fault(route=route, status=status))
    assert upload(remote, local) == len(DATA)
    assert (served / "file").read_bytes() == DATA
    assert count(server, "put_file") == 1
    assert_nothing_is_left(server)


def test_a_part_that_fails_for_good_stops_the_others_and_aborts(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path
) -> None:
    server.inject(
        Fault(route="presigned_put", status=403, skip=3),
        Fault(route="abort_upload", lose_reply=True, count=1),
    )
    with pytest.raises(PermissionDenied, match="part"):
        upload(remote, local)
    assert not (served / "file").exists()
    assert count(server, "abort_upload") == 2
    assert count(server, "put_file") == 0
    assert_nothing_is_left(server)


def test_an_abort_that_is_refused_does_not_hide_the_error(
    remote: FilesApiVolume,
    server: LocalServer,
    local: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    server.inject(
        Fault(route="presigned_put", status=403, skip=1),
        Fault(route="abort_upload", status=400),
    )
    with pytest.raises(PermissionDenied):
        upload(remote, local)
    assert "An upload could not be aborted" in caplog.text


def test_a_url_that_expired_is_asked_for_again_and_stored_parts_are_not_sent_again(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path
) -> None:
    server.inject(Fault(route="presigned_put", expired_url=True, skip=2, count=2))
    assert upload(remote, local) == len(DATA)
    assert (served / "file").read_bytes() == DATA
    assert count(server, "presigned_put") == PARTS + 2
    # One question for all, and one for each that had ended.
    assert count(server, "create_upload_part_urls") == 1 + 2


def asked_for(request: Request) -> tuple[int, int]:
    question = json.loads(request.body)
    return question["start_part_number"], question["count"]


def store_with_many_urls(
    limit: int, seen: list[str], *, is_reversed: bool = False
) -> Callable[[Request], Scripted]:
    """A store that gives up to `limit` URLs at a time, and refuses to be asked for more."""
    inner = multipart_script([Scripted()], Scripted(headers=OURS), seen)

    def script(request: Request) -> Scripted:
        if not request.target.startswith("/api/2.0/fs/create-upload-part-urls"):
            return inner(request)  # type: ignore[no-any-return]
        first, number = asked_for(request)
        if number > limit:
            return Scripted(status=400)
        urls = [
            {"part_number": each, "url": f"http://{request.headers['host']}/signed/{each}"}
            for each in range(first, first + number)
        ]
        answer = {"upload_part_urls": urls[::-1] if is_reversed else urls}
        return Scripted(body=json.dumps(answer).encode())

    return script


URLS = "/api/2.0/fs/create-upload-part-urls"


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_urls_of_many_parts_are_asked_for_together_and_each_is_used_once(
    scripted: MakeVolume, tmp_path: Path, is_reversed: bool
) -> None:
    seen: list[str] = []
    server, volume = scripted(store_with_many_urls(8, seen, is_reversed=is_reversed))
    volume = replaced(volume, server, part_size_bytes=5000)
    (tmp_path / "many").write_bytes(DATA)
    upload(volume, tmp_path / "many")
    questions = [asked_for(request) for request in server.asked("POST", URLS)]
    # 20 parts of 5,000 bytes.
    asked = sorted(n for first, number in questions for n in range(first, first + number))
    assert asked == list(range(1, 21))
    assert len(questions) <= 5
    sent = {int(r.target.rpartition("/")[2]): r.body for r in server.asked("PUT", "/signed/")}
    assert sent == {number: DATA[(number - 1) * 5000 : number * 5000] for number in range(1, 21)}
    assert len(server.asked("PUT", "/")) == 20
    volume.close()


def test_a_store_that_gives_one_url_at_a_time_is_asked_for_one_at_a_time(
    scripted: MakeVolume, local: Path
) -> None:
    seen: list[str] = []
    server, volume = scripted(store_with_many_urls(1, seen))
    upload(volume, local)
    questions = [asked_for(request) for request in server.asked("POST", URLS)]
    assert questions[0] == (1, PARTS)
    assert sorted(questions[1:]) == [(number, 1) for number in range(1, PARTS + 1)]
    assert seen[-1] != "abort"
    volume.close()


def test_a_url_that_has_waited_long_is_not_used(scripted: MakeVolume, local: Path) -> None:
    seen: list[str] = []
    server, volume = scripted(store_with_many_urls(8, seen))
    # Whatever is asked for ahead has waited too long at once.
    volume = replaced(volume, server, url_lifetime_seconds=0.0)
    upload(volume, local)
    starts = sorted(asked_for(request)[0] for request in server.asked("POST", URLS))
    assert starts == list(range(1, PARTS + 1))
    volume.close()


def test_a_stream_asks_for_more_urls_at_a_time_the_longer_it_is(scripted: MakeVolume) -> None:
    seen: list[str] = []
    server, volume = scripted(store_with_many_urls(8, seen))
    begun = volume.start_upload("file")
    for number in range(1, 65):
        begun.put_part(number, b"x")
        if number == 9:
            # Its URL has been used.
            begun.put_part(number, b"y")
    questions = [asked_for(request) for request in server.asked("POST", URLS)]
    assert questions[:9] == [*((number, 1) for number in range(1, 8)), (8, 2), (9, 2)]
    assert questions[-1][1] == 8
    assert all(number <= max(1, first // 4) for first, number in questions)
    begun.abort()


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_file_that_is_stored_and_cannot_be_asked_for_is_said_to_be_stored(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path, overwrite: bool
) -> None:
    server.inject(Fault(route="head_file", status=403))
    calls: list[tuple[str, Callable[[], object]]] = [
        ("put", lambda: remote.put("small", b"content", overwrite=overwrite)),
        ("upload", lambda: upload(remote, local, overwrite=overwrite)),
    ]
    for operation, call in calls:
        with pytest.raises(PermissionDenied, match="the file is stored") as caught:
            call()
        assert caught.value.operation == operation
    assert (served / "small").read_bytes() == b"content"
    assert (served / "file").read_bytes() == DATA
    assert count(server, "abort_upload") == 0


@pytest.mark.parametrize(
    "text", ["RPC token bucket limit has been exceeded", "a ClusterNotReadyException: wait"]
)
def test_a_refusal_that_the_service_says_will_pass_is_asked_again(
    scripted: MakeVolume, text: str
) -> None:
    body = json.dumps({"error_code": "BAD_REQUEST", "message": text}).encode()
    answers = [Scripted(status=400, body=body), Scripted(), Scripted(headers=OURS)]
    server, volume = scripted(lambda _: answers.pop(0))
    volume.put("file", b"1")
    assert [request.method for request in server.requests] == ["PUT", "PUT", "HEAD"]


@pytest.mark.parametrize("status", [404, 409, 412])
def test_what_is_at_a_path_does_not_pass_by_waiting(scripted: MakeVolume, status: int) -> None:
    body = json.dumps({"error_code": "", "message": "Unexpected error"}).encode()
    server, volume = scripted(lambda _: Scripted(status=status, body=body))
    with pytest.raises(VolumeError, match="Unexpected error"):
        volume.make_directory("directory")
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    "fault",
    [
        {"lose_reply": True, "count": 1},
        {"status": 503, "count": 2},
        {"status": 500, "lose_reply": True, "count": 1},
    ],
)
def test_an_abort_that_is_reset_or_refused_for_a_moment_is_sent_again(
    remote: FilesApiVolume, server: LocalServer, served: Path, fault: dict[str, Any]
) -> None:
    server.inject(Fault(route="abort_upload", **fault))
    begun = remote.start_upload("file")
    begun.put_part(1, b"content")
    begun.abort()
    begun.abort()
    assert count(server, "abort_upload") == 1 + fault["count"]
    assert not (served / "file").exists()
    assert_nothing_is_left(server)


def test_a_lost_reply_to_complete_is_success_when_the_file_is_there(
    remote: FilesApiVolume, server: LocalServer, served: Path, local: Path
) -> None:
    server.inject(Fault(route="complete_upload", lose_reply=True, count=1))
    assert upload(remote, local) == len(DATA)
    assert (served / "file").read_bytes() == DATA
    assert_nothing_is_left(server)


def multipart_script(complete: list[Scripted], head: Scripted, seen: list[str]) -> Any:
    """A store that takes parts and answers `complete` from a list."""

    def script(request: Request) -> Scripted:
        action = parse_qs(urlsplit(request.target).query).get("action", [""])[0]
        if action == "initiate-upload":
            date = {"Date": "Wed, 21 Oct 2026 07:28:00 GMT"}
            return Scripted(body=b'{"multipart_upload": {"session_token": "t"}}', headers=date)
        if request.target.startswith("/api/2.0/fs/create-upload-part-urls"):
            number = json.loads(request.body)["start_part_number"]
            url = f"http://{request.headers['host']}/signed/{number}"
            answer = {"upload_part_urls": [{"part_number": number, "url": url, "headers": []}]}
            return Scripted(body=json.dumps(answer).encode())
        if request.target.startswith("/signed/"):
            assert "authorization" not in request.headers
            return Scripted(headers={"ETag": f'"etag{request.target[-1]}"'})
        if action == "complete-upload":
            seen.append(request.body.decode())
            return complete.pop(0)
        if action == "abort-upload":
            seen.append("abort")
            return Scripted()
        assert request.method == "HEAD"
        return head

    return script


OURS = {"Content-Length": str(len(DATA)), "Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}
OLDER = {**OURS, "Last-Modified": "Wed, 21 Oct 2026 07:27:00 GMT"}
GONE = Scripted(status=404, body=b'{"error_code": "NOT_FOUND", "message": "no upload"}')


def test_complete_that_was_carried_out_unseen_and_then_is_unknown_is_success(
    scripted: MakeVolume, local: Path
) -> None:
    seen: list[str] = []
    script = multipart_script([Scripted(hang_up=True), GONE], Scripted(headers=OURS), seen)
    _, volume = scripted(script)
    assert upload(volume, local) == len(DATA)
    parts = [{"part_number": number, "etag": f'"etag{number}"'} for number in range(1, PARTS + 1)]
    assert [json.loads(body) for body in seen] == [{"parts": parts}, {"parts": parts}]


@pytest.mark.parametrize(
    "head", [Scripted(headers=OLDER), Scripted(headers={**OURS, "Content-Length": "5"}), GONE]
)
def test_complete_of_an_upload_that_expired_is_an_error(
    scripted: MakeVolume, local: Path, head: Scripted
) -> None:
    seen: list[str] = []
    _, volume = scripted(multipart_script([Scripted(hang_up=True), GONE], head, seen))
    with pytest.raises(NotFound):
        upload(volume, local)
    assert seen[-1] == "abort"


def test_complete_that_is_unknown_at_once_is_an_error(scripted: MakeVolume, local: Path) -> None:
    _, volume = scripted(multipart_script([GONE], Scripted(headers=OURS), []))
    with pytest.raises(NotFound):
        upload(volume, local)


TAKEN = Scripted(status=409, body=b'{"error_code": "ALREADY_EXISTS", "message": "taken"}')


def test_an_exclusive_write_whose_reply_was_lost_claims_neither_win_nor_loss(
    scripted: MakeVolume, local: Path
) -> None:
    answers = [Scripted(hang_up=True), TAKEN]
    _, volume = scripted(lambda _: answers.pop(0))
    with pytest.raises(Unavailable, match="answer was lost"):
        volume.put("file", b"1", overwrite=False)
    script = multipart_script([Scripted(hang_up=True), TAKEN], Scripted(headers=OURS), [])
    _, volume = scripted(script)
    with pytest.raises(Unavailable, match="answer was lost"):
        upload(volume, local, overwrite=False)
    _, volume = scripted(lambda _: TAKEN)
    with pytest.raises(AlreadyExists):
        volume.put("file", b"1", overwrite=False)


def test_a_delete_whose_reply_was_lost_is_success(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    remote.put("file", b"1")
    remote.make_directory("directory")
    server.inject(
        Fault(route="delete_file", lose_reply=True, count=1),
        Fault(route="remove_directory", lose_reply=True, count=1),
    )
    remote.delete("file")
    remote.remove_directory("directory")
    for path in ("file", "directory"):
        with pytest.raises(NotFound):
            remote.stat(path)


@pytest.mark.parametrize("size_bytes", [70_000, 10_000])
def test_a_source_that_is_cut_meanwhile_is_never_published(
    scripted: MakeVolume, local: Path, size_bytes: int
) -> None:
    seen: list[str] = []
    inner = multipart_script([], Scripted(headers=OURS), seen)

    def script(request: Request) -> Scripted:
        if "initiate-upload" in request.target:
            os.truncate(local, size_bytes)
        answer: Scripted = inner(request)
        return answer

    server, volume = scripted(script)
    with pytest.raises(InvalidRequest, match="fewer than 100000"):
        upload(volume, local)
    assert seen == ["abort"]
    # It is not the store that refuses the part.
    assert server.asked("PUT", "/api/") == []


def test_a_source_that_is_deleted_meanwhile_is_stored_whole(
    remote: FilesApiVolume, served: Path, local: Path
) -> None:
    with local.open("rb") as source:
        local.unlink()
        remote.upload("file", source, len(DATA))
    assert (served / "file").read_bytes() == DATA


def test_an_upload_is_cancelled_while_it_waits(scripted: MakeVolume, local: Path) -> None:
    cancel = threading.Event()
    seen: list[str] = []
    inner = multipart_script([], Scripted(headers=OURS), seen)

    def script(request: Request) -> Scripted:
        if request.target.startswith("/signed/"):
            cancel.set()
            return Scripted(status=503, headers={"Retry-After": "1"})
        answer: Scripted = inner(request)
        return answer

    server, volume = scripted(script)
    with pytest.raises(Cancelled):
        upload(volume, local, cancel=cancel)
    assert seen == ["abort"]
    assert len(server.asked("PUT", "/signed/")) == 1


def test_files_just_below_at_and_above_the_threshold_take_the_right_way(
    remote: FilesApiVolume, server: LocalServer, local: Path
) -> None:
    threshold = OPTIONS.multipart_threshold_bytes
    with local.open("rb") as source:
        remote.upload("below", source, threshold - 1)
        assert (count(server, "put_file"), count(server, "initiate_upload")) == (1, 0)
        remote.upload("at", source, threshold)
        assert (count(server, "put_file"), count(server, "presigned_put")) == (1, 4)
        remote.upload("empty", source, 0)
        assert (count(server, "put_file"), count(server, "initiate_upload")) == (2, 1)


def test_an_upload_without_parts_is_one_put(remote: FilesApiVolume, server: LocalServer) -> None:
    remote.start_upload("file").complete()
    assert count(server, "put_file") == 1
    assert count(server, "presigned_put") == 0
    assert_nothing_is_left(server)


@pytest.mark.parametrize(
    ("size_bytes", "part_bytes"),
    [
        (50 * MIB, 16 * MIB),
        (160_000 * MIB, 16 * MIB),
        (160_000 * MIB + 1, 17 * MIB),
        (250 * GIB, 26 * MIB),
        (40_000 * GIB, 4 * GIB),
    ],
)
def test_parts_grow_so_that_ten_thousand_hold_the_file(size_bytes: int, part_bytes: int) -> None:
    assert part_size_for("file", size_bytes, FilesApiOptions()) == part_bytes
    assert -(-size_bytes // part_bytes) <= 10_000


def test_a_file_larger_than_all_parts_is_refused_before_the_first_byte() -> None:
    with pytest.raises(TooLarge, match=str(40_000 * GIB)):
        part_size_for("file", 40_000 * GIB + 1, FilesApiOptions())


def test_a_part_beyond_the_last_is_refused_and_names_the_limit(remote: FilesApiVolume) -> None:
    begun = remote.start_upload("file")
    with pytest.raises(TooLarge, match="10000"):
        begun.put_part(10_001, b"x")
    begun.abort()


def test_a_part_that_is_too_large_is_refused_before_its_first_byte(
    remote: FilesApiVolume, server: LocalServer
) -> None:
    volume = replaced(remote, server, part_size_bytes=1000, max_part_bytes=1000)
    begun = volume.start_upload("file")
    begun.put_part(1, bytes(1000))
    with pytest.raises(TooLarge, match="a part may have 1000 bytes, this one has 1001"):
        begun.put_part(2, bytes(1001))
    with pytest.raises(TooLarge, match="part 0 is not among the 1 to 10000 parts"):
        begun.put_part(0, b"x")
    assert count(server, "presigned_put") == 1
    assert begun.complete().size_bytes == 1000
    volume.close()


def test_memory_does_not_grow_with_the_size_of_parts_or_files(
    server: LocalServer, served: Path, tmp_path: Path
) -> None:
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(128 * MIB)
    options = replace(OPTIONS, part_size_bytes=64 * MIB, multipart_threshold_bytes=100 * MIB)
    volume = FilesApiVolume(ROOT, Credentials(host=server.url, token=TOKEN), options)
    tracemalloc.start()
    with sparse.open("rb") as source:
        volume.upload("parts", source, 128 * MIB)
        volume.upload("single", source, 90 * MIB)
    # The server is in this process and has buffers of its own.
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    volume.close()
    assert (served / "parts").stat().st_size == 128 * MIB
    assert (served / "single").stat().st_size == 90 * MIB
    assert peak_bytes < 32 * MIB


def test_a_page_token_that_repeats_ends_in_an_error(scripted: MakeVolume) -> None:
    from trainmount_files import list_directory

    _, volume = scripted(lambda _: Scripted(body=b'{"contents": [], "next_page_token": "t"}'))
    with pytest.raises(Unavailable, match="page token"):
        list(list_directory(volume, ""))


def test_short_and_empty_pages_are_followed_to_the_end(scripted: MakeVolume) -> None:
    from trainmount_files import list_directory

    def entry(name: str) -> dict[str, object]:
        path = f"{ROOT}/{name}"
        return {"path": path, "name": name, "file_size": 5, "last_modified": 1_795_994_187_112}

    pages: list[dict[str, object]] = [
        {"contents": [entry("1"), entry("2"), entry("3")], "next_page_token": "a b"},
        {"next_page_token": "second"},
        {"contents": [entry("4"), entry("5")], "next_page_token": ""},
    ]
    server, volume = scripted(
        lambda _: Scripted(body=json.dumps(pages[len(server.requests) - 1]).encode())
    )
    found = list(list_directory(volume, ""))
    assert [each.path for each in found] == ["1", "2", "3", "4", "5"]
    assert found[0].mtime_ns == 1_795_994_187_112_000_000
    assert found[0].version == "5-1795994187"
    assert [request.target.partition("?")[2] for request in server.requests] == [
        "page_size=1000",
        "page_size=1000&page_token=a%20b",
        "page_size=1000&page_token=second",
    ]


@pytest.mark.parametrize("name", ["../x", "..", "/abs", "a/b", "", None, 5])
def test_an_entry_that_could_leave_the_directory_is_left_out_with_a_warning(
    scripted: MakeVolume, name: object, caplog: pytest.LogCaptureFixture
) -> None:
    contents = [{"name": name, "path": "/x"}, {"name": "good", "file_size": 1}]
    _, volume = scripted(lambda _: Scripted(body=json.dumps({"contents": contents}).encode()))
    assert [entry.name for entry in volume.list_page("").entries] == ["good"]
    assert "no path can name" in caplog.text


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (400, "INVALID_PARAMETER_VALUE", "InvalidRequest"),
        (401, "UNAUTHENTICATED", "Unauthenticated"),
        (403, "PERMISSION_DENIED", "PermissionDenied"),
        (404, "NOT_FOUND", "NotFound"),
        (409, "ALREADY_EXISTS", "AlreadyExists"),
        (412, "FAILED_PRECONDITION", "PreconditionFailed"),
        (413, "", "TooLarge"),
        (418, "", "InvalidRequest"),
        (501, "", "Unsupported"),
        (505, "", "Unavailable"),
        (507, "RESOURCE_EXHAUSTED", "NoSpace"),
        (403, "QuotaExceeded", "QuotaExceeded"),
        (301, "", "Unsupported"),
    ],
)
def test_a_status_becomes_its_error_with_the_servers_words(
    scripted: MakeVolume, status: int, code: str, expected: str
) -> None:
    body = json.dumps({"error_code": code, "message": "because\nof this"}).encode()
    _, volume = scripted(
        lambda r: Scripted(status=404) if r.method == "HEAD" else Scripted(status=status, body=body)
    )
    with pytest.raises(VolumeError) as caught:
        volume.make_directory("some/path")
    assert type(caught.value).__name__ == expected
    said = f"HTTP {status} {code} because of this".replace("  ", " ")
    assert str(caught.value) == f"make directory some/path: {said}"
