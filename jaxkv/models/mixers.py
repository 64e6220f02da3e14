"""Blocks with a cache: attention, Mamba, Mamba-2 and gated delta mixers, gated short convolutions."""

from functools import partial

from jaxkv.cache.spec import PagedSpec, StateSpec
from jaxkv.cache.variants import QUANTISED, gqa, mamba2, window
from jaxkv.cache.variants import delta as delta_spec
from jaxkv.cache.variants import mamba1 as mamba1_spec
from jaxkv.cache.variants import short_conv as short_conv_spec
from jaxkv.config.blocks import DeltaConfig
from jaxkv.config.model import ModelConfig
from jaxkv.layers.attention import AttentionSizes, attention, attention_to_earlier_keys
from jaxkv.layers.delta import gated_delta_mixer
from jaxkv.layers.linear import Normed, scaled
from jaxkv.layers.mamba import mamba2_mixer
from jaxkv.layers.mamba1 import mamba1_mixer
from jaxkv.layers.short_conv import short_conv_mixer
from jaxkv.models.block import ONCE, Block, BlockInputs, BlockOutput, Leaf, Split, required

_GLOBAL = frozenset(("global_attention", "kv_shared_global_attention"))
"""Blocks with the sizes of `ModelConfig.global_attention`."""


def _attention_leaves(config: ModelConfig, *, is_global: bool = False) -> dict[str, Leaf]:
    kv_heads, head_dim = _key_shape(config, is_global=is_global)
    queries = (config.heads * head_dim, config.heads)
    keys = (kv_heads * head_dim, kv_heads)
    rows = Split(0, (*[queries] * (1 + config.attention_gate), keys, keys))
    fused = sum(size for size, _ in rows.parts)
    leaves = {
        "qkv": Leaf((fused, config.hidden_size), adapts=True, split=rows),
        "o": Leaf((config.hidden_size, queries[0]), adapts=True, split=Split(1, (queries,))),
    }
    if config.qkv_bias:
        leaves["qkv_bias"] = Leaf((fused,), split=rows)
    if config.o_bias:
        leaves["o_bias"] = Leaf((config.hidden_size,), split=ONCE)
    if config.sinks:
        heads = Split(0, ((config.heads, config.heads),))
        leaves["sinks"] = Leaf((config.heads,), dtype="float32", split=heads)
    if config.qk_norm:
        leaves["qk_norm"] = Leaf((2, head_dim), is_scale=True)
    if config.wide_qk_norm:
        dtype = config.norm_dtype
        for name, part in (("wide_q_norm", queries), ("wide_k_norm", keys)):
            leaves[name] = Leaf((part[0],), is_scale=True, dtype=dtype, split=Split(0, (part,)))
    if config.late_qk_norm:
        leaves["late_qk_norm"] = Leaf((2, head_dim), is_scale=True)
    return leaves


def _key_shape(config: ModelConfig, *, is_global: bool) -> tuple[int, int]:
    """Returns the number of heads of keys and values, and their components."""
    sizes = required(config.global_attention) if is_global else config
    return sizes.kv_heads, sizes.head_dim


def _is_global(config: ModelConfig, layer: int) -> bool:
    return bool(_GLOBAL & {*config.blocks_of(layer)})


def attention_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> PagedSpec:
    """Returns the cache spec of a layer's keys and values."""
    shape = _key_shape(config, is_global=_is_global(config, layer))
    reach = config.windows[layer]
    if reach is None:
        return gqa(*shape, dtype=dtype, page_size=page_size)
    return window(*shape, dtype=dtype, page_size=page_size, window=reach)


def attention_sizes(config: ModelConfig, layer: int) -> AttentionSizes:
    """Returns the sizes and options of a layer's attention."""
    kv_heads, head_dim = _key_shape(config, is_global=_is_global(config, layer))
    return AttentionSizes(
        heads=config.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=config.attention_scale,
        norm_eps=config.norm_eps,
        window=config.windows[layer],
        soft_cap=config.attention_cap,
        query_growth=config.query_growth,
        value_norm=config.value_norm,
        gated=config.attention_gate,
    )


