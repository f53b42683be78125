"""What can go wrong in a training program, each with one line that names the file or setting and
what to do.

TrainmountError
├── LaunchError              the environment of the process is not that of a started job
├── DataError                the data cannot be delivered
│   ├── ManifestChanged      the directory is not the one of the state (ValueError)
│   ├── StateMismatch        a loader state that does not belong to this loader (ValueError)
│   ├── MissingFile          a listed file is gone
│   ├── DamagedFile          a listed file has another size than when it was listed
│   └── TooManySkipped       more files were skipped than the limit allows
└── CheckpointError          a checkpoint could not be saved or loaded
    ├── NoCheckpoint         nothing committed at the path
    ├── DamagedCheckpoint    a file of a committed checkpoint is missing, cut or altered
    └── RanksDisagree        the ranks are not at the same place of the data

Each takes a single message, so that it crosses process borders (loader workers, ranks) as it is.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "DamagedCheckpoint",
    "DamagedFile",
    "DataError",
    "LaunchError",
    "ManifestChanged",
    "MissingFile",
    "NoCheckpoint",
    "RanksDisagree",
    "StateMismatch",
    "TooManySkipped",
    "TrainmountError",
]


class TrainmountError(Exception):
    """Anything that Trainmount's runtime raises on purpose."""


class LaunchError(TrainmountError):
    """The environment of this process is not that of a started job."""


class DataError(TrainmountError):
    """The data cannot be delivered."""


class ManifestChanged(DataError, ValueError):
    """The directory has other files than those that the state was taken over."""


class StateMismatch(DataError, ValueError):
    """A loader state that does not belong to this loader."""


class MissingFile(DataError):
    """A file of the listing is gone."""


class DamagedFile(DataError):
    """A file of the listing has another size now."""


class TooManySkipped(DataError):
    """More files were skipped than `max_skipped` allows."""


class CheckpointError(TrainmountError):
    """A checkpoint could not be saved or loaded."""


class NoCheckpoint(CheckpointError):
    """There is no committed checkpoint at the path."""


class DamagedCheckpoint(CheckpointError):
    """A file of a committed checkpoint is missing, cut or altered."""


class RanksDisagree(CheckpointError):
    """The ranks are not at the same place of the data."""
