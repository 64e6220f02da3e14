"""`SamplingBatch`: the sampling inputs of one step."""

from dataclasses import field

from jaxtyping import Array, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.sampling.features import Features
from jaxkv.sampling.processors import NO_PROCESSORS, LogitsProcessors


@pytree
class SamplingBatch:
    """How each row's next token is sampled.

    Attributes:
        state_ids: id of the row's state in the cache's sampling group. Rows whose token is not used (padding, and
            prompts that continue in a later step) have an id out of range: `num_states + row`.
        carry: 1 where the row's one new token is the last token sampled for its state, which the host may not have
            read yet; then the packed token id is ignored.
        values: field name -> `[rows]` or `[rows, width]`, for the fields of `jaxkv.sampling.fields` that `features`
            need. With `min_tokens` also `block_stop`, int32 `[rows]`: 1 while the row has fewer than `min_tokens`
            tokens; in a step that verifies drafts `[rows, positions]`. With `grammar` also `token_mask`, int32
            `[rows, words]`: bit b of word w is 1 if the grammar allows token `32 * w + b`; all bits are 1 for a row
            without a grammar. With `logprobs` also `given`, int32 `[rows, steps]`: the token that a row takes in each
            step of the program in place of a sampled one, or `NO_TOKEN`.
        features: the features that the program was compiled for; static.
        processors: the registered logits processors; static.
    """

    state_ids: Int[Array, " rows"]
    carry: Int[Array, " rows"]
    values: dict[str, Array] = field(default_factory=dict)
    features: Features = static_field(default=Features())
    processors: LogitsProcessors = static_field(default=NO_PROCESSORS)

    def __getitem__(self, name: str) -> Array:
        """Returns the values of a field that the program's features need."""
        return self.values[name]
