"""Names, numbers and handles: what the kernel knows of the tree."""
