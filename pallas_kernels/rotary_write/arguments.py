"""The arrays of `rotary_write`, as its `api.py` passes them to the implementations."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int, Shaped


class RotaryArrays(NamedTuple):
    """The arrays of a call, described in `api.py`; `norm` is `None` for no norm."""

    pages: tuple[Shaped[Array, "pages page_size ..."], ...]
    qkv: Float[Array, "tokens all_heads head_dim"]
    cos: Float[Array, "tokens half"]
    sin: Float[Array, "tokens half"]
    slots: Int[Array, " tokens"]
    norm: Float[Array, "2 head_dim"] | None = None
