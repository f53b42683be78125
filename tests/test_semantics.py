"""docs/SEMANTICS.md against the tests that quote it: `@pytest.mark.quotes` holds whole sentences of
the document, and a test with it fails where one of them is not true.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
DOCUMENT = TESTS.parent / "docs/SEMANTICS.md"
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*])")
_ITEM = re.compile(r"^(?:[-*]|\d+\.)\s+")


def sentences(text: str) -> list[str]:
    """Of paragraphs and list items one by one; a row of a table is one. Headings, heads of tables
    and code say nothing of their own."""
    found: list[str] = []
    paragraph: list[str] = []

    def end_paragraph() -> None:
        if paragraph:
            found.extend(_SENTENCE_END.split(" ".join(paragraph)))
            paragraph.clear()

    lines = iter(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL).splitlines())
    is_head = True
    for line in lines:
        is_row = line.startswith("|")
        if is_row or not line.strip() or line.startswith("#") or _ITEM.match(line):
            end_paragraph()
        if is_row:
            if is_head:
                # The line below it only draws.
                next(lines)
            else:
                found.append(
                    " | ".join(cell.strip() for cell in line.strip().strip("|").split("|"))
                )
        elif line.strip() and not line.startswith("#"):
            paragraph.append(" ".join(_ITEM.sub("", line).split()))
        is_head = not is_row
    end_paragraph()
    return found


def quotes(source: str) -> Iterator[tuple[str, str]]:
    """The name of each test with the marker, and what it quotes."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == (
                "pytest.mark.quotes"
            ):
                for argument in decorator.args:
                    yield function.name, " ".join(ast.literal_eval(argument).split())


def _all_quotes() -> dict[str, list[str]]:
    """Where each quoted sentence stands."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if "mark.quotes" in source:
            for test, sentence in quotes(source):
                found.setdefault(sentence, []).append(f"{path.relative_to(TESTS)}::{test}")
    return found


@pytest.mark.quotes(
    "Each sentence on this page is quoted by a test that fails where the sentence is not true."
)
def test_every_sentence_of_the_semantics_is_quoted_by_a_test_and_every_quote_is_in_them() -> None:
    written = sentences(DOCUMENT.read_text(encoding="utf-8"))
    quoted = _all_quotes()
    assert [one for one in written if one not in quoted] == [], "sentences without a test"
    unknown = {one: where for one, where in quoted.items() if one not in written}
    assert unknown == {}, "quotes of nothing"
    assert sorted(written) == sorted(set(written)), "sentences that stand there twice"


def test_paragraphs_items_and_rows_are_told_apart() -> None:
    text = """# Not this.

One sentence over
two lines. `open` is another. So is this.

1. **First.** An item.
- A second; of
  two lines. And two sentences.

| not | this |
|---|---|
| one  row. Whole | `x` |

```
Nor this.
```
Last"""
    assert sentences(text) == [
        "One sentence over two lines.",
        "`open` is another.",
        "So is this.",
        "**First.** An item.",
        "A second; of two lines.",
        "And two sentences.",
        "one  row. Whole | `x`",
        "Last",
    ]
    source = """
@pytest.mark.quotes("One.", "Two "
    "parts.")
def test_it(): ...
@pytest.mark.timeout(3)
def test_other(): ...
"""
    assert list(quotes(source)) == [("test_it", "One."), ("test_it", "Two parts.")]
