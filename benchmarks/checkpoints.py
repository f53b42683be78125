"""Saving and loading a checkpoint with torch's DCP: this project's storage against torch's own on
the local disk; on a mount against torch's own, against the library that it stands in for, and
against moving the same bytes as one file; and straight to the volume against that file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from measure import (
    MIB,
    Comparison,
    Program,
    Sample,
    Timing,
    compare,
    run_program,
    take_turns,
)
from peers import AIR, air_python, below_volumes
from places import ROOT, Mount, Store, link_tree, mounted, serving, write_blocks
from topics import Setting, as_rate

__all__ = ["run"]

_UPLOAD = "volume client's upload of a local file of the same size"
_READ = "volume client, a file of the same size into memory"
_TORCH = "torch's FileSystemWriter and -Reader on the same mount"


def run(setting: Setting) -> list[Comparison]:
    with serving(setting.folder / "store") as store:
        results = _on_disk(setting)
        with mounted(store, setting.folder / "mount") as mount:
            results += _Sides(setting, store, mount).compare()
    return results


def _on_disk(setting: Setting) -> list[Comparison]:
    disk = setting.folder / "disk"

    def side(program: str, name: str) -> Sample:
        return _sample(_run(setting, program, disk / name))

    def save(program: str, name: str) -> Sample:
        # Both write into an empty directory: to remove an old checkpoint is no part of a save.
        shutil.rmtree(disk / name, ignore_errors=True)
        return side(program, name)

    saved, saved_by_torch = take_turns(
        {
            "save, trainmount": lambda _round: save("save_by_trainmount", "ours"),
            "save, torch": lambda _round: save("save_by_torch", "torch"),
        },
        setting.repeats,
    ).values()
    loaded, loaded_by_torch = take_turns(
        {
            "load, trainmount": lambda _round: side("load_by_trainmount", "ours"),
            "load, torch": lambda _round: side("load_by_torch", "torch"),
        },
        setting.repeats,
    ).values()
    shutil.rmtree(disk)
    unit = as_rate(setting.checkpoint_mib * MIB)
    size = f"{setting.checkpoint_mib} MiB"
    return [
        compare(
            f"checkpoint: save {size} on the local disk, with checksums",
            "torch's FileSystemWriter",
            saved,
            saved_by_torch,
            unit,
        ),
        compare(
            f"checkpoint: load {size} from the local disk, checksums verified, page cache warm",
            "torch's FileSystemReader",
            loaded,
            loaded_by_torch,
            unit,
        ),
    ]


class _Sides:
    """The ways to save and to load one state in a volume."""

    def __init__(self, setting: Setting, store: Store, mount: Mount) -> None:
        self._setting = setting
        self._store = store
        self._mount = mount

    def compare(self) -> list[Comparison]:
        with below_volumes(self._mount.path) as peer_path:
            python = air_python() if peer_path is not None else None
            saved = self._save(peer_path, python)
            loaded = self._load(peer_path, python)
        size = f"{self._setting.checkpoint_mib} MiB"
        unit = as_rate(self._setting.checkpoint_mib * MIB)
        lines = [
            ("save", "on the mount", "mount", "client", _UPLOAD, saved),
            ("save", "to the volume without a mount", "volume", "client", _UPLOAD, saved),
            ("save", "on the mount", "mount", "torch", _TORCH, saved),
            ("save", "on the mount", "mount", "peer", AIR, saved),
            ("load", "on the mount, nothing cached", "mount", "client", _READ, loaded),
            ("load", "from the volume without a mount", "volume", "client", _READ, loaded),
            ("load", "on the mount, nothing cached", "mount", "torch", _TORCH, loaded),
            ("load", "on the mount, nothing cached", "mount", "peer", AIR, loaded),
        ]
        return [
            compare(f"checkpoint: {verb} {size} {how}", against, samples[a], samples[b], unit)
            for verb, how, a, b, against, samples in lines
            if b in samples
        ]

    def _save(self, peer_path: Path | None, python: Path | None) -> dict[str, list[Sample]]:
        source = self._setting.folder / "same-bytes"
        write_blocks(source, self._setting.checkpoint_mib * MIB)

        def upload(number: int) -> Sample:
            arguments = {"source": str(source), "path": f"{ROOT}/client-{number}"}
            return _sample(_move("upload_client", arguments, self._store))

        sides = {
            "mount": lambda number: self._on_mount("save_by_trainmount", f"mount-{number}"),
            "volume": lambda number: self._straight("save_by_trainmount", f"volume-{number}"),
            "client": upload,
            "torch": lambda number: self._on_mount("save_by_torch", f"torch-{number}"),
        }
        if peer_path is not None and python is not None:
            sides["peer"] = lambda number: self._by_peer(
                "save_by_peer", peer_path / f"peer-{number}", python
            )
        samples = take_turns(sides, self._setting.repeats)
        source.unlink()
        return samples

    def _load(self, peer_path: Path | None, python: Path | None) -> dict[str, list[Sample]]:
        """Of checkpoints that this mount has never seen, as on a node that takes a job over."""
        for number in range(self._setting.repeats):
            for name, unseen in (("mount", "unseen"), ("torch", "unseen-torch"), ("peer", "at")):
                if (self._store.directory / f"{name}-0").exists():
                    link_tree(
                        self._store.directory / f"{name}-0",
                        self._store.directory / f"{unseen}-{number}",
                    )

        def read(_round: int) -> Sample:
            size_bytes = self._setting.checkpoint_mib * MIB
            arguments = {"path": f"{ROOT}/client-0", "size_bytes": size_bytes}
            return _sample(_move("read_client", arguments, self._store))

        sides = {
            "mount": lambda number: self._on_mount("load_by_trainmount", f"unseen-{number}"),
            "volume": lambda _round: self._straight("load_by_trainmount", "volume-0"),
            "client": read,
            "torch": lambda number: self._on_mount("load_by_torch", f"unseen-torch-{number}"),
        }
        if peer_path is not None and python is not None:
            sides["peer"] = lambda number: self._by_peer(
                "load_by_peer", peer_path / f"at-{number}", python
            )
        return take_turns(sides, self._setting.repeats)

    def _on_mount(self, program: str, name: str) -> Sample:
        return self._mount.sample(lambda: _run(self._setting, program, self._mount.path / name))

    def _straight(self, program: str, name: str) -> Sample:
        environment = self._store.environment
        return _sample(_run(self._setting, program, f"{ROOT}/{name}", environment))

    def _by_peer(self, program: str, path: Path, python: Path) -> Sample:
        # It is another environment, and what it logs is its own.
        environment = {"PYTHONPATH": "", "HOME": str(self._setting.folder)}
        return self._mount.sample(
            lambda: _run(self._setting, program, path, environment, python=python)
        )


def _run(
    setting: Setting,
    program: str,
    path: Path | str,
    environment: Mapping[str, str] | None = None,
    python: Path | None = None,
) -> Timing:
    options = {} if python is None else {"python": str(python)}
    return run_program(
        Program(
            module="checkpoint_programs",
            name=program,
            arguments={"path": str(path), "size_bytes": setting.checkpoint_mib * MIB},
            environment=environment or {},
            **options,
        )
    )


def _move(program: str, arguments: Mapping[str, object], store: Store) -> Timing:
    return run_program(
        Program(module="programs", name=program, arguments=arguments, environment=store.environment)
    )


def _sample(timing: Timing) -> Sample:
    return Sample(seconds=timing.seconds, peak_mib=timing.peak_mib)
