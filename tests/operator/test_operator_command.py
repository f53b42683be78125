"""The operator's command line: a mistake in it, or in a variable, is one line for a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainmount_operator.main import main


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope"], "unrecognized arguments: --nope"),
        (
            ["--retry-backoff", "-1"],
            "argument --retry-backoff: must be seconds between 0 and 86400, got '-1'",
        ),
        (
            ["--namespace", "Team A"],
            "--namespace (TRAINMOUNT_NAMESPACES) 'Team A' is not a namespace's name",
        ),
        (["--namespace", ""], "--namespace (TRAINMOUNT_NAMESPACES) '' is not a namespace's name"),
        (
            ["--default-image", "an image"],
            "--default-image (TRAINMOUNT_DEFAULT_IMAGE) 'an image' is not an image's name",
        ),
        (
            ["--liveness", ":8080"],
            (
                "--liveness (TRAINMOUNT_LIVENESS) ':8080' is not the URL of a port here; write "
                "http://0.0.0.0:8080/healthz"
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
    line = f"trainmount-operator: {said}; see trainmount-operator --help\n"
    assert capsys.readouterr().err == line


def test_a_wrong_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINMOUNT_RETRY_BACKOFF_SECONDS", "5s")
    with pytest.raises(SystemExit):
        main([])
    assert (
        "got '5s' from TRAINMOUNT_RETRY_BACKOFF_SECONDS; see trainmount-operator --help"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [None, "a: b: c", "[]", "{}"])
def test_a_kubeconfig_that_cannot_be_used_is_named(
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main([]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"trainmount-operator: no cluster: not in a pod, and kubeconfig {path}: "
    )
    assert line.endswith("; set KUBECONFIG to a file that names one")
