"""The arguments of every case of every op, with a `jax.ShapeDtypeStruct` in place of each array. Draws no numbers."""

from functools import partial
from importlib import import_module
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.latent_records import record_bytes
from pallas_kernels.inputs.nan_filled_states import Rows

# Pages that `nan_filled_pages` adds and no row owns.
SPARE_PAGES = 3


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


ints, floats = partial(struct, "int32"), partial(struct, "float32")


def cases_of(op):
    """Returns the cases of an op."""
    return import_module(f"pallas_kernels.{op}.cases").CASES


def structs_of(op, case, dtype="bfloat16"):
    """Returns the arguments by name, as `case.inputs(dtype=dtype)` does."""
    return MAKERS[op](case, dtype)


def of_arrays(inputs):
    """Returns the arguments with structs in place of arrays."""

    def described(value):
        return struct(value.dtype, *value.shape) if isinstance(value, np.ndarray) else value

    return {name: jax.tree.map(described, value) for name, value in inputs.items()}


def _pages(keys, page_size, table_width=None):
    """Returns the pages of a pool and the columns of its table."""
    owned = [ceil(count / page_size) for count in keys]
    return sum(owned) + SPARE_PAGES, max(1, *owned) if table_width is None else table_width


def _attention(case, dtype):
    keys = [keys for _, keys in case.lengths]
    pages, width = _pages(keys, case.page_size, case.table_width)
    pool = struct(case.quantised or dtype, pages, case.page_size, case.kv_heads, case.head_dim)
    scales = floats(*pool.shape[:3]) if case.quantised else None
    return {
        "q": struct(dtype, len(case.owned()), case.heads, case.head_dim),
        "k_pages": pool,
        "v_pages": pool,
        "page_table": ints(len(keys), width),
        **of_arrays(case.tables()),
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": floats(case.heads) if case.sinks else None,
        "k_scales": scales,
        "v_scales": scales,
    }


def _latent_attention(case, dtype):
    rows, width = len(case.rows), case.value_dim + case.rope_dim
    keys = [keys for _, keys in case.rows]
    pages, columns = _pages(keys, case.page_size, case.table_width)
    return {
        "q": struct(dtype, len(case.owned()), case.heads, width),
        "latent_pages": struct(dtype, pages, case.page_size, 1, width),
        "page_table": ints(rows, columns),
        "seq_lens": ints(rows),
        **({"cu_q_lens": ints(rows + 1)} if case.packed else {}),
        "value_dim": case.value_dim,
        "scale": (128 + case.rope_dim) ** -0.5,
    }


def _index_topk(case, dtype):
    rows = len(case.rows)
    is_decode = all(queries is None for queries, _ in case.rows)
    queries = [int(keys > 0) if queries is None else queries for queries, keys in case.rows]
    tokens = (rows if is_decode else sum(queries)) + case.padding_tokens
    pages, columns = _pages([keys for _, keys in case.rows], case.page_size)
    stored, width = (dtype, case.index_dim) if case.plain else ("uint8", case.index_dim + 4)
    return {
        "q": struct(case.queries or dtype, tokens, case.index_heads, case.index_dim),
        "weights": floats(tokens, case.index_heads),
        "index_pages": struct(stored, pages, case.page_size, width),
        "page_table": ints(rows, columns),
        "seq_lens": ints(rows),
        **({} if is_decode else {"cu_q_lens": ints(rows + 1)}),
        "topk": case.topk,
    }


def _sparse_attention(case, dtype):
    tokens, width = len(case.counts), case.rank + case.rope_dim
    pages = (ceil(case.keys / case.page_size) + 2) * case.sequences
    stored = (dtype, width) if case.plain else ("uint8", record_bytes(case.rank, case.rope_dim))
    return {
        "q": struct(dtype, tokens, case.heads, width),
        "records": struct(stored[0], pages, case.page_size, 1, stored[1]),
        "slots": ints(tokens, case.topk),
        "counts": ints(tokens),
        "value_dim": case.rank,
        "scale": width**-0.5,
    }


def _filter_bounds(case, dtype):
    per_row = {name: floats(case.rows) for name in ("top_p", "min_p", "temperature")}
    return {"logits": floats(case.rows, case.vocab), "top_k": ints(case.rows), **per_row}


def _page_write(case, dtype):
    tokens = case.tokens + case.padding_tokens
    return {
        "pages": (struct(dtype, case.pages, case.page_size, *case.shape),) * case.pools,
        "values": (struct(dtype, tokens, *case.shape),) * case.pools,
        "slots": ints(tokens),
    }


