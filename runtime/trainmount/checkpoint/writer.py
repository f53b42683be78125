"""DCP storage that a checkpoint is written to. Called by torch's `dcp.save`/`async_save`, given by
the user or by `checkpointer`.

Calls, in order: `stage` (async only), `reset`, `set_up_storage_writer`, `prepare_local_plan` (all
ranks), `prepare_global_plan` (first rank: names the generation), `write_data` (all ranks: the
bytes, see `shards`, then the caller's own files), `finish` (first rank: metadata, commit record,
then removal of old generations). torch gathers each step's errors and raises on all ranks, so that
`finish` runs only when every thread of every rank has succeeded.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainmount.checkpoint.checksums import best_algorithm, find_algorithm
from trainmount.checkpoint.failures import FailureBoard
from trainmount.checkpoint.generations import (
    list_generations,
    prune,
    read_record,
    remove_unfinished,
)
from trainmount.checkpoint.layout import (
    BLOCK_BYTES,
    COMMIT_NAME,
    METADATA_NAME,
    CommitRecord,
    StoredFile,
    new_generation,
)
from trainmount.checkpoint.shards import ShardOptions, write_shards
from trainmount.checkpoint.stores import CheckpointStore, GivenUp, open_store
from trainmount.errors import CheckpointError
from trainmount.locations import whole_path

__all__ = ["UCVolumeWriter"]

_METADATA_PROTOCOL: Final = 4

_BEGIN_SECONDS: Final = 10.0
"""torch begins an asynchronous save at once after the copy, or never if it fails in between."""


@dataclass(frozen=True)
class _Target:
    """What the first rank tells each rank in its plan."""

    generation: str
    rank: int
    algorithm: str


class UCVolumeWriter(StorageWriter, BlockingAsyncStager):
    """Writes each save into a new generation below a directory and commits it last.

    A save that fails leaves the committed ones as they are. `path` is a directory on a mount or
    anywhere, or `/Volumes/...` that is not mounted (then files are streamed to the volume, with no
    local copy). One save at a time: a second `dcp.async_save` waits for the first.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        keep_last: int = 2,
        keep: Collection[str] = (),
        extra: dict[str, Any] | None = None,
        before_commit: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is written yet. The first arguments are those of torch's `FileSystemWriter`.

        Args:
            path: holds the generations; made if need be.
            single_file_per_rank: False writes each tensor into a file of its own.
            sync_files: False leaves it to the file system when a local file is durable: after a
                power failure the newest checkpoint may be damaged, which a load notices.
            thread_count: files that each rank writes at a time. To a volume without a mount, the
                parts of one file go at once as well.
            per_thread_copy_ahead: bytes of a tensor on a GPU that a thread copies at a time.
            cache_staged_state_dict: as in torch: `async_save` keeps the copy's memory for the next
                save.
            overwrite: False refuses to save where a committed checkpoint is. True never overwrites
                either: the old one goes after the new one is committed, as `keep_last` says.
            _extensions: must be empty: bytes are stored as they are.
            serialization_format: must be `SerializationFormat.TORCH_SAVE`, torch's default; what is
                written is this project's own layout, which `UCVolumeReader` reads.
            keep_last: how many committed generations stay, the new one included; at least 1.
            keep: names of generations that stay besides.
            extra: goes into the commit record; JSON-able.
            before_commit: called on each rank after its bytes are written and before the commit;
                what it raises fails the save on all ranks.

        Raises:
            ValueError: an argument has no meaning here; names it.
        """
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        if thread_count < 1:
            raise ValueError(f"thread_count must be at least 1, got {thread_count}")
        if keep_last < 1:
            raise ValueError(f"keep_last must be at least 1, got {keep_last}")
        if per_thread_copy_ahead < 0:
            raise ValueError(f"per_thread_copy_ahead must not be negative: {per_thread_copy_ahead}")
        if _extensions:
            raise ValueError("_extensions: checkpoints store bytes as they are; leave it out")
        if getattr(serialization_format, "value", "torch_save") != "torch_save":
            raise ValueError(
                f"serialization_format: {serialization_format} cannot be written; leave it out, or "
                "save with safetensors itself"
            )
        self._path = whole_path(path)
        self._store: CheckpointStore | None = None
        self._thread_count = thread_count
        self._single_file_per_rank = single_file_per_rank
        self._sync_files = sync_files
        self._staged_bytes = max(1, per_thread_copy_ahead // BLOCK_BYTES) * BLOCK_BYTES
        self._overwrite = overwrite
        self._keep_last = keep_last
        self._keep = frozenset(keep)
        self._extra = dict(extra or {})
        self._before_commit = before_commit
        self._generation = ""
        self._record: CommitRecord | None = None
        self._num_ranks = 1
        self._algorithm = best_algorithm()
        # The thread of the save that was begun last, and whether the one that was staged last has
        # begun.
        self._saver: threading.Thread | None = None
        self._has_begun = threading.Event()
        self._has_begun.set()

    def __getstate__(self) -> dict[str, Any]:
        # It goes to the process that saves.
        self._has_begun.set()
        # Which needs neither connections, nor the staged copy a second time.
        without = {"_store": None, "state_dict_cache": None, "_has_begun": None, "_saver": None}
        return {**self.__dict__, **without}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._has_begun = threading.Event()

    @property
    def checkpoint_id(self) -> str:
        """The directory of the generations."""
        return self._path

    @property
    def generation(self) -> str:
        """On the first rank, the generation of the last save; empty before the first."""
        return self._generation

    @property
    def record(self) -> CommitRecord | None:
        """On the first rank, what the last save committed; None before the first."""
        return self._record

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """For `dcp.async_save`: a copy of all values as they are now. Waits for the save before."""
        self._has_begun.wait(_BEGIN_SECONDS)
        if self._saver is not None and self._saver is not threading.current_thread():
            # torch makes a thread for each asynchronous save, which ends with it.
            self._saver.join()
        staged: dict[str, Any] = BlockingAsyncStager.stage(self, state_dict)
        self._has_begun = threading.Event()
        return staged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self._path = whole_path(checkpoint_id)
            self._store = None

    def set_up_storage_writer(
        self,
        is_coordinator: bool,  # noqa: ARG002 - torch's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,
    ) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False cannot be committed as a whole; save with collectives"
            )
        is_asynchronous = threading.current_thread() is not threading.main_thread()
        self._saver = threading.current_thread() if is_asynchronous else None
        self._has_begun.set()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store = self._open()
        existing = list_generations(store)
        if not self._overwrite:
            committed = [name for name in existing if read_record(store, name) is not None]
            if committed:
                raise CheckpointError(
                    f"{store.location}/{committed[-1]} is committed and overwrite is False"
                )
        remove_unfinished(store, existing)
        self._generation = new_generation(existing)
        self._algorithm = best_algorithm()
        self._num_ranks = len(plans)
        store.make_directory(self._generation)
        return [
            dataclasses.replace(
                plan, storage_data=_Target(self._generation, rank, self._algorithm.name)
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        target: _Target = plan.storage_data
        board = FailureBoard(target.generation)
        try:
            results = self._write(target, plan, planner, board)
            if self._before_commit is not None:
                self._before_commit()
        except GivenUp:
            raise
        except BaseException as error:
            board.tell(target.rank, error)
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store = self._open()
        written = [result for of_rank in results for result in of_rank]
        metadata.storage_data = {result.index: result.storage_data.item for result in written}
        metadata.storage_meta = StorageMeta(checkpoint_id=self._path, save_id=self._generation)
        files = [
            result.storage_data.file for result in written if result.storage_data.file is not None
        ]
        pickled = pickle.dumps(metadata, protocol=_METADATA_PROTOCOL)
        store.publish(f"{self._generation}/{METADATA_NAME}", pickled)
        checksum = self._algorithm.text(self._algorithm.of(pickled))
        files.append(StoredFile(METADATA_NAME, len(pickled), checksum))
        record = CommitRecord(
            generation=self._generation,
            world_size=self._num_ranks,
            files=tuple(files),
            algorithm=self._algorithm.name,
            extra=self._extra,
        )
        store.publish(f"{self._generation}/{COMMIT_NAME}", record.to_json())
        self._record = record
        prune(store, self._generation, self._keep_last, self._keep)

    def _write(
        self, target: _Target, plan: SavePlan, planner: SavePlanner, board: FailureBoard
    ) -> list[WriteResult]:
        store = self._open()
        store.make_directory(target.generation)
        options = ShardOptions(
            thread_count=self._thread_count,
            is_file_per_item=not self._single_file_per_rank,
            is_synced=self._sync_files,
            staged_bytes=self._staged_bytes,
            algorithm=find_algorithm(target.algorithm),
        )
        return write_shards(
            store, target.generation, target.rank, plan.items, planner, options, board.read
        )

    def _open(self) -> CheckpointStore:
        if self._store is None:
            self._store = open_store(self._path)
        return self._store
