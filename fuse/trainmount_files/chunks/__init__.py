"""Files above the size of one object, on stores that take no upload in parts. `volume.py` has the
verbs and the rules.
"""

from trainmount_files.chunks.volume import ChunkedVolume

__all__ = ["ChunkedVolume"]
