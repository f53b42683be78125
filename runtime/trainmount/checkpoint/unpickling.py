"""The metadata of checkpoints, unpickled without making anything that is not part of it: the file
may be anybody's who can write to the volume. Called by `reader`.
"""

from __future__ import annotations

import enum
import io
import pathlib
import pickle
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import Metadata

from trainmount.errors import DamagedCheckpoint

__all__ = ["unpickle_metadata"]

_TORCH_METADATA: Final = "torch.distributed.checkpoint.metadata"

# Whole names: a name with a dot in it would lead to what a module has imported.
_MAY_BE_UNPICKLED: Final = {
    ("collections", "OrderedDict"),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    (_TORCH_METADATA, "BytesStorageMetadata"),
    (_TORCH_METADATA, "ChunkStorageMetadata"),
    (_TORCH_METADATA, "Metadata"),
    (_TORCH_METADATA, "MetadataIndex"),
    (_TORCH_METADATA, "StorageMeta"),
    (_TORCH_METADATA, "TensorProperties"),
    (_TORCH_METADATA, "TensorStorageMetadata"),
    (_TORCH_METADATA, "_MEM_FORMAT_ENCODING"),
    # Where torch's own writer put its items.
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("trainmount.checkpoint.layout", "StoredItem"),
}

_PATHS: Final = {
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("pathlib", "PurePosixPath"),
    # As Python 3.13 says it.
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "Path"),
    ("pathlib._local", "PurePosixPath"),
}
"""The directory that torch's own writer notes. It is never opened, so a path without a file system
does.
"""


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _MAY_BE_UNPICKLED:
            return super().find_class(module, name)
        if (module, name) in _PATHS:
            return pathlib.PurePosixPath
        if (module, name) == ("builtins", "getattr"):
            # How Python before 3.11.4 writes a member of an enumeration.
            return _enum_member
        if module == "torch" and isinstance(
            getattr(torch, name, None), (torch.dtype, torch.layout)
        ):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into checkpoint metadata")


def unpickle_metadata(data: bytes, path: str) -> Metadata:
    """The metadata in `data`; `path` is the file's, for messages.

    Raises:
        DamagedCheckpoint: it is no metadata, or has something in it that would run other code.
    """
    try:
        metadata = _MetadataUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        # Bytes that were no pickle raise anything from KeyError to OverflowError.
        raise DamagedCheckpoint(
            f"{path} cannot be read by this version of torch: {error}"
        ) from error
    if not isinstance(metadata, Metadata):
        raise DamagedCheckpoint(f"{path} does not hold checkpoint metadata")
    return metadata


def _enum_member(kind: object, name: str) -> enum.Enum:
    """`kind.name`, for a member of an enumeration and for nothing else."""
    if not isinstance(kind, enum.EnumMeta):
        raise pickle.UnpicklingError(f"{name} of {kind!r} does not belong into checkpoint metadata")
    try:
        member: enum.Enum = kind[name]
    except KeyError:
        raise pickle.UnpicklingError(f"{kind.__name__} has no member {name!r}") from None
    return member
