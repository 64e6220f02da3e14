"""What the doors of the attention ops refuse, before anything is traced."""

import numpy as np
import pytest

from pallas_kernels import paged_attention, ragged_attention
from pallas_kernels.dispatch import Unsupported, choose

pytestmark = pytest.mark.usefixtures("as_in_production")
OPS = pytest.mark.parametrize("op", [paged_attention, ragged_attention])


def refused(op, message, **changes):
    inputs = {
        "q": np.zeros((2, 4, 8), np.float32),
        "k_pages": np.zeros((3, 5, 2, 8), np.float32),
        "v_pages": np.zeros((3, 5, 2, 8), np.float32),
        "page_table": np.zeros((2, 1), np.int32),
        "seq_lens": np.ones(2, np.int32),
        "scale": 1.0,
    }
    if op is ragged_attention:
        inputs["cu_q_lens"] = np.arange(3, dtype=np.int32)
    with pytest.raises(ValueError, match=message):
        op(**{**inputs, **changes})


@OPS
@pytest.mark.parametrize("dtype", ["int64", "uint32", "float32"])
@pytest.mark.parametrize("name", ["page_table", "seq_lens"])
def test_tables_and_lengths_of_another_dtype_are_refused(op, name, dtype):
    """JAX would cast int64 in silence, and trace a second time elsewhere."""
    shape = (2, 1) if name == "page_table" else (2,)
    refused(op, f"{name} must be int32, got {dtype}", **{name: np.ones(shape, dtype)})


@OPS
def test_negative_ids_and_lengths_are_refused(op):
    refused(op, "page_table holds a negative", page_table=np.array([[0], [-1]], np.int32))
    refused(op, "seq_lens holds a negative", seq_lens=np.array([1, -1], np.int32))


def test_row_bounds_are_checked_like_lengths():
    refused(ragged_attention, "cu_q_lens must be int32, got int64", cu_q_lens=np.arange(3))
    bounds = np.zeros(4, np.int32)
    refused(ragged_attention, r"cu_q_lens must have shape \[3\], got \[4\]", cu_q_lens=bounds)


@OPS
def test_options_out_of_range_are_refused(op):
    refused(op, "scale must be positive, got 0", scale=0.0)
    refused(op, "scale must be positive, got nan", scale=float("nan"))
    refused(op, "window must be at least 1, got 0", window=0)
    refused(op, "soft_cap must be positive, got 0", soft_cap=0.0)
    refused(op, "no implementation 'cuda'; choose one of", implementation="cuda")


@OPS
def test_arrays_that_do_not_fit_are_refused(op):
    half = np.zeros((3, 5, 2, 8), np.float16)
    refused(op, "must share one dtype", k_pages=half, v_pages=half)
    three = np.zeros((3, 5, 3, 8), np.float32)
    refused(op, "multiple of kv_heads, got 4 heads and 3 kv_heads", k_pages=three, v_pages=three)


@OPS
def test_scales_that_do_not_fit_are_refused(op):
    """8-bit pages come with scales and scales with 8-bit pages."""
    pages = {name: np.zeros((3, 5, 2, 8), np.int8) for name in ("k_pages", "v_pages")}
    scales = {name: np.ones((3, 5, 2), np.float32) for name in ("k_scales", "v_scales")}
    refused(op, "or give k_scales and v_scales", **pages)
    refused(op, "must both be one of float8_e4m3fn, int8, got float32 and float32", **scales)
    refused(
        op,
        "give both k_scales and v_scales or neither, got only k_scales",
        **pages,
        k_scales=scales["k_scales"],
    )
    mixed = pages | {"v_pages": pages["v_pages"].astype("float8_e4m3fn")}
    refused(op, "must both be one of .*, got int8 and float8_e4m3fn", **mixed, **scales)
    wide = scales | {"v_scales": np.ones((3, 5, 2), np.float64)}
    refused(op, "v_scales must be float32, got float64", **pages, **wide)
    short = scales | {"k_scales": np.ones((3, 5, 1), np.float32)}
    refused(op, r"k_scales must have shape \[3, 5, 2\], got \[3, 5, 1\]", **pages, **short)


@OPS
def test_shapes_that_do_not_fit_are_refused(op):
    pool, q = np.zeros((3, 5, 2, 8), np.float32), np.zeros((2, 4, 8), np.float32)
    refused(op, r"q must have shape \[any, any, any\], got \[2, 8\]", q=q[:, 0])
    refused(op, r"k_pages must have shape \[any, any, any, 8\]", k_pages=pool[..., :4])
    refused(op, r"v_pages must have shape \[3, 5, 2, 8\]", v_pages=pool[:2])
    refused(op, r"seq_lens must have shape \[2\], got \[3\]", seq_lens=np.zeros(3, np.int32))
    refused(op, r"page_table must have shape", page_table=np.zeros(2, np.int32))
    refused(op, r"sinks must have shape \[4\], got \[3\]", sinks=np.zeros(3, np.float32))


def test_the_first_implementation_without_a_reason_is_chosen():
    reasons = {"fast": lambda: "needs sm90", "plain": lambda: None, "last": lambda: None}
    assert choose("op", reasons, None) == "plain"
    assert choose("op", reasons, "last") == "last"


def test_a_refusal_carries_each_reason():
    reasons = {"fast": lambda: "needs sm90", "plain": lambda: "wants bfloat16"}
    with pytest.raises(Unsupported, match="op can run here: fast: needs sm90; plain: wants bfl"):
        choose("op", reasons, None)
    with pytest.raises(Unsupported, match=r"op can run here: fast: needs sm90$"):
        choose("op", reasons, "fast")
