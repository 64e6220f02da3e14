"""The arguments of `paged_attention` and `ragged_attention`, as their `api.py` passes them to the implementations."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class AttentionArrays(NamedTuple):
    """The arrays of a call, described in the ops' `api.py`.

    `cu_q_lens` is `None` in `paged_attention`, where each row has one query.
    """

    q: Float[Array, "queries heads head_dim"]
    k_pages: Shaped[Array, "pages page_size kv_heads head_dim"]
    v_pages: Shaped[Array, "pages page_size kv_heads head_dim"]
    page_table: Int[Array, "rows table_width"]
    seq_lens: Int[Array, " rows"]
    cu_q_lens: Int[Array, " row_bounds"] | None = None
    sinks: Float[Array, " heads"] | None = None
    k_scales: Float[Array, "pages page_size kv_heads"] | None = None
    v_scales: Float[Array, "pages page_size kv_heads"] | None = None

    @property
    def capacity(self) -> int:
        """Most keys of a row: page table columns * page size."""
        return self.page_table.shape[1] * self.k_pages.shape[1]


@dataclass(frozen=True)
class ScoreOptions:
    """Operations on scores between the product with the keys and the softmax, as static values.

    Attributes:
        scale: factor of the scores.
        window: number of most recent keys that a query sees, itself included; `None` for all.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); `None` for no cap.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None

    def within(self, capacity: int) -> "ScoreOptions":
        """Returns the options for rows of at most `capacity` keys.

        A window of at least `capacity` hides no key, and position arithmetic with a larger one could overflow int32,
        so it becomes `None`.
        """
        is_wide = self.window is not None and self.window >= capacity
        return replace(self, window=None) if is_wide else self
