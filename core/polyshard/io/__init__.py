"""Elements between memory and files: boxes of tensors, bytes, and files with errors that name them."""