def _run_attention(inputs: BlockInputs) -> BlockOutput:
    config, x = inputs.config, inputs.x
    new, mixed = attention(
        inputs.params,
        inputs.cache,
        x if isinstance(x, Normed) else scaled(x, config.multipliers.attention_in),
        inputs.batch,
        inputs.pages,
        inputs.angles,
        sizes=attention_sizes(config, inputs.layer),
        shards=inputs.shards,
        joining=inputs.joining,
        implementation=inputs.implementation,
    )
    if inputs.joining is not None:
        return new, mixed
    return new, scaled(mixed, config.multipliers.attention_out)


def _kv_shared_leaves(config: ModelConfig, *, is_global: bool = False) -> dict[str, Leaf]:
    _, head_dim = _key_shape(config, is_global=is_global)
    queries = (config.heads * head_dim, config.heads)
    leaves = {
        "q": Leaf((queries[0], config.hidden_size), adapts=True, split=Split(0, (queries,))),
        "o": Leaf((config.hidden_size, queries[0]), adapts=True, split=Split(1, (queries,))),
    }
    return leaves | {"q_norm": Leaf((head_dim,), is_scale=True)} if config.qk_norm else leaves


def _run_kv_shared(inputs: BlockInputs) -> BlockOutput:
    config = inputs.config
    mixed = attention_to_earlier_keys(
        inputs.params,
        inputs.cache,
        scaled(inputs.hidden, config.multipliers.attention_in),
        inputs.batch,
        inputs.pages,
        inputs.angles,
        sizes=attention_sizes(config, inputs.layer),
        implementation=inputs.implementation,
    )
    return {}, scaled(mixed, config.multipliers.attention_out)


def _state_dtype(config: ModelConfig, dtype: str) -> str:
    """Returns the dtype of a layer's states in a cache of a dtype.

    8-bit formats apply to keys and values only: the rounding of a state would accumulate over tokens.
    """
    return config.dtype if dtype in QUANTISED else dtype


def _mamba_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mamba, hidden = required(config.mamba), config.hidden_size
    inner, shared = (mamba.d_inner, mamba.heads), (mamba.groups * mamba.d_state, mamba.groups)
    steps = (mamba.heads, mamba.heads)
    channels, heads = (inner, shared, shared), Split(0, (steps,))
    rows = Split(0, (inner, *channels, steps))
    leaves = {
        "ssm_in": Leaf((mamba.in_channels, hidden), adapts=True, split=rows),
        "conv": Leaf((mamba.d_conv, mamba.conv_channels), split=Split(1, channels)),
        # In float32: decay and step size are exponentials of these, and errors accumulate over tokens.
        "a_log": Leaf((mamba.heads,), dtype="float32", split=heads),
        "dt_bias": Leaf((mamba.heads,), dtype="float32", split=heads),
        "skip": Leaf((mamba.heads,), is_scale=True, dtype="float32", split=heads),
        "ssm_out": Leaf((hidden, mamba.d_inner), adapts=True, split=Split(1, (inner,))),
    }
    if mamba.in_bias:
        leaves["ssm_in_bias"] = Leaf((mamba.in_channels,), split=rows)
    if mamba.conv_bias:
        leaves["conv_bias"] = Leaf((mamba.conv_channels,), split=Split(0, channels))
    if mamba.norm_groups:
        leaves["ssm_norm"] = Leaf((mamba.d_inner,), is_scale=True, split=Split(0, (inner,)))
    if mamba.out_bias:
        leaves["ssm_out_bias"] = Leaf((hidden,), split=ONCE)
    return leaves


def _mamba_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> StateSpec:
    del layer, page_size
    mamba = required(config.mamba)
    return mamba2(
        heads=mamba.heads,
        head_dim=mamba.head_dim,
        d_state=mamba.d_state,
        d_conv=mamba.d_conv,
        groups=mamba.groups,
        chunk_size=mamba.chunk_size,
        dtype=_state_dtype(config, dtype),
    )


def _run_mamba(inputs: BlockInputs) -> BlockOutput:
    config = inputs.config
    new, mixed = mamba2_mixer(
        inputs.params,
        inputs.cache,
        inputs.hidden,
        inputs.batch,
        inputs.states,
        mamba=required(config.mamba),
        norm_eps=config.norm_eps,
        multipliers=config.multipliers.ssm_in,
        shards=inputs.shards if inputs.shards and inputs.shards.splits_norm else None,
        writes=inputs.layer_writes,
        implementation=inputs.implementation,
    )
    return new, scaled(mixed, config.multipliers.ssm_out)


