"""The arrays of `index_topk`, as its `api.py` passes them to the implementations."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class IndexArrays(NamedTuple):
    """The arrays of a call, described in `api.py`; `cu_q_lens` is `None` if each row has one query."""

    q: Shaped[Array, "tokens index_heads index_dim"]
    weights: Float[Array, "tokens index_heads"]
    index_pages: Shaped[Array, "pages page_size width"]
    page_table: Int[Array, "rows table_width"]
    seq_lens: Int[Array, " rows"]
    cu_q_lens: Int[Array, " row_bounds"] | None = None

    @property
    def capacity(self) -> int:
        """Most keys of a row: page table columns * page size."""
        return self.page_table.shape[1] * self.index_pages.shape[1]

    @property
    def num_slots(self) -> int:
        """Slots of the pool, one past the last of them: the padding of results."""
        return self.index_pages.shape[0] * self.index_pages.shape[1]
