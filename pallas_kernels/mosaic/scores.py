"""The base of the kernels' softmax."""

from math import e, log2

LOG2_E = log2(e)
"""The kernels compute the softmax with exp2: scores are multiplied by log2(e)."""
