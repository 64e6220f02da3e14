"""The 8-bit formats of stored keys and values. Imports no JAX."""

LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""Dtype -> the stored value of a row's largest component, which defines the row's scale."""
