"""A prefix of a bucket as a volume: `s3://`, `gs://`, `az://`, through obstore."""

from trainmount_files.bucket.location import Location, parse_location
from trainmount_files.bucket.options import BucketOptions
from trainmount_files.bucket.volume import BucketVolume

__all__ = ["BucketOptions", "BucketVolume", "Location", "parse_location"]
