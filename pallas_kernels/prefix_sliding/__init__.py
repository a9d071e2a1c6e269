"""Attention over a prefix that stays and a window that slides: for training, and for decoding from a cache."""

from pallas_kernels.prefix_sliding.api import prefix_sliding_attention
from pallas_kernels.prefix_sliding.decode import cache_slot, prefix_sliding_decode

__all__ = ["cache_slot", "prefix_sliding_attention", "prefix_sliding_decode"]
