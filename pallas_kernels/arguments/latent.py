"""The arguments of `latent_attention` and `sparse_attention`, as their `api.py` passes them to the implementations."""

from dataclasses import dataclass
from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class LatentArrays(NamedTuple):
    """The arrays of a call of `latent_attention`, described in its `api.py`.

    `cu_q_lens` is `None` if each row has one query.
    """

    q: Float[Array, "tokens heads latent_and_rope"]
    latent_pages: Float[Array, "pages page_size 1 latent_and_rope"]
    page_table: Int[Array, "rows table_width"]
    seq_lens: Int[Array, " rows"]
    cu_q_lens: Int[Array, " row_bounds"] | None = None

    @property
    def capacity(self) -> int:
        """Most keys of a row: page table columns * page size."""
        return self.page_table.shape[1] * self.latent_pages.shape[1]


class SparseArrays(NamedTuple):
    """The arrays of a call of `sparse_attention`, described in its `api.py`."""

    q: Float[Array, "tokens heads latent_and_rope"]
    records: Shaped[Array, "pages page_size 1 width"]
    slots: Int[Array, "tokens topk"]
    counts: Int[Array, " tokens"]


@dataclass(frozen=True)
class LatentOptions:
    """The options of a call, as static values.

    Attributes:
        value_dim: components of a latent that are its value, which come first.
        scale: factor of the scores.
    """

    value_dim: int
    scale: float
