"""An S3 server of a few lines over a dictionary, for keys and faults that no real one has."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import parse_qs, quote_plus, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

from tests.files.conftest import Request, Scripted

__all__ = ["FakeS3"]

MODIFIED = "Mon, 30 Nov 2026 10:00:00 GMT"


@dataclass
class FakeS3:
    """Answers for one bucket, path style: objects, ListObjectsV2, uploads of parts and copies."""

    objects: dict[str, bytes]
    """By key, byte for byte as S3 would hold it."""

    fault: Callable[[Request], Scripted | None] = lambda _: None
    """Asked first; what it returns is sent instead."""

    requests: list[Request] = field(default_factory=list)

    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    """Parts by upload and number; an upload is gone when it is completed or aborted."""

    etags: dict[str, str] = field(default_factory=dict)
    """Of objects made of parts."""

    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    """Headers of objects and of uploads."""

    def __call__(self, request: Request) -> Scripted:
        self.requests.append(request)
        answered = self.fault(request) or self.answer(request)
        if request.method == "HEAD" and answered.status != 200:
            # Whoever asks so is told no more than the status.
            return replace(answered, body=b"")
        return answered

    def answer(self, request: Request) -> Scripted:
        parts = urlsplit(request.target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        assert bucket == "bucket"
        query = {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()}
        if not key and request.method == "GET":
            return self.listing(query)
        if "uploads" in query or "uploadId" in query:
            return self.upload(request, key, query)
        if "delete" in query:
            names = re.findall(r"<Key>([^<]*)</Key>", request.body.decode())
            for name in names:
                self.objects.pop(unescape(name), None)
            deleted = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            return Scripted(body=f"<DeleteResult>{deleted}</DeleteResult>".encode())
        if request.method == "PUT":
            if request.headers.get("if-none-match") == "*" and key in self.objects:
                return error(412, "PreconditionFailed")
            self.objects[key] = request.body
            self.etags.pop(key, None)
            self.metadata[key] = metadata_of(request)
            return Scripted(headers={"ETag": etag_of(request.body)})
        if request.method == "DELETE":
            self.objects.pop(key, None)
            return Scripted(status=204)
        if key not in self.objects:
            return error(404, "NoSuchKey")
        answered = object_answer(request, self.objects[key], self.etags.get(key))
        return replace(answered, headers=answered.headers | self.metadata.get(key, {}))

    def upload(self, request: Request, key: str, query: dict[str, str]) -> Scripted:
        if "uploads" in query:
            name = f"upload-{len(self.requests)}"
            self.uploads[name] = {}
            self.metadata[name] = metadata_of(request)
            body = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
            return Scripted(body=f"{body}</InitiateMultipartUploadResult>".encode())
        parts = self.uploads.get(query["uploadId"])
        if parts is None:
            return error(404, "NoSuchUpload")
        if request.method == "PUT":
            source = unquote(request.headers.get("x-amz-copy-source", "")).removeprefix("/bucket/")
            source = source.removeprefix("bucket/")
            data = self.objects[source] if source else request.body
            parts[int(query["partNumber"])] = data
            copied = f"<CopyPartResult><ETag>{escape(etag_of(data))}</ETag></CopyPartResult>"
            return Scripted(headers={"ETag": etag_of(data)}, body=copied.encode() * bool(source))
        if request.method == "DELETE":
            del self.uploads[query["uploadId"]]
            return Scripted(status=204)
        if request.headers.get("if-none-match") == "*" and key in self.objects:
            return error(412, "PreconditionFailed")
        numbers = [int(n) for n in re.findall(rb"<PartNumber>(\d+)<", request.body)]
        self.objects[key] = b"".join(parts[number] for number in numbers)
        whole = hashlib.md5(b"".join(hashlib.md5(parts[n]).digest() for n in numbers))
        self.etags[key] = f'"{whole.hexdigest()}-{len(numbers)}"'
        del self.uploads[query["uploadId"]]
        self.metadata[key] = self.metadata[query["uploadId"]]
        body = f"<CompleteMultipartUploadResult><ETag>{escape(self.etags[key])}</ETag>"
        return Scripted(body=f"{body}</CompleteMultipartUploadResult>".encode())

    def listing(self, query: dict[str, str]) -> Scripted:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        found: dict[str, bytes | None] = {}
        for key in sorted(key for key in self.objects if key.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                found.setdefault(prefix + rest.partition(delimiter)[0] + delimiter, None)
            else:
                found[key] = self.objects[key]
        wanted = [key for key in found if key > after]
        most = int(query.get("max-keys", 1000))
        page, more = wanted[:most], len(wanted) > most
        is_encoded = query.get("encoding-type") == "url"
        told = quote_plus if is_encoded else escape
        body = '<?xml version="1.0" encoding="UTF-8"?>'
        body += '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        body += "<EncodingType>url</EncodingType>" * is_encoded
        for key in page:
            data = found[key]
            if data is None:
                body += f"<CommonPrefixes><Prefix>{told(key)}</Prefix></CommonPrefixes>"
            else:
                body += f"<Contents><Key>{told(key)}</Key><Size>{len(data)}</Size>"
                body += "<LastModified>2026-11-30T10:00:00.000Z</LastModified>"
                body += f"<ETag>{escape(etag_of(data))}</ETag></Contents>"
        if more:
            body += f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>"
        return Scripted(body=(body + "</ListBucketResult>").encode())


def object_answer(request: Request, data: bytes, etag: str | None = None) -> Scripted:
    """The whole or the range of an object."""
    etag = etag or etag_of(data)
    headers = {"ETag": etag, "Last-Modified": MODIFIED}
    if "if-match" in request.headers and request.headers["if-match"] != etag:
        return error(412, "PreconditionFailed")
    if request.method == "HEAD":
        return Scripted(headers=headers | {"Content-Length": str(len(data))})
    asked = request.headers.get("range")
    if asked is None:
        return Scripted(headers=headers, body=data)
    first, _, last = asked.removeprefix("bytes=").partition("-")
    start, end = int(first), min(int(last) + 1, len(data))
    if start >= len(data):
        return error(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return Scripted(status=206, headers=headers, body=data[start:end])


def metadata_of(request: Request) -> dict[str, str]:
    return {k: v for k, v in request.headers.items() if k.startswith("x-amz-meta-")}


def error(status: int, code: str, more: str = "") -> Scripted:
    body = f"<Error><Code>{code}</Code><Message>as S3 says it</Message>{more}</Error>"
    return Scripted(status=status, body=body.encode())


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'
