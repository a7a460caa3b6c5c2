"""From the gradients of views to those of the originals."""
