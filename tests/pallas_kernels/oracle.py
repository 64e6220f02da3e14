"""What the ops mean, once more and differently: loops over tokens and keys in float64 NumPy."""

import math

import numpy as np


def attend(q, keys, values, *, scale, soft_cap, sinks):
    """One query [heads, head_dim] over [keys, kv_heads, head_dim]; returns output and log-sum-exp."""
    heads, head_dim = q.shape
    out, lse = np.zeros((heads, head_dim)), np.full(heads, -np.inf)
    if len(keys) == 0:
        return out, lse
    group = heads // keys.shape[1]
    for head in range(heads):
        scores = keys[:, head // group].astype(np.float64) @ q[head].astype(np.float64) * scale
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        top = scores.max() if sinks is None else max(scores.max(), float(sinks[head]))
        weights = np.exp(scores - top)
        total = weights.sum() + (0.0 if sinks is None else math.exp(float(sinks[head]) - top))
        out[head] = weights / total @ values[:, head // group].astype(np.float64)
        lse[head] = top + math.log(total)
    return out, lse


def seen(pages, page_ids, position, window):
    """The places that a query at `position` sees, one after the other."""
    page_size = pages.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    places = [pages[page_ids[p // page_size], p % page_size] for p in range(first, position + 1)]
    return np.array(places).reshape(-1, *pages.shape[2:])


def dequantised(pages, scales):
    """What 8-bit numbers stand for; other pages are as they are."""
    if scales is None:
        return pages
    return pages.astype(np.float64) * scales.astype(np.float64)[..., None]


def ragged_attention(
    q,
    k_pages,
    v_pages,
    page_table,
    seq_lens,
    cu_q_lens,
    *,
    scale,
    window,
    soft_cap,
    sinks,
    k_scales=None,
    v_scales=None,
):
    """Packed queries of several rows; tokens that belong to no row give zeros and minus infinity."""
    k_pages, v_pages = dequantised(k_pages, k_scales), dequantised(v_pages, v_scales)
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for row, page_ids in enumerate(page_table):
        first, last = int(cu_q_lens[row]), int(cu_q_lens[row + 1])
        for token in range(first, last):
            position = int(seq_lens[row]) - (last - token)
            out[token], lse[token] = attend(
                q[token],
                seen(k_pages, page_ids, position, window),
                seen(v_pages, page_ids, position, window),
                scale=scale,
                soft_cap=soft_cap,
                sinks=sinks,
            )
    return out, lse


def paged_attention(q, k_pages, v_pages, page_table, seq_lens, **options):
    """One query per row, at the row's last position; an empty row has none."""
    one_or_none = np.minimum(seq_lens, 1)
    cu_q_lens = np.cumsum([0, *one_or_none])
    real = one_or_none == 1
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    out[real], lse[real] = ragged_attention(
        q[real], k_pages, v_pages, page_table, seq_lens, cu_q_lens, **options
    )
    return out, lse


def page_write(pages, values, slots):
    """Each token's value at its slot, if there is such a slot."""
    written = [np.array(pool) for pool in pages]
    for pool, value in zip(written, values, strict=True):
        num_pages, page_size = pool.shape[:2]
        for token, slot in enumerate(slots):
            if 0 <= slot < num_pages * page_size:
                pool[slot // page_size, slot % page_size] = value[token].astype(pool.dtype)
    return tuple(written)
