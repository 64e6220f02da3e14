"""Tolerances of the ops' outputs against the exact result. They are never loosened for a kernel."""

SCORE = 1e-4
"""By how much a key left out may outscore a selected key, relative to the row's largest score."""

# Dtype of the inputs -> absolute and relative tolerance. The oracle gets inputs that are already rounded to it.
OUTPUT = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
