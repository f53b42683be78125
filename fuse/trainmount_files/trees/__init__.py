"""Whole trees: copied between this machine and volumes, removed, published."""

from trainmount_files.trees.copy import (
    CopyOptions,
    LocalPlace,
    Place,
    VolumePlace,
    copy_file,
    copy_tree,
)
from trainmount_files.trees.fetch import fetch
from trainmount_files.trees.manifest import Manifest, PublishedFile
from trainmount_files.trees.publish import publish
from trainmount_files.trees.remove import remove_tree
from trainmount_files.trees.report import Failure, Report, Skip

__all__ = [
    "CopyOptions",
    "Failure",
    "LocalPlace",
    "Manifest",
    "Place",
    "PublishedFile",
    "Report",
    "Skip",
    "VolumePlace",
    "copy_file",
    "copy_tree",
    "fetch",
    "publish",
    "remove_tree",
]
