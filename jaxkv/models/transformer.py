"""The transformer block that layers share: attention and a feed-forward with parameters shared but for adapters."""

from jaxkv.config.model import ModelConfig
from jaxkv.layers.transformer import transformer_block
from jaxkv.models.block import ONCE, Block, BlockInputs, BlockOutput, Leaf, Split, required
from jaxkv.models.mixers import attention_sizes, attention_spec


def _leaves(config: ModelConfig) -> dict[str, Leaf]:
    sizes, hidden, ffn = required(config.transformer), config.hidden_size, config.ffn_size
    queries, keys = (heads * config.head_dim for heads in (config.heads, config.kv_heads))
    heads, kv_heads = (queries, config.heads), (keys, config.kv_heads)
    gated = Split(0, ((ffn, ffn),) * 2)
    shared = {
        "side_norm": Leaf((2 * hidden,), is_scale=True),
        "qkv": Leaf((queries + 2 * keys, 2 * hidden), split=Split(0, (heads, kv_heads, kv_heads))),
        "o": Leaf((hidden, queries), split=Split(1, (heads,))),
        "inner_norm": Leaf((hidden,), is_scale=True),
        "gate_up": Leaf((2 * ffn, hidden), split=gated),
        "down": Leaf((hidden, ffn), split=Split(1, ((ffn, ffn),))),
    }
    if config.mlp_bias:
        shared["gate_up_bias"] = Leaf((2 * ffn,), split=gated)
        shared["down_bias"] = Leaf((hidden,), split=ONCE)
    own = {
        "gate_up_adapter_in": Leaf((sizes.adapter_rank, hidden)),
        "gate_up_adapter_out": Leaf((2 * ffn, sizes.adapter_rank), split=gated),
        "side_out": Leaf((hidden, hidden)),
    }
    if sizes.adapts_attention:
        own["qkv_adapter_in"] = Leaf((3, sizes.adapter_rank, 2 * hidden))
        shape = (3, queries, sizes.adapter_rank)
        own["qkv_adapter_out"] = Leaf(shape, split=Split(1, (heads,)))
    return {name: leaf._replace(is_shared=True) for name, leaf in shared.items()} | own


def _run(inputs: BlockInputs) -> BlockOutput:
    return transformer_block(
        inputs.params,
        inputs.cache,
        inputs.hidden,
        inputs.embeddings,
        inputs.batch,
        inputs.pages,
        inputs.angles,
        activation=inputs.config.activation,
        sizes=attention_sizes(inputs.config, inputs.layer),
        shards=inputs.shards,
        implementation=inputs.implementation,
    )


TRANSFORMER = Block(_leaves, _run, "page", attention_spec)
