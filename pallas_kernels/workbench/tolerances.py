"""How far an op's output may be from the exact answer. They are never loosened for a kernel."""

SCORE = 1e-4
"""Of the largest score of a row: how much more a key that is left out may score than one that was chosen."""

# By the dtype that the op's inputs were rounded to before the oracle saw them: absolute and relative.
OUTPUT = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
