"""How far an op's output may be from the exact answer. They are never loosened for a kernel."""

# By the dtype that the op's inputs were rounded to before the oracle saw them: absolute and relative.
SCORES = {"float32": 1e-4, "float8_e4m3fn": 2**-12}
"""Of the largest score of a row, by what is multiplied: how much more a key that is left out may score than one chosen.

Sums in float32; and products of fp8 on Hopper's tensor cores, which keep about 14 bits of a partial sum (DeepSeek-V3,
section 3.3.2): scores of 64 heads were 1.9e-4 off on an H200.
"""
OUTPUT = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}
