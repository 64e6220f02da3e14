"""`shard_config`: the sizes of the part of a decoder that each device of a tensor-parallel model computes.

Shoeybi et al., Megatron-LM: projections into a block are divided by rows (heads, inner channels) and those out of it by
columns, so that one sum over the devices per block gives all of them the block's output.
"""

from collections.abc import Iterator
from dataclasses import replace

from jaxkv.config.model import ModelConfig
from jaxkv.wording import listed

_DIVIDED = frozenset(
    (
        "attention",
        "latent",
        "sparse_latent",
        "mamba2",
        "delta",
        "gated",
        "plain",
        "mixture",
        "shared",
    )
)
"""Blocks that can be divided."""


def shard_config(config: ModelConfig, count: int) -> ModelConfig:
    """Returns the sizes of the part of a model that each of `count` devices computes.

    With fewer heads of keys and values, or groups of B and C, than devices, several devices have the same one. Token
    ids that cannot be divided stay whole.

    Raises:
        ValueError: the model has blocks that are not divided, or sizes that `count` does not divide; the message names
            them all.
    """
    blocks = config.blocks
    problems = [f"{name} blocks" for name in sorted(blocks - _DIVIDED)]
    problems += [
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
    if blocks & {"attention", "latent", "sparse_latent"}:
        changes["heads"] = config.heads // count
        changes["kv_heads"] = max(1, config.kv_heads // count) if "attention" in blocks else 1
    if blocks & {"gated", "plain"}:
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

    if blocks & {"attention", "latent", "sparse_latent"}:
        yield whole("heads", config.heads)
    if "attention" in blocks:
        yield shareable("kv_heads", config.kv_heads)
    if blocks & {"gated", "plain"}:
        yield whole("ffn_size", config.ffn_size)
    if config.mixture is not None:
        yield whole("mixture.size", config.mixture.size)
        yield whole("mixture.shared_size", config.mixture.shared_size)
    if config.mamba is not None:
        yield whole("mamba.heads", config.mamba.heads)
        yield shareable("mamba.groups", config.mamba.groups)
        if config.mamba.norm_groups != 1:
            yield whole("mamba.norm_groups", config.mamba.norm_groups)
    if config.delta is not None:
        yield whole("delta.key_heads", config.delta.key_heads)
        yield whole("delta.value_heads", config.delta.value_heads)
