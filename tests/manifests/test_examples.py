"""The examples are what a newcomer runs first: valid, and embedded code is the code beside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trainmount_operator.spec import parse_job

EXAMPLES = Path(__file__).resolve().parents[2] / "manifests" / "examples"


def test_the_embedded_training_code_is_the_file_beside_it() -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "embed_code.py"), "--check"], capture_output=True, text=True
    )
    assert done.stdout == ""
    assert done.returncode == 0


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*/trainingjob.yaml")), ids=str)
def test_an_example_job_is_valid(path: Path) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    jobs = [document for document in documents if document["kind"] == "TrainingJob"]
    assert len(jobs) == 1
    job = parse_job(jobs[0])
    assert job.name == path.parent.name


def test_the_digits_are_the_1797_of_scikit_learn_four_in_five_for_training(tmp_path: Path) -> None:
    for _ in range(2):
        subprocess.run(
            [sys.executable, str(EXAMPLES / "digits" / "write_digits.py"), str(tmp_path)],
            check=True,
        )
    train, test = (sorted(p.name for p in (tmp_path / s).iterdir()) for s in ("train", "test"))
    assert (len(train), len(test)) == (1438, 359)
    assert train[:2] == ["0000_0.png", "0001_1.png"]
    assert {name.rpartition("_")[2] for name in train} == {f"{digit}.png" for digit in range(10)}
    assert (tmp_path / "train" / train[0]).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
