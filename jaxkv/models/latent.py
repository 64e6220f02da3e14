"""Blocks of multi-head latent attention, dense and sparse: parameters, cache specs and computation."""

from collections.abc import Callable
from functools import partial

from jaxkv.cache.spec import PagedSpec
from jaxkv.cache.variants import QUANTISED, dsa, mla
from jaxkv.config.blocks import IndexConfig
from jaxkv.config.model import ModelConfig
from jaxkv.layers.latent import latent_mixer
from jaxkv.layers.sparse_latent import sparse_latent_mixer
from jaxkv.models.block import Block, BlockInputs, BlockOutput, Leaf, Split, required


def _leaves(config: ModelConfig) -> dict[str, Leaf]:
    latent, hidden, heads = required(config.latent), config.hidden_size, config.heads
    rank, queries = latent.kv_lora_rank, heads * latent.query_dim
    by_head, columns = Split(0, ((heads, heads),)), Split(1, ((heads * latent.value_dim, heads),))
    # Every device has the latents of all tokens.
    down = None if latent.q_lora_rank else Split(0, ((queries, heads), (latent.stored, 1)))
    rows = (latent.q_lora_rank or queries) + latent.stored
    leaves = {
        "qkv_down": Leaf((rows, hidden), adapts=True, split=down),
        "kv_norm": Leaf((rank,), is_scale=True),
        "k_up": Leaf((heads, latent.nope_dim, rank), split=by_head),
        "v_up": Leaf((heads, latent.value_dim, rank), split=by_head),
        "o": Leaf((hidden, heads * latent.value_dim), adapts=True, split=columns),
    }
    if latent.q_lora_rank is not None:
        up = Split(0, ((queries, heads),))
        leaves["q_norm"] = Leaf((latent.q_lora_rank,), is_scale=True)
        leaves["q_up"] = Leaf((queries, latent.q_lora_rank), adapts=True, split=up)
    return leaves


def _spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> PagedSpec:
    del layer
    latent, quantised = required(config.latent), dtype if dtype in QUANTISED else None
    return mla(
        latent.kv_lora_rank,
        latent.rope_dim,
        dtype=config.dtype if quantised else dtype,
        page_size=page_size,
        quantised=quantised,
    )


def _scale(config: ModelConfig) -> float:
    scale = config.attention_scale
    return required(config.latent).query_dim ** -0.5 if scale is None else scale


def _run(inputs: BlockInputs) -> BlockOutput:
    return _mix(inputs, partial(latent_mixer, growth=inputs.config.query_growth))


def _mix(inputs: BlockInputs, mixer: Callable[..., BlockOutput]) -> BlockOutput:
    config = inputs.config
    return mixer(
        inputs.params,
        inputs.cache,
        inputs.hidden,
        inputs.batch,
        inputs.pages,
        inputs.angles,
        heads=config.heads,
        latent=required(config.latent),
        scale=_scale(config),
        implementation=inputs.implementation,
    )


def _index(config: ModelConfig) -> IndexConfig:
    return required(required(config.latent).index)


def _sparse_leaves(config: ModelConfig) -> dict[str, Leaf]:
    index, hidden = _index(config), config.hidden_size
    return _leaves(config) | {
        "index_q": Leaf((index.heads * index.head_dim, required(config.latent).q_lora_rank or 0)),
        "index_k": Leaf((index.head_dim, hidden)),
        "index_norm": Leaf((index.head_dim,), is_scale=True),
        "index_norm_bias": Leaf((index.head_dim,)),
        # In float32, because these weights decide which tokens are read.
        "index_weights": Leaf((index.heads, hidden), dtype="float32"),
    }


def _sparse_spec(config: ModelConfig, layer: int, page_size: int, dtype: str) -> PagedSpec:
    """Returns the spec: quantised records if `dtype` is an 8-bit format, otherwise plain arrays of `dtype`."""
    del layer
    latent, index = required(config.latent), _index(config)
    return dsa(
        latent.kv_lora_rank,
        latent.rope_dim,
        index.head_dim,
        page_size=page_size,
        dtype="uint8" if dtype == "fp8" else dtype,
        plain=dtype not in QUANTISED,
        topk=index.topk,
    )


def _run_sparse(inputs: BlockInputs) -> BlockOutput:
    return _mix(inputs, partial(sparse_latent_mixer, index=_index(inputs.config)))


LATENT = Block(_leaves, _run, "page", _spec)
SPARSE_LATENT = Block(_sparse_leaves, _run_sparse, "page", _sparse_spec)
