"""What the ops with recurrent states mean, once more and differently: loops over rows and tokens in float64 NumPy."""

from functools import partial

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


def recurrence(inputs, out_shape, step, is_known=lambda row, token, tokens: True):
    """Output and pool, both float64: the state of each row, stepped from the one that it reads token by token.

    Args:
        inputs: the op's arguments by name.
        out_shape: shape of the output.
        step: function of a state and the number of a token that returns the next state and the token's output.
        is_known: function of row, token and the row's tokens that says whether a snapshot after the token is written.
    """
    before = inputs["states"].astype(np.float64)
    after, out = before.copy(), np.zeros(out_shape)
    for row, tokens in rows_of(inputs, len(out)):
        read = int(inputs["read_states"][row])
        state = before[read] if read < len(before) else np.zeros(before.shape[1:])
        for token in tokens:
            state, out[token] = step(state, token)
            kept = snapshot_of(inputs, token + 1)
            if kept is not None and is_known(row, token, tokens):
                after[kept] = state
        write = int(inputs["write_states"][row])
        if len(tokens) and write < len(after):
            after[write] = state
    return out, after


def silu(x):
    return x / (1 + np.exp(-x))


def causal_conv(inputs):
    """Output and pool of `causal_conv`; the pool's numbers are exact copies."""
    weight, bias, x = (
        None if inputs[name] is None else inputs[name].astype(np.float64)
        for name in ("weight", "bias", "x")
    )
    first, channels = inputs["first_channel"], weight.shape[1]
    x = x[:, first : first + channels]

    def step(history, token):
        window = np.vstack([history, x[token]])
        total = (weight * window).sum(axis=0) + (0 if bias is None else bias)
        return window[1:], silu(total) if inputs["activation"] == "silu" else total

    return recurrence(inputs, x.shape, step)


def ssd(inputs):
    """Output and pool of `ssd_scan` or, without bounds, of `ssd_update`."""
    a_log, d, dt_bias, xbc, dt = (
        inputs[name].astype(np.float64) for name in ("a_log", "d", "dt_bias", "xbc", "dt")
    )
    _, heads, head_dim, d_state = inputs["states"].shape
    x, rest = np.split(xbc, [heads * head_dim], axis=1)
    b, c = np.split(rest.reshape(len(x), 2, -1, d_state), 2, axis=1)
    group = np.arange(heads) * b.shape[2] // heads
    x = x.reshape(len(x), heads, head_dim)

    def step(state, token):
        size = np.clip(np.logaddexp(0, dt[token] + dt_bias), *inputs["dt_limits"])
        kept = np.exp(-np.exp(a_log) * size)[:, None, None]
        added = (size[:, None] * x[token])[:, :, None] * b[token, 0, group][:, None, :]
        state = kept * state + added
        out = np.einsum("hdn,hn->hd", state, c[token, 0, group]) + d[:, None] * x[token]
        if inputs["z"] is not None:
            out *= silu(inputs["z"][token].astype(np.float64)).reshape(heads, head_dim)
        return state, out

    return recurrence(inputs, x.shape, step, partial(ends_a_chunk, inputs))


def delta_step(layer, before, token):
    """One token of the gated delta rule, head by head: the next state and the output.

    Args:
        layer: "a_log" and "dt_bias".
        before: the state [heads, key_dim, value_dim].
        token: the token's "qkv", "a" and "b".
    """
    heads, key_dim, value_dim = before.shape
    state, out = before.copy(), np.zeros((heads, value_dim))
    keys = (len(token["qkv"]) - heads * value_dim) // 2
    q, k, v = np.split(token["qkv"], [keys, 2 * keys])
    for head in range(heads):
        served = head * (keys // key_dim) // heads
        mine, key = (
            x / np.sqrt(np.sum(x**2) + 1e-6)
            for x in (part[served * key_dim : (served + 1) * key_dim] for part in (q, k))
        )
        value = v[head * value_dim : (head + 1) * value_dim]
        each = len(layer["dt_bias"]) // heads
        steps = (token["a"] + layer["dt_bias"])[head * each : (head + 1) * each]
        size = np.logaddexp(0, steps)[:, None]
        decayed = state[head] * np.exp(-np.exp(layer["a_log"][head]) * size)
        share = np.exp(-np.logaddexp(0, -token["b"][head]))
        state[head] = decayed + np.outer(key, share * (value - key @ decayed))
        out[head] = mine @ state[head] / np.sqrt(key_dim)
    return state, out


def delta(inputs):
    """Output and pool of `delta_scan` or, without bounds, of `delta_update`."""
    layer, tokens = (
        {name: inputs[name].astype(np.float64) for name in names}
        for names in (("a_log", "dt_bias"), ("qkv", "a", "b"))
    )

    def step(state, token):
        return delta_step(layer, state, {name: array[token] for name, array in tokens.items()})

    _, heads, _, value_dim = inputs["states"].shape
    shape = (len(tokens["qkv"]), heads, value_dim)
    return recurrence(inputs, shape, step, partial(ends_a_chunk, inputs))


def ends_a_chunk(inputs, row, token, tokens):
    """Whether the state after a token is known: a chunk or the row ends there."""
    position = int(inputs["seq_lens"][row]) - (tokens.stop - 1 - token)
    return position % inputs["chunk_size"] == 0 or token + 1 == tokens.stop


def assert_is_ssd(result, inputs, dtype):
    """Output and pool equal the recurrence; a pool of 16 bits is rounded."""
    _assert_close(result, ssd(inputs), dtype)


def assert_is_delta(result, inputs, dtype):
    """Output and pool equal the recurrence; a pool of 16 bits is rounded."""
    _assert_close(result, delta(inputs), dtype)


def _assert_close(result, wanted, dtype):
    for got, right in zip(result, wanted, strict=True):
        tolerance = max(OUTPUT[dtype], OUTPUT[str(got.dtype)])
        got = np.asarray(got).astype(np.float64)
        np.testing.assert_allclose(got, right, rtol=tolerance, atol=tolerance)
