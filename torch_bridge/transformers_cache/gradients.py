"""What our memory and kernels give torch carries no gradient, and says so when one is asked for."""

from typing import Any

import torch


def refuse_gradient(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns the result, joined to its source's graph if there is one, so that a backward pass fails with a reason.

    Without it the pass would run and give gradients that lack a term.
    """
    if torch.is_grad_enabled() and source.requires_grad:
        return _Refusal.apply(result, source)  # pyright: ignore[reportReturnType]
    return result


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ANN401
        raise RuntimeError(
            "jaxkv's caches and kernels have no gradient: pages keep numbers and no graph. Train without a cache and "
            "with Transformers' own attention, or run the forward under torch.no_grad()"
        )
