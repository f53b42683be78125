"""Whole trees: copied between this machine and volumes, removed, published."""

from trainmount_files.trees.copy import (
    CopyOptions,
    LocalPlace,
    Place,
    VolumePlace,
    copy_file,
    copy_tree,
)
from trainmount_files.trees.remove import remove_tree
from trainmount_files.trees.report import Failure, Report, Skip

__all__ = [
    "CopyOptions",
    "Failure",
    "LocalPlace",
    "Place",
    "Report",
    "Skip",
    "VolumePlace",
    "copy_file",
    "copy_tree",
    "remove_tree",
]