def _rotary_write(case, dtype):
    tokens, heads = case.tokens + case.padding_tokens, case.heads + 2 * case.kv_heads
    pool = (case.pages, case.page_size, case.kv_heads, case.head_dim)
    pools = (struct(case.quantised or dtype, *pool),) * 2
    return {
        "pages": pools + (floats(*pool[:3]),) * (2 if case.quantised else 0),
        "qkv": struct(dtype, tokens, heads, case.head_dim),
        "cos": floats(tokens, case.half),
        "sin": floats(tokens, case.half),
        "slots": ints(tokens),
        "norm": struct(dtype, 2, case.head_dim) if case.norm else None,
    } | ({"value_norm": True} if case.value_norm else {})


def _skinny_matmul(case, dtype):
    weights = case.out * (2 if case.gated else 1)
    return {
        "weight": struct(dtype, weights, case.inner),
        "x": struct(dtype, case.rows, case.inner),
        "bias": struct(dtype, weights) if case.has_bias else None,
        "residual": struct(dtype, case.rows, case.out) if case.has_residual else None,
        "activation": case.activation,
        "gated": case.gated,
        "gate_multiplier": case.gate_multiplier,
        "result": case.result,
    }


def _grouped_matmul(case, dtype):
    return {
        "weight": struct(dtype, *case.weight_shape),
        "x": struct(dtype, case.rows, case.inner),
        "group_sizes": ints(case.groups),
        "group_axis": case.group_axis,
        "result": case.result,
    }


def _state_tables(rows, chunk_size):
    """Returns the tables of recurrent states, and how many states there are."""
    tables, num_states = rows.tables(np.random.default_rng(0), chunk_size)
    return of_arrays(tables), num_states


def _causal_conv(case, dtype):
    tables, num_states = _state_tables(case.rows, case.chunk_size)
    tables.pop("seq_lens")
    if not case.packed:
        tables.pop("cu_q_lens")
    before, behind = case.beside
    return {
        "weight": struct(dtype, case.d_conv, case.channels),
        "bias": struct(dtype, case.channels) if case.biased else None,
        "states": struct(dtype, num_states, case.d_conv - 1, case.channels),
        "x": struct(dtype, case.rows.tokens, before + case.channels + behind),
        **tables,
        "first_channel": before,
        "activation": case.activation,
    }


def _ssd(case, dtype, rows, tables, num_states):
    inner, tokens = case.heads * case.head_dim, rows.tokens
    states = (num_states, case.heads, case.head_dim, case.d_state)
    return {
        **{name: floats(case.heads) for name in ("a_log", "d", "dt_bias")},
        "states": struct(case.state_dtype or dtype, *states),
        "xbc": struct(dtype, tokens, inner + 2 * case.groups * case.d_state),
        "dt": struct(dtype, tokens, case.heads),
        **tables,
        "z": struct(dtype, tokens, inner) if case.gated else None,
        "dt_limits": case.dt_limits,
    }


def _delta(case, dtype, rows, tables, num_states):
    sizes, tokens = case.shape, rows.tokens
    states = (num_states, sizes.heads, sizes.key_dim, sizes.value_dim)
    return {
        "a_log": floats(sizes.heads),
        "dt_bias": floats(sizes.decays),
        "states": struct(case.state_dtype or dtype, *states),
        "qkv": struct(dtype, tokens, sizes.columns),
        "a": struct(dtype, tokens, sizes.decays),
        "b": struct(dtype, tokens, sizes.heads),
        **tables,
    }


def _ssd_scan(case, dtype):
    made = _ssd(case, dtype, case.rows, *_state_tables(case.rows, case.chunk_size))
    return made | {"chunk_size": case.chunk_size}


def _ssd_update(case, dtype):
    rows = Rows((1,) * case.batch, (1,) * case.batch, case.padding_rows, case.padding_rows)
    tables, num_states = _state_tables(rows, 1)
    kept = {name: tables[name] for name in ("read_states", "write_states")}
    return _ssd(case, dtype, rows, kept, num_states)


def _delta_scan(case, dtype):
    made = _delta(case, dtype, case.rows, *_state_tables(case.rows, case.chunk_size))
    return made | {"chunk_size": case.chunk_size}


def _delta_update(case, dtype):
    rows = Rows((1,) * case.batch, (1,) * case.batch, case.padding_rows, case.padding_rows)
    tables, num_states = _state_tables(rows, 1)
    kept = {name: tables[name] for name in ("read_states", "write_states")}
    return _delta(case, dtype, rows, kept, num_states)


MAKERS = {
    "paged_attention": _attention,
    "ragged_attention": _attention,
    "latent_attention": _latent_attention,
    "index_topk": _index_topk,
    "sparse_attention": _sparse_attention,
    "filter_bounds": _filter_bounds,
    "page_write": _page_write,
    "rotary_write": _rotary_write,
    "skinny_matmul": _skinny_matmul,
    "grouped_matmul": _grouped_matmul,
    "causal_conv": _causal_conv,
    "ssd_scan": _ssd_scan,
    "ssd_update": _ssd_update,
    "delta_scan": _delta_scan,
    "delta_update": _delta_update,
}
