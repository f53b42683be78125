"""Mount settings: the round trip of a handover, and clear words for what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainmount_fuse.settings import MountSettings, SettingsError, parse_address

GOOD = {"source": "/Volumes/c/s/v", "cache_dir": "/cache", "state_dir": "/state"}


def test_settings_survive_the_handover() -> None:
    settings = MountSettings(
        source="file:///data",
        cache_dir=Path("/cache"),
        state_dir=Path("/state"),
        read_only=True,
        open_timeout_seconds=2.5,
        uid=7,
    )
    assert MountSettings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": ""}, "source must name a volume"),
        ({"block_size_bytes": 5000}, "block_size_bytes must be a multiple of 4096"),
        ({"cache_size_bytes": 1}, "cache_size_bytes must be at least"),
        ({"memory_bytes": 1 << 20}, "memory_bytes must be at least 8388608, got 1048576"),
        ({"chunk_above_bytes": -1}, "chunk_above_bytes must be at least 0"),
        ({"metrics_address": "localhost"}, "metrics_address must be a port"),
        ({"metrics_address": "localhost:0"}, "metrics_address must be a port"),
        ({"attr_timeout_seconds": float("nan")}, "attr_timeout_seconds must be at least 0"),
        ({"attr_timeout_seconds": float("inf")}, "attr_timeout_seconds must be a number"),
        ({"num_worker_threads": 0}, "num_worker_threads must be at least 1"),
        ({"entry_timeout_seconds": -1}, "entry_timeout_seconds must be at least 0"),
        ({"file_mode": 0o10000}, "file_mode must be between"),
        ({"read_only": "yes"}, "'read_only' must be of type bool"),
        ({"colour": 1}, "unknown mount setting 'colour'"),
    ],
)
def test_a_wrong_setting_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        MountSettings.from_json(json.dumps(GOOD | changes))


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_something_else_than_settings_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"mount setting"):
        MountSettings.from_json(text)


@pytest.mark.parametrize(
    ("text", "address"),
    [("9101", ("localhost", 9101)), ("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:80", ("::1", 80))],
)
def test_an_address_is_a_port_with_or_without_a_host(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address
