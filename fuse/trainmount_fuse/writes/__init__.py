"""Writing: local bytes, their journal, and their way to the store."""
