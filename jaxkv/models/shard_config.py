"""`shard_config`: the sizes of the part of a decoder that each device of a tensor-parallel model computes.

Shoeybi et al., Megatron-LM: projections into a block are divided by rows (heads, inner channels) and those out of it by
columns, so that one sum over the devices per block gives all of them the block's output.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxkv.config.model import ModelConfig
from jaxkv.wording import listed

_WITH_KEYS = frozenset(("attention", "global_attention", "transformer"))
_WITH_HEADS = _WITH_KEYS | {"latent", "sparse_latent"}
_DENSE = frozenset(("gated", "double_gated", "plain", "dense_and_mixture", "transformer"))
"""Blocks with heads of keys and values, with heads, and with a dense feed-forward."""


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the sizes of the part of a model that each of `count` devices computes.

    With fewer heads of keys and values, or groups of B and C, than devices, several devices have the same one. Token
    ids that cannot be divided stay whole.

    Raises:
        ValueError: the model has sizes that `count` does not divide; the message names them all.
    """
    blocks = config.blocks
    problems = [
        f"{name} = {size}" for name, size, fits in _divided_sizes(config, count) if not fits
    ]
    if problems:
        raise ValueError(
            f"tensor_parallel_size = {count} cannot divide this {config.family} model, which has {listed(problems)}; "
            "choose a size that divides them, or 1"
        )
    changes: dict[str, object] = {}
    if config.vocab_size % count == 0:
        changes["vocab_size"] = config.vocab_size // count
    if blocks & _WITH_HEADS:
        changes["heads"] = config.heads // count
        has_keys = blocks & _WITH_KEYS
        changes["kv_heads"] = max(1, config.kv_heads // count) if has_keys else 1
    if config.global_attention is not None:
        kv_heads = max(1, config.global_attention.kv_heads // count)
        changes["global_attention"] = replace(config.global_attention, kv_heads=kv_heads)
    if blocks & _DENSE:
        changes["ffn_size"] = config.ffn_size // count
    if config.mixture is not None:
        sizes = {name: getattr(config.mixture, name) // count for name in ("size", "shared_size")}
        changes["mixture"] = replace(config.mixture, **sizes)
    if config.mamba is not None:
        mamba = config.mamba
        changes["mamba"] = replace(
            mamba,
            heads=mamba.heads // count,
            groups=max(1, mamba.groups // count),
            # A norm over all components stays one, over the devices.
            norm_groups=min(mamba.norm_groups, max(1, mamba.norm_groups // count)),
        )
    if config.mamba1 is not None:
        channels = config.mamba1.channels // count
        changes["mamba1"] = replace(config.mamba1, channels=channels)
    if config.short_conv is not None:
        channels = config.short_conv.channels // count
        changes["short_conv"] = replace(config.short_conv, channels=channels)
    if config.delta is not None:
        delta = config.delta
        heads = {name: getattr(delta, name) // count for name in ("key_heads", "value_heads")}
        changes["delta"] = replace(delta, **heads)
    return replace(config, **changes)


def _divided_sizes(config: ModelConfig, count: int) -> Iterator[tuple[str, int, bool]]:
    """Yields name, size, and whether the devices can divide it, of every size that they have to divide."""
    blocks = config.blocks

    def whole(name: str, size: int) -> tuple[str, int, bool]:
        return name, size, size % count == 0

    def shareable(name: str, size: int) -> tuple[str, int, bool]:
        return name, size, size % count == 0 or count % size == 0

    if blocks & _WITH_HEADS:
        yield whole("heads", config.heads)
    if blocks & _WITH_KEYS:
        yield shareable("kv_heads", config.kv_heads)
    if config.global_attention is not None:
        yield shareable("global_attention.kv_heads", config.global_attention.kv_heads)
    if blocks & _DENSE:
        yield whole("ffn_size", config.ffn_size)
    if config.mixture is not None:
        yield whole("mixture.size", config.mixture.size)
        yield whole("mixture.shared_size", config.mixture.shared_size)
    if config.mamba is not None:
        yield whole("mamba.heads", config.mamba.heads)
        yield shareable("mamba.groups", config.mamba.groups)
        if config.mamba.norm_groups != 1:
            yield whole("mamba.norm_groups", config.mamba.norm_groups)
    if config.mamba1 is not None:
        yield whole("mamba1.channels", config.mamba1.channels)
    if config.short_conv is not None:
        yield whole("short_conv.channels", config.short_conv.channels)
    if config.delta is not None:
        yield whole("delta.key_heads", config.delta.key_heads)
        yield whole("delta.value_heads", config.delta.value_heads)