def _mamba1_leaves(config: ModelConfig) -> dict[str, Leaf]:
    mamba, hidden = required(config.mamba1), config.hidden_size
    each = (mamba.channels, mamba.channels)
    own, both, columns = Split(0, (each,)), Split(0, (each, each)), Split(1, (each,))
    selected = mamba.dt_rank + 2 * mamba.d_state
    leaves = {
        "ssm_in": Leaf((2 * mamba.channels, hidden), adapts=True, split=both),
        "conv": Leaf((mamba.d_conv, mamba.channels), split=columns),
        "select": Leaf((selected, mamba.channels), adapts=True, split=columns),
        "step": Leaf((mamba.channels, mamba.dt_rank), adapts=True, split=own),
        # In float32: decay and step size are exponentials of these, and errors accumulate over tokens.
        "a_log": Leaf((mamba.channels, mamba.d_state), dtype="float32", split=own),
        "dt_bias": Leaf((mamba.channels,), dtype="float32", split=own),
        "skip": Leaf((mamba.channels,), is_scale=True, dtype="float32", split=own),
        "ssm_out": Leaf((hidden, mamba.channels), adapts=True, split=columns),
    }
    if mamba.conv_bias:
        leaves["conv_bias"] = Leaf((mamba.channels,), split=own)
    if mamba.bias:
        leaves["ssm_in_bias"] = Leaf((2 * mamba.channels,), split=both)
        leaves["ssm_out_bias"] = Leaf((hidden,), split=ONCE)
    if mamba.norms:
        leaves["dt_norm"] = Leaf((mamba.dt_rank,), is_scale=True)
        leaves["b_norm"] = leaves["c_norm"] = Leaf((mamba.d_state,), is_scale=True)
    return leaves


def _mamba1_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> StateSpec:
    del layer, page_size
    mamba = required(config.mamba1)
    return mamba1_spec(
        mamba.channels,
        d_state=mamba.d_state,
        d_conv=mamba.d_conv,
        chunk_size=mamba.chunk_size,
        dtype=_state_dtype(config, dtype),
    )


def _run_mamba1(inputs: BlockInputs) -> BlockOutput:
    return mamba1_mixer(
        inputs.params,
        inputs.cache,
        inputs.hidden,
        inputs.batch,
        inputs.states,
        mamba=required(inputs.config.mamba1),
        norm_eps=inputs.config.norm_eps,
        shards=inputs.shards,
        writes=inputs.layer_writes,
        implementation=inputs.implementation,
    )


