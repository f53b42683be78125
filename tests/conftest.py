"""For every test: a skipped test is a failed one in CI, since nothing there may be missing."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "quotes(*sentences): fails where one of these, of docs/SEMANTICS.md, is not true"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if os.environ.get("CI") and report.skipped and not hasattr(report, "wasxfail"):
        where: Any = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped, which is a failure in CI: {where}"
    return report
