"""What one step is given of how its rows choose their tokens."""

from dataclasses import field

from jaxtyping import Array, Int

from jaxkv._pytree import pytree, static_field
from jaxkv.sampling.features import Features


@pytree
class SamplingBatch:
    """How each row's next token is chosen.

    Attributes:
        slots: the row's entry in the cache's sampling group. Rows whose token does not count (padding,
            and prompts that go on in a later step) have an out-of-range entry: `num_slots + row`.
        carry: 1 where the row's one new token is the last token sampled for its slot, which the host may
            not have read yet; the packed id is then ignored.
        values: the fields of `jaxkv.sampling.fields` that `features` need, by name: [rows] or [rows, width]; with
            `min_tokens` also `block_stop`, int32 [rows]: 1 while the row has fewer than `min_tokens` tokens.
        features: static; what the program was compiled for.
    """

    slots: Int[Array, " rows"]
    carry: Int[Array, " rows"]
    values: dict[str, Array] = field(default_factory=dict)
    features: Features = static_field(default=Features())

    def __getitem__(self, name: str) -> Array:
        """Returns the field of a name, which the program's features include."""
        return self.values[name]
