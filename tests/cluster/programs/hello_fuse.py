"""Run by a test in a privileged pod: a filesystem with one file at the path that is given."""

import errno
import stat
import sys

import pyfuse3
import trio

CONTENT = b"hello from a pod\n"
FILE_INO = 2


class Hello(pyfuse3.Operations):
    async def getattr(self, inode, ctx=None):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        if inode == pyfuse3.ROOT_INODE:
            entry.st_mode = stat.S_IFDIR | 0o755
        else:
            entry.st_mode = stat.S_IFREG | 0o644
            entry.st_size = len(CONTENT)
        return entry

    async def lookup(self, parent_inode, name, ctx=None):
        if name != b"hello":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(FILE_INO)

    async def open(self, inode, flags, ctx):
        return pyfuse3.FileInfo(fh=inode)

    async def read(self, fh, off, size):
        return CONTENT[off : off + size]


pyfuse3.init(Hello(), sys.argv[1], {"fsname=hello", "allow_other"})
trio.run(pyfuse3.main)
