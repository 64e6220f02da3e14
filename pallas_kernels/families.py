"""What one choice of implementation for a whole model means for each op. Knows no model."""

FAMILIES = ("mosaic_gpu", "xla", "cudnn", "xla_products")
"""What a model may be told to run on; without a word it takes the first that all of its layers can."""

# Ops that must run a certain implementation. The others take the first that can run. An implementation from elsewhere
# replaces single ops.
_MEMBERS = {
    "mosaic_gpu": {"paged_attention": "mosaic_gpu", "ragged_attention": "mosaic_gpu"},
    "cudnn": {"paged_attention": "cudnn"},
    # Our kernels but for products of few rows, and of experts, to see what those are worth.
    "xla_products": {
        "paged_attention": "mosaic_gpu",
        "ragged_attention": "mosaic_gpu",
        "skinny_matmul": "xla",
    },
}


def member(family: str | None, op: str) -> str | None:
    """Returns which implementation an op must run in a family; `None` leaves it to the op."""
    return _MEMBERS[family].get(op) if family in _MEMBERS else family
