"""`page_write` as one XLA scatter per pool."""

from jaxtyping import Array, Int, Shaped

from pallas_kernels.formats.page_scatter import scatter_tokens


def page_write(
    pages: tuple[Shaped[Array, "pages page_size ..."], ...],
    values: tuple[Shaped[Array, "tokens ..."], ...],
    slots: Int[Array, " tokens"],
) -> tuple[Shaped[Array, "pages page_size ..."], ...]:
    """Implements `api.page_write`; negative slots write nothing either."""
    return scatter_tokens(pages, values, slots)
