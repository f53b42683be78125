"""The block cache: one file on disk, shared by all mounts of a user."""
