"""The command line of the mount: arguments and the form of its log."""

from __future__ import annotations

import argparse
import logging

import pytest

from trainmount_fuse.logs import configure_logging
from trainmount_fuse.main import _mode, _size, main


@pytest.mark.parametrize(
    ("text", "value"),
    [("500", 500), ("1K", 1000), ("20Gi", 20 << 30), ("3MiB", 3 << 20), ("2TB", 2 * 10**12)],
)
def test_sizes_have_decimal_and_binary_units(text, value):
    assert _size(text) == value


@pytest.mark.parametrize("text", ["", "much", "1.5G", "-1", "5X"])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(argparse.ArgumentTypeError, match="20Gi"):
        _size(text)


def test_modes_are_octal():
    assert _mode("640") == 0o640
    with pytest.raises(argparse.ArgumentTypeError, match="is not a mode"):
        _mode("9")


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


def test_a_setting_that_cannot_be_is_one_line(tmp_path, capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", list(root.handlers))
    arguments = ["mount", f"file://{tmp_path}", str(tmp_path), "--foreground"]
    folders = ["--cache-dir", str(tmp_path / "c"), "--state-dir", str(tmp_path / "s")]
    assert main([*arguments, *folders, "--cache-size", "1"]) == 2
    assert capsys.readouterr().err.startswith("trainmount: cache_size_bytes must be at least")
    assert not (tmp_path / "s").exists()


def test_a_record_is_one_line_with_its_fields_behind(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    configure_logging(verbose=False)
    logging.getLogger("trainmount_fuse.x").info("a sentence", extra={"count": 3, "why": "a b"})
    assert capsys.readouterr().err.endswith("a sentence count=3 why='a b'\n")
