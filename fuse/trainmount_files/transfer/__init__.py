"""Whole files, iterators and streams over any volume; on the protocol only.

download_file                 parallel ranges into a local file, whole or absent
upload_file upload_stream     a local file, or whatever can be read
iterate open_reader           bytes in order with read-ahead, one version of the file
open_writer                   a file from bytes whose number nobody knows yet
"""

from trainmount_files.transfer.download import download_file
from trainmount_files.transfer.reader import VolumeReader, iterate, open_reader
from trainmount_files.transfer.upload import upload_file, upload_stream
from trainmount_files.transfer.writer import VolumeWriter, open_writer

__all__ = [
    "VolumeReader",
    "VolumeWriter",
    "download_file",
    "iterate",
    "open_reader",
    "open_writer",
    "upload_file",
    "upload_stream",
]
