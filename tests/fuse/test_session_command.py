"""The command line of the mount: arguments and the form of its log."""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path

import pytest

from trainmount_fuse.logs import configure_logging
from trainmount_fuse.main import main
from trainmount_fuse.options import add_mount_options, mount_settings
from trainmount_fuse.settings import MountSettings, SettingsError


def _settings(*arguments: str, source: str = "/Volumes/c/s/v"):
    parser = argparse.ArgumentParser()
    add_mount_options(parser)
    return mount_settings(parser.parse_args([source, "/mnt", *arguments]))


@pytest.mark.parametrize(
    ("text", "value"),
    [("5000K", 5_000_000), ("20Gi", 20 << 30), ("30MiB", 30 << 20), ("2TB", 2 * 10**12)],
)
def test_sizes_have_decimal_and_binary_units(text, value):
    assert _settings("--cache-size", text).cache_size_bytes == value


def test_every_option_arrives_in_its_settings():
    settings = _settings(
        *("--memory", "64Mi", "--read-only", "--allow-other", "--uid", "7", "--gid", "8"),
        *("--file-mode", "640", "--directory-mode", "750", "--metadata-timeout", "30"),
        *("--negative-timeout", "0.5", "--open-timeout", "5", "--free-disk", "1Gi"),
        *("--chunk-above", "5Gi", "--endpoint", "http://s3", "--region", "here"),
        *("--metrics-port", "9101", "--profile", "p", "--cache-dir", "c", "--state-dir", "/s"),
        source="s3://bucket",
    )
    assert settings == MountSettings(
        source="s3://bucket",
        cache_dir=Path.cwd() / "c",
        state_dir=Path("/s"),
        memory_bytes=64 << 20,
        read_only=True,
        allow_other=True,
        uid=7,
        gid=8,
        file_mode=0o640,
        directory_mode=0o750,
        entry_timeout_seconds=30.0,
        attr_timeout_seconds=30.0,
        directory_timeout_seconds=30.0,
        negative_timeout_seconds=0.5,
        open_timeout_seconds=5.0,
        free_disk_floor_bytes=1 << 30,
        chunk_above_bytes=5 << 30,
        endpoint="http://s3",
        region="here",
        metrics_address="localhost:9101",
        profile="p",
    )


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        *(("--cache-size", text, "is not a size; write 500M") for text in ("much", "1.5G", "5X")),
        ("--memory", "-1", "is not a size"),
        ("--free-disk", "", "is not a size"),
        ("--file-mode", "9", "is not a mode; write 644"),
        *(("--metadata-timeout", text, "number of seconds") for text in ("x", "nan", "inf")),
        ("--open-timeout", "-1", "number of seconds"),
        ("--uid", "me", "is not a number of a user"),
        ("--metrics-port", "70000", "must be a port from 1 to 65535"),
    ],
)
def test_what_an_option_cannot_take_is_one_line_that_names_it(option, value, said, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["mount", "file:///x", "/y", option, value])
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"trainmount: argument {option}: ")
    assert said in line


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--memory", "1Mi", "--memory must be at least 8388608, got 1048576"),
        ("--cache-size", "1", "--cache-size must be at least 1048576, got 1"),
        ("--directory-mode", "77777", "--directory-mode must be between 0 and 0o7777"),
        ("--endpoint", "http://s3", "--endpoint is for buckets, and /Volumes/c/s/v is none"),
    ],
)
def test_a_value_that_cannot_be_is_named_by_its_option(option, value, said):
    with pytest.raises(SettingsError, match=f"^{said}"):
        _settings(option, value)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ([], "COMMAND"),
        (["mount"], "SOURCE"),
        (["mount", "file:///x", "/y", "--cache-size", "much"], "--cache-size"),
        (["serve"], "--keeper"),
    ],
)
def test_wrong_arguments_name_what_is_wrong_and_exit_with_2(arguments, what, capsys):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert what in capsys.readouterr().err


@pytest.mark.parametrize("command", [["status"], ["unmount"], ["mount", "file:///tmp"]])
def test_a_name_with_control_characters_acts_on_no_terminal(command, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ["--foreground"] if command[0] == "mount" else []
    assert main([*command, f"{tmp_path}/a\n\x1b[31mb", *options]) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "/a\\n\\x1b[31mb" in said


def test_a_setting_that_cannot_be_is_one_line(tmp_path, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    arguments = ["mount", f"file://{tmp_path}", str(tmp_path), "--foreground"]
    folders = ["--cache-dir", str(tmp_path / "c"), "--state-dir", str(tmp_path / "s")]
    assert main([*arguments, *folders, "--cache-size", "1"]) == 2
    assert capsys.readouterr().err.startswith("trainmount: --cache-size must be at least")
    assert not (tmp_path / "s").exists()


def test_a_record_is_one_line_with_its_fields_behind(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    configure_logging(verbose=False)
    logging.getLogger("trainmount_fuse.x").info("a sentence", extra={"count": 3, "why": "a b"})
    assert capsys.readouterr().err.endswith("a sentence count=3 why='a b'\n")


def test_a_record_is_one_json_object_where_programs_read_it(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging(verbose=False, log_format="json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        fields = {"path": Path("/x"), "count": 3}
        logging.getLogger("trainmount_fuse.x").exception("a sentence", extra=fields)
    (line,) = capsys.readouterr().err.splitlines()
    document = json.loads(line)
    assert (document["message"], document["level"]) == ("a sentence", "error")
    assert (document["path"], document["count"]) == ("/x", 3)
    assert document["traceback"].endswith("ValueError: two\nlines")


def test_addresses_that_urllib3_would_log_are_kept_out(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    configure_logging(verbose=True)
    logging.getLogger("urllib3.connectionpool").warning("Retrying: /part?signature=secret")
    assert capsys.readouterr().err == ""
