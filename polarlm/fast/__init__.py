"""Faster versions of what the model computes in plain torch: C++ on a CPU, Triton and FlexAttention on a GPU.

Importing the package puts its entries behind the door (polarlm/operations.py). Nothing else imports it, and nothing but
speed depends on it.
"""

from . import backends, decoding, passes

__all__ = ["backends", "decoding", "passes"]
