"""A step as one CUDA graph."""
