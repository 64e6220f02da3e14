"""What the ops with recurrent states mean, once more and differently: loops over rows and tokens in float64 NumPy."""

import numpy as np

from pallas_kernels.workbench.tolerances import OUTPUT


def rows_of(inputs, num_tokens):
    """Yields each row's number and its tokens; without bounds a row that writes nothing is padding."""
    bounds = inputs.get("cu_q_lens")
    for row in range(len(inputs["read_states"])):
        if bounds is not None:
            yield row, range(int(bounds[row]), int(bounds[row + 1]))
        elif inputs["write_states"][row] < len(inputs["states"]):
            yield row, range(row, row + 1)


def snapshot_of(inputs, end):
    """The state that a snapshot before token `end` is kept in, or `None`."""
    ends = inputs.get("snapshot_ends")
    if ends is None or end not in ends:
        return None
    state = int(inputs["snapshot_states"][list(ends).index(end)])
    return state if state < len(inputs["states"]) else None


def silu(x):
    return x / (1 + np.exp(-x))


def causal_conv(inputs):
    """Output and pool, both float64; the pool's numbers are exact copies."""
    weight, bias, x = (
        None if inputs[name] is None else inputs[name].astype(np.float64)
        for name in ("weight", "bias", "x")
    )
    d_conv, channels = weight.shape
    first = inputs["first_channel"]
    x = x[:, first : first + channels]
    before = inputs["states"].astype(np.float64)
    after, out = before.copy(), np.zeros((len(x), channels))
    for row, tokens in rows_of(inputs, len(x)):
        read = int(inputs["read_states"][row])
        history = before[read] if read < len(before) else np.zeros((d_conv - 1, channels))
        for token in tokens:
            history = np.vstack([history[1 - d_conv :], x[token]])
            total = (weight * history).sum(axis=0) + (0 if bias is None else bias)
            out[token] = silu(total) if inputs["activation"] == "silu" else total
            kept = snapshot_of(inputs, token + 1)
            if kept is not None:
                after[kept] = history[1 - d_conv :]
        write = int(inputs["write_states"][row])
        if len(tokens) and write < len(after):
            after[write] = history[1 - d_conv :]
    return out, after


def ssd(inputs):
    """Output and pool, both float64, of `ssd_scan` or, without bounds, of `ssd_update`."""
    a_log, d, dt_bias, before, xbc, dt = (
        inputs[name].astype(np.float64) for name in ("a_log", "d", "dt_bias", "states", "xbc", "dt")
    )
    _, heads, head_dim, d_state = before.shape
    x, rest = np.split(xbc, [heads * head_dim], axis=1)
    b, c = np.split(rest.reshape(len(x), 2, -1, d_state), 2, axis=1)
    group = np.arange(heads) * b.shape[2] // heads
    x = x.reshape(len(x), heads, head_dim)
    after, out = before.copy(), np.zeros_like(x)
    for row, tokens in rows_of(inputs, len(x)):
        read = int(inputs["read_states"][row])
        state = before[read] if read < len(before) else np.zeros(before.shape[1:])
        for token in tokens:
            step = np.clip(np.logaddexp(0, dt[token] + dt_bias), *inputs["dt_limits"])
            kept = np.exp(-np.exp(a_log) * step)[:, None, None]
            added = (step[:, None] * x[token])[:, :, None] * b[token, 0, group][:, None, :]
            state = kept * state + added
            read_out = np.einsum("hdn,hn->hd", state, c[token, 0, group])
            out[token] = read_out + d[:, None] * x[token]
            if inputs["z"] is not None:
                out[token] *= silu(inputs["z"][token].astype(np.float64)).reshape(heads, head_dim)
            place = snapshot_of(inputs, token + 1)
            if place is not None and ends_a_chunk(inputs, row, token, tokens):
                after[place] = state
        write = int(inputs["write_states"][row])
        if len(tokens) and write < len(after):
            after[write] = state
    return out, after


def ends_a_chunk(inputs, row, token, tokens):
    """Whether the state after a token is known: a chunk or the row ends there."""
    position = int(inputs["seq_lens"][row]) - (tokens.stop - 1 - token)
    return position % inputs["chunk_size"] == 0 or token + 1 == tokens.stop


def assert_is_ssd(result, inputs, dtype):
    """Output and pool equal the recurrence; a pool of 16 bits is rounded."""
    for got, right in zip(result, ssd(inputs), strict=True):
        tolerance = max(OUTPUT[dtype], OUTPUT[str(got.dtype)])
        got = np.asarray(got).astype(np.float64)
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)