def _delta_parts(delta: DeltaConfig) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Returns the sizes, and the heads, of all keys, of all values, and of what has one number for each head."""
    keys = (delta.key_heads * delta.key_dim, delta.key_heads)
    return keys, (delta.width, delta.value_heads), (delta.value_heads, delta.value_heads)


def _delta_leaves(config: ModelConfig) -> dict[str, Leaf]:
    delta, hidden = required(config.delta), config.hidden_size
    keys, values, each = _delta_parts(delta)
    rows, gates = Split(0, (keys, keys, values, values)), Split(0, (each, each))
    return {
        "delta_in": Leaf((delta.conv_channels + delta.width, hidden), adapts=True, split=rows),
        "delta_gates": Leaf((2 * delta.value_heads, hidden), adapts=True, split=gates),
        "dt_bias": Leaf((delta.value_heads,), dtype="float32", split=Split(0, (each,))),
        **_delta_state_leaves(config),
    }


def _delta_state_leaves(config: ModelConfig) -> dict[str, Leaf]:
    delta = required(config.delta)
    keys, values, each = _delta_parts(delta)
    columns = Split(1, (values,))
    return {
        "conv": Leaf((delta.d_conv, delta.conv_channels), split=Split(1, (keys, keys, values))),
        "a_log": Leaf((delta.value_heads,), dtype="float32", split=Split(0, (each,))),
        "delta_norm": Leaf((delta.value_dim,), is_scale=True),
        "delta_out": Leaf((config.hidden_size, delta.width), adapts=True, split=columns),
    }


def _kimi_delta_leaves(config: ModelConfig) -> dict[str, Leaf]:
    delta, hidden = required(config.delta), config.hidden_size
    keys, values, each = _delta_parts(delta)
    rank = required(delta.gate_rank)
    rows, gates = Split(0, (keys, keys, values)), Split(0, ((rank, 1), (rank, 1), each))
    return {
        "delta_in": Leaf((delta.conv_channels, hidden), adapts=True, split=rows),
        "delta_gates": Leaf((2 * rank + delta.value_heads, hidden), adapts=True, split=gates),
        "delta_decay": Leaf((keys[0], rank), adapts=True, split=Split(0, (keys,))),
        "delta_gate": Leaf((delta.width, rank), adapts=True, split=Split(0, (values,))),
        "dt_bias": Leaf(keys[:1], dtype="float32", split=Split(0, (keys,))),
        **_delta_state_leaves(config),
    }


def _delta_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> StateSpec:
    del layer, page_size
    delta = required(config.delta)
    return delta_spec(
        key_heads=delta.key_heads,
        value_heads=delta.value_heads,
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        d_conv=delta.d_conv,
        chunk_size=delta.chunk_size,
        dtype=_state_dtype(config, dtype),
    )


def _run_delta(inputs: BlockInputs) -> BlockOutput:
    return gated_delta_mixer(
        inputs.params,
        inputs.cache,
        inputs.x,
        inputs.batch,
        inputs.states,
        delta=required(inputs.config.delta),
        norm_eps=inputs.config.norm_eps,
        joining=inputs.joining,
        writes=inputs.layer_writes,
        implementation=inputs.implementation,
    )


def _short_conv_leaves(config: ModelConfig) -> dict[str, Leaf]:
    conv, hidden = required(config.short_conv), config.hidden_size
    each = (conv.channels, conv.channels)
    rows, columns = Split(0, (each,) * 3), Split(1, (each,))
    leaves = {
        "short_in": Leaf((3 * conv.channels, hidden), adapts=True, split=rows),
        "conv": Leaf((conv.d_conv, conv.channels), split=columns),
        "short_out": Leaf((hidden, conv.channels), adapts=True, split=columns),
    }
    if conv.bias:
        leaves["short_in_bias"] = Leaf((3 * conv.channels,), split=rows)
        leaves["conv_bias"] = Leaf((conv.channels,), split=Split(0, (each,)))
        leaves["short_out_bias"] = Leaf((hidden,), split=ONCE)
    return leaves


def _short_conv_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> StateSpec:
    del layer, page_size
    conv = required(config.short_conv)
    return short_conv_spec(conv.channels, d_conv=conv.d_conv, dtype=_state_dtype(config, dtype))


def _run_short_conv(inputs: BlockInputs) -> BlockOutput:
    return short_conv_mixer(
        inputs.params,
        inputs.cache,
        inputs.hidden,
        inputs.batch,
        inputs.states,
        writes=inputs.layer_writes,
        implementation=inputs.implementation,
    )


ATTENTION = Block(_attention_leaves, _run_attention, "page", attention_spec, joins=True)
GLOBAL_ATTENTION = Block(
    partial(_attention_leaves, is_global=True), _run_attention, "page", attention_spec, joins=True
)
KV_SHARED_ATTENTION = Block(_kv_shared_leaves, _run_kv_shared, "page")
KV_SHARED_GLOBAL_ATTENTION = Block(
    partial(_kv_shared_leaves, is_global=True), _run_kv_shared, "page"
)
MAMBA1 = Block(_mamba1_leaves, _run_mamba1, "state", _mamba1_spec)
MAMBA2 = Block(_mamba_leaves, _run_mamba, "state", _mamba_spec)
DELTA = Block(_delta_leaves, _run_delta, "state", _delta_spec, joins=True)
KIMI_DELTA = Block(_kimi_delta_leaves, _run_delta, "state", _delta_spec, joins=True)
SHORT_CONV = Block(_short_conv_leaves, _run_short_conv, "state", _short_conv_spec)
