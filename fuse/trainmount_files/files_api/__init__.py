"""The Databricks Files API as a volume. `volume.py` has the verbs and says who does what."""

from trainmount_files.files_api.options import FilesApiOptions
from trainmount_files.files_api.sdk import Credentials
from trainmount_files.files_api.volume import FilesApiVolume

__all__ = ["Credentials", "FilesApiOptions", "FilesApiVolume"]
