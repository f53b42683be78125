"""A directory of S3 that holds keys which no path can name: those keys by name, and the rest as
always. Called by `listing.py` where obstore refuses a page because of a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from trainmount_files.bucket.keys import Meta, is_hidden, is_name, to_stat
from trainmount_files.bucket.signed import SignedRequests
from trainmount_files.errors import InvalidRequest
from trainmount_files.paths import join
from trainmount_files.volume import FileStat

__all__ = ["SignedListing"]

_MAX_OPENED: Final = 16
"""Names of one page that no path can have and are looked into, to tell the keys behind them."""

_MAX_TOLD: Final = 20
"""Keys told of each."""


@dataclass(frozen=True, slots=True)
class _Answer:
    objects: list[Meta]
    prefixes: list[str]
    token: str | None


class SignedListing:
    """Pages by ListObjectsV2 with a delimiter. Any thread may call."""

    def __init__(self, requests: SignedRequests, page_entries: int) -> None:
        self._requests = requests
        self._page_entries = min(page_entries, 1000)

    def page(
        self, path: str, key: str, *, after: str = "", token: str | None = None
    ) -> tuple[list[FileStat], tuple[str, ...], str | None]:
        """Entries behind the name `after` or of a token, what no path can name, the next token."""
        prefix = f"{key}/" if key else ""
        query = {"delimiter": "/", "max-keys": str(self._page_entries), "prefix": prefix}
        if token is not None:
            query["continuation-token"] = token
        elif after:
            query["start-after"] = prefix + after
        answer = self._ask(path, query)
        entries: list[FileStat] = []
        refused: list[str] = []
        for whole in answer.prefixes:
            name = whole[len(prefix) :].removesuffix("/")
            if not is_name(name):
                refused.append(whole)
            elif not is_hidden(path, name):
                entries.append(FileStat(join(path, name), is_directory=True))
        told: list[str] = []
        for meta in answer.objects:
            name = meta["path"][len(prefix) :]
            if not name or is_hidden(path, name):
                # Without a name it is the directory's own key, which ends in a slash.
                continue
            if is_name(name):
                entries.append(to_stat(join(path, name), meta))
            else:
                told.append(name)
        for count, whole in enumerate(refused):
            told += self._keys_below(path, prefix, whole, look=count < _MAX_OPENED)
        entries.sort(key=lambda entry: entry.path + "/" * entry.is_directory)
        return entries, tuple(_as_text(name) for name in told), answer.token

    def _keys_below(self, path: str, prefix: str, whole: str, *, look: bool) -> list[str]:
        """Keys behind a name that no path can have; the name, where there are more."""
        if not look:
            return [whole[len(prefix) :]]
        answer = self._ask(path, {"max-keys": str(_MAX_TOLD), "prefix": whole})
        told = [meta["path"][len(prefix) :] for meta in answer.objects]
        return [*told, whole[len(prefix) :]] if answer.token or not told else told

    def _ask(self, path: str, query: dict[str, str]) -> _Answer:
        # Control characters could not be in XML otherwise.
        whole = {"list-type": "2", "encoding-type": "url", **query}
        body = self._requests.send("list", path, "GET", query=whole)
        try:
            return _parse(body)
        except (ElementTree.ParseError, ValueError, LookupError):
            pass
        raise InvalidRequest("list", path, "the store's answer is no listing")


class _NoDoctype(ElementTree.TreeBuilder):
    """A listing has no document type, and so no entities that would grow without bound."""

    def doctype(self, *_: object) -> None:
        raise ValueError("a document type")


def _parse(body: bytes) -> _Answer:
    """Raises ParseError, ValueError: it is no listing."""
    parser = ElementTree.XMLParser(target=_NoDoctype())  # noqa: S314
    parser.feed(body)
    root: ElementTree.Element = parser.close()
    if not _bare(root.tag).endswith("ListBucketResult"):
        raise ValueError("another document")
    top = _fields(root)
    is_encoded = top.get("EncodingType", "").lower() == "url"

    def decoded(text: str) -> str:
        return unquote_plus(text, errors="surrogateescape") if is_encoded else text

    objects: list[Meta] = []
    prefixes: list[str] = []
    for child in root:
        fields = _fields(child)
        if _bare(child.tag) == "Contents":
            objects.append(
                {
                    "path": decoded(fields["Key"]),
                    "size": int(fields["Size"]),
                    "last_modified": datetime.fromisoformat(fields["LastModified"]),
                    "e_tag": fields.get("ETag"),
                }
            )
        elif _bare(child.tag) == "CommonPrefixes":
            prefixes.append(decoded(fields["Prefix"]))
    return _Answer(objects, prefixes, top.get("NextContinuationToken") or None)


def _as_text(name: str) -> str:
    """A name that is no Unicode text as what can be printed."""
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _fields(element: ElementTree.Element) -> dict[str, str]:
    return {_bare(child.tag): child.text or "" for child in element}


def _bare(tag: str) -> str:
    """Without the namespace, which some stores leave out."""
    return tag.rpartition("}")[2]
