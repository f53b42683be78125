"""The file of `run -f`: YAML documents, one of them a job. Used for runs here and on a cluster."""

from __future__ import annotations

import base64
import binascii
import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainmount_cli.errors import CliError
from trainmount_operator.job import TrainingJob
from trainmount_operator.spec import SpecError, manifest_of, parse_job

__all__ = ["JobFile", "load_job_file", "resolve_root_path"]

Document = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """What the file holds."""

    path: Path
    job: TrainingJob
    manifest: Document
    """The job as a TrainingJob manifest."""

    others: tuple[Document, ...]
    """The documents beside it: ConfigMaps, Secrets."""

    def find(self, kind: str, name: str) -> Document | None:
        """A document beside the job."""
        for document in self.others:
            if document.get("kind") == kind and document.get("metadata", {}).get("name") == name:
                return document
        return None

    def secret_value(self, name: str, key: str) -> str | None:
        """A value of a Secret beside the job."""
        secret = self.find("Secret", name) or {}
        if key in secret.get("stringData", {}):
            return str(secret["stringData"][key])
        if key in secret.get("data", {}):
            try:
                return base64.b64decode(secret["data"][key], validate=True).decode()
            except (binascii.Error, ValueError):
                raise CliError(f"{self.path}: Secret {name}: data.{key} is not base64") from None
        return None


def load_job_file(path: Path, overrides: Iterable[str] = ()) -> JobFile:
    """Read, override and check. `overrides` are `spec.a.b=value` with a YAML value.

    Raises:
        CliError: one line with the file and the line or the field.
    """
    documents = _load(path)
    jobs = [document for document in documents if _is_job(document)]
    if len(jobs) != 1:
        raise CliError(f"{path}: must hold one TrainingJob, holds {len(jobs)}")
    job_document = copy.deepcopy(jobs[0])
    for override in overrides:
        _override(job_document, override)
    try:
        job = parse_job(job_document)
        manifest = manifest_of(job_document)
    except SpecError as error:
        raise CliError(f"{path}: {error}") from None
    others = tuple(document for document in documents if document is not jobs[0])
    return JobFile(path=path, job=job, manifest=manifest, others=others)


def resolve_root_path(file: JobFile) -> Path:
    """The folder `codeSource.rootPath` means: variables and `~` expanded, relative to the file.

    Raises:
        CliError: there is no such folder.
    """
    source = file.job.spec.code_source
    assert source is not None and source.root_path is not None
    text = os.path.expandvars(source.root_path).removeprefix("project_root/")
    folder = (file.path.absolute().parent / Path(text).expanduser()).resolve()
    if not folder.is_dir():
        raise CliError(f"{file.path}: spec.codeSource.rootPath: {folder} is not a folder")
    return folder


def _load(path: Path) -> list[Document]:
    try:
        text = path.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CliError(f"{path}: is not UTF-8 text") from None
    except yaml.YAMLError as error:
        raise CliError(f"{path}: {_yaml_problem(error)}") from None
    for document in documents:
        if not isinstance(document, dict):
            raise CliError(f"{path}: every document must be a mapping")
    return documents


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "is not YAML"
    return problem if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _is_job(document: Document) -> bool:
    """Whether it is a TrainingJob, or a workload, which has no `kind`."""
    kind = document.get("kind")
    return kind == "TrainingJob" or (kind is None and "apiVersion" not in document)


def _override(document: Document, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise CliError(f"--override must be KEY=VALUE, got {override!r}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        raise CliError(f"--override {key}: the value is not YAML") from None
    names = key.split(".")
    if "spec" in document and names[0] not in ("spec", "metadata"):
        # The field as it stands in the specification is enough.
        names.insert(0, "spec")
    place = document
    for name in names[:-1]:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise CliError(f"--override {key}: {name} is not a mapping")
    place[names[-1]] = value
