"""Families of implementations: one name that selects an implementation for every op of a model."""

FAMILIES = ("mosaic_gpu", "xla", "cudnn", "xla_products")
"""Valid names of a family, best first. By default a model runs in the first family that all its layers support."""

WIDEST_HEAD = 256
"""Most components of a head that our attention kernels, and the one that writes rotated keys, take."""

CHANNEL_DECAYS = "there is no kernel for a decay of each component of a key"
"""Why our kernels of the delta rule refuse Kimi Delta Attention."""

# Family -> the ops whose implementation it fixes. Every other op takes the first implementation that can run.
_MEMBERS = {
    "mosaic_gpu": {"paged_attention": "mosaic_gpu", "ragged_attention": "mosaic_gpu"},
    "cudnn": {"paged_attention": "cudnn"},
    # For measurements of the product kernels: Mosaic attention with XLA's matrix products.
    "xla_products": {
        "paged_attention": "mosaic_gpu",
        "ragged_attention": "mosaic_gpu",
        "skinny_matmul": "xla",
        "gathered_matmul": "xla",
    },
}


def member(family: str | None, op: str) -> str | None:
    """Returns the implementation that a family fixes for an op, or `None` if the op chooses for itself."""
    return _MEMBERS[family].get(op) if family in _MEMBERS else family
