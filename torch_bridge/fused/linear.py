"""Projections of few rows: those that read the same tensor are computed by one kernel, and found on the tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_bridge.fused import products
from torch_bridge.fused.checked import is_right, numbers
from torch_bridge.fused.fused_forward import FusedForward, fits

_COMPUTED = "_jaxkv_products"
"""Name of the attribute of a tensor that has its products."""
_SEEN_ROWS = 64
"""Outputs at each end of a weight that are compared with torch's."""


@dataclass(frozen=True)
class _Computed:
    """Products of a tensor, which holds this as an attribute.

    Attributes:
        version: the tensor's version, which operations in place change.
        weights: the weights.
        results: the product with each.
    """

    version: int
    weights: list[torch.Tensor]
    results: list[torch.Tensor]


class FusedLinear(FusedForward):
    """`torch.nn.Linear` without a bias, of a few rows."""

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the product."""
        if kwargs or len(args) != 1:
            return None
        x, weight = args[0], module.weight
        known = getattr(x, _COMPUTED, None)
        if known is not None and known.version == x._version:
            for other, result in zip(known.weights, known.results, strict=True):
                if other is weight:
                    return result
        found = None if module.bias is not None else _products(x, [weight])
        return None if found is None else found[0]


def compute_together(x: torch.Tensor, modules: Sequence[Any]) -> None:
    """Computes the products of a tensor with modules' weights, for their forwards to find, if a kernel can.

    Args:
        x: the tensor that the modules will be called with.
        modules: they are left alone unless all of them have a `FusedLinear` and no bias.
    """
    if not all(isinstance(getattr(one, "forward", None), FusedLinear) for one in modules):
        return
    if any(one.bias is not None for one in modules) or x.is_inference():
        return
    weights = [one.weight for one in modules]
    found = _products(x, weights)
    if found is not None:
        setattr(x, _COMPUTED, _Computed(x._version, weights, found))


def forget_products(x: object) -> None:
    """Drops what `compute_together` has put on a tensor."""
    if hasattr(x, _COMPUTED):
        delattr(x, _COMPUTED)


def _products(x: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """Returns the products of a tensor, or `None` if cuBLAS is to compute them one by one."""
    if not all(fits(x, weight) and weight.ndim == 2 for weight in weights):
        return None
    width = x.shape[-1]
    rows, sizes = x.numel() // max(1, width), tuple(map(len, weights))
    if any(weight.shape[1] != width for weight in weights):
        return None
    if not products.is_faster(rows, width, sizes):
        return None

    def check() -> bool:
        given = numbers((rows, width), x)
        pairs = zip(products.products(given, weights), weights, strict=True)
        return all(_is_product(found, given, weight) for found, weight in pairs)

    kind = ("products", f"{rows} rows with {sizes} x {width}", x.dtype, x.device)
    return products.products(x, weights) if is_right(kind, check) else None


def _is_product(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the first and last outputs are those of torch, up to the order of the sum and one rounding."""
    ends = slice(None, _SEEN_ROWS), slice(-_SEEN_ROWS, None)
    for end in ends:
        part = weight[end].float()
        wanted, size = x.float() @ part.T, x.float().abs() @ part.abs().T
        bound = torch.finfo(x.dtype).eps * wanted.abs() + 1e-5 * size
        if not bool(((found[:, end].float() - wanted).abs() <= bound).all()):
            return False
    return True
