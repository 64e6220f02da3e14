"""Generates from a transformer that you wrote yourself in flax.nnx: `python -m jaxkv.examples.flax_nnx_model`.

The module follows `CausalModule` in `jaxkv/models/flax_model.py`: `cache_specs` describes the memory of its layers, a
call works on tokens of several sequences packed one after the other, and the `attend` that it is given reads and
writes the memory. A `FlaxModel` generates in evaluation mode, without dropout, even if the module is in training mode.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import jaxkv
from jaxkv.cache.spec import LayerSpec
from jaxkv.cache.variants import gqa, place
from jaxkv.models.flax_model import Attend

VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 97, 48, 3, 6, 2, 8, 256


class Block(nnx.Module):
    """Attention and a feed-forward network, each after a norm and around a residual."""

    def __init__(self, layer: int, rngs: nnx.Rngs) -> None:
        self.layer = layer
        self.attention_norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.qkv = nnx.Linear(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, HIDDEN, use_bias=False, rngs=rngs)
        self.feed_forward_norm = nnx.LayerNorm(HIDDEN, rngs=rngs)
        self.up = nnx.Linear(HIDDEN, 4 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(4 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(
        self, x: Float[Array, "tokens hidden_size"], attend: Attend
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns the residual stream after the block."""
        qkv = self.qkv(self.attention_norm(x)).reshape(x.shape[0], -1, HEAD_DIM)
        q, k, v = jnp.split(qkv, (HEADS, HEADS + KV_HEADS), axis=1)
        mixed = attend(self.layer, q, k, v, scale=HEAD_DIM**-0.5)
        x = x + self.out(mixed.reshape(x.shape[0], -1))
        return x + self.down(nnx.gelu(self.up(self.feed_forward_norm(x))))


class Transformer(nnx.Module):
    """A small decoder with learned positions."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.vocab_size, self.max_positions = VOCAB, POSITIONS
        self.tokens = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.positions = nnx.Embed(POSITIONS, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([Block(layer, rngs) for layer in range(LAYERS)])
        self.norm = nnx.LayerNorm(HIDDEN, rngs=rngs)

    def cache_specs(self, *, page_size: int, dtype: str) -> tuple[LayerSpec, ...]:
        """Returns the cache of each layer: keys and values of all tokens."""
        return place([gqa(KV_HEADS, HEAD_DIM, page_size=page_size, dtype=dtype)] * LAYERS)

    def __call__(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], attend: Attend
    ) -> Float[Array, "tokens hidden_size"]:
        """Returns each token's hidden state after the final norm."""
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attend)
        return self.norm(x)

    def logits(self, hidden: Float[Array, "rows hidden_size"]) -> Float[Array, "rows vocab_size"]:
        """Returns float32 logits, the products with the embeddings."""
        return self.tokens.attend(hidden).astype(jnp.float32)


def main() -> None:
    """Generates from three prompts of different lengths at once and prints the ids."""
    module = Transformer(nnx.Rngs(0))
    model = jaxkv.FlaxModel(module)
    prompts = [[1, 2, 3], [40, 41, 42, 43, 44, 45], [7]]
    sampling = jaxkv.SamplingParams(temperature=0.0, max_tokens=12)
    out = jaxkv.generate(model.params_of(module), model, prompts, sampling=sampling)
    for prompt, tokens, length in zip(prompts, out.tokens, out.lengths, strict=True):
        print(prompt, "->", tokens[: int(length)].tolist())


if __name__ == "__main__":
    main()
