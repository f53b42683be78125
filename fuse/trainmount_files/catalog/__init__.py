"""`/Volumes`, `/Volumes/<catalog>` and `/Volumes/<catalog>/<schema>` as volumes. `volume.py` has
the verbs.
"""

from trainmount_files.catalog.volume import CatalogVolume

__all__ = ["CatalogVolume"]
