"""`volumes://`: every kind of volume as an fsspec filesystem. What pandas, pyarrow, Hugging Face
datasets and others take a path by; found through the entry point `fsspec.specs`.

    volumes.py     the verbs of fsspec           -> locations.py: path -> volume, path in it
    files.py       what `open` returns           -> transfer: read ahead, parts, publish at close
    bulk.py        many files at once: threads, destinations, failures
    os_errors.py   our errors as the operating system's, which callers of fsspec expect
"""

try:
    import fsspec  # noqa: F401
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "the filesystem needs fsspec: pip install 'trainmount[fsspec]'", name="fsspec"
    ) from None

from trainmount_files.filesystem.volumes import VolumesFileSystem

__all__ = ["VolumesFileSystem"]
