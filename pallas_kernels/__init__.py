"""Attention and matrix-product kernels; independent of jaxagent."""
