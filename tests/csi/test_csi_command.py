"""The driver's command line: a mistake in it, or at the start, is one line for a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_csi.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "unrecognized arguments: --nope; see trainmount-csi --help"),
        (
            ["--image-pull-policy", "Sometimes"],
            (
                "argument --image-pull-policy: invalid choice: 'Sometimes' (choose from 'Always', "
                "'IfNotPresent', 'Never'); see trainmount-csi --help"
            ),
        ),
        (
            ["--mount-pod-memory-limit", "much"],
            (
                "argument --mount-pod-memory-limit: 'much' is not a quantity; write 250m or 256Mi; "
                "see trainmount-csi --help"
            ),
        ),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert capsys.readouterr().err == f"trainmount-csi: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--endpoint", "tcp://here:1"],
            "--endpoint must be unix:///path of a socket, got 'tcp://here:1'",
        ),
        (
            ["--endpoint", f"/{'x' * 107}"],
            f"--endpoint must be a path of at most 107 bytes, got '/{'x' * 107}'",
        ),
        (
            ["--kubelet-endpoint", "csi.sock"],
            "--kubelet-endpoint must be unix:///path of a socket, got 'csi.sock'",
        ),
        (
            ["--registration-socket", "reg.sock"],
            "--registration-socket must be unix:///path of a socket, got 'reg.sock'",
        ),
        (["--daemons", "pod"], "--image must be set with --daemons pod"),
        (
            ["--root", "{folder}/file/root"],
            (
                "--root {folder}/file/root: Not a directory; name a folder that this process may "
                "make or write"
            ),
        ),
        (
            ["--daemons", "pod", "--image", "i", "--namespace", "n"],
            (
                "no way to the API server: not in a pod, and kubeconfig {folder}/file: mapping "
                "values are not allowed here in "
                '"{folder}/file", line 1, column 5; --daemons pod needs the API server'
            ),
        ),
    ],
)
def test_what_keeps_the_driver_from_starting_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("a: b: c")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "file"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("POD_NAMESPACE", raising=False)
    given = [one.format(folder=tmp_path) for one in arguments]
    defaults = ["--daemons", "process", "--endpoint", f"{tmp_path}/s", "--root", f"{tmp_path}/r"]
    assert main([*defaults, *given]) == 2
    assert capsys.readouterr().err == f"trainmount-csi: {said.format(folder=tmp_path)}\n"
