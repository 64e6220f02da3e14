"""Makes a backward pass through tensors from jaxkv's pools and kernels raise, since they carry no gradient."""

from typing import Any

import torch


def refuse_gradient(result: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Returns `result`, attached to the autograd graph of `source`, so that a backward pass raises `RuntimeError`.

    Without it the pass would run and silently lack the gradient through `result`.
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
            "jaxkv's caches and kernels have no gradient: pages store no autograd graph. Train without a cache and "
            "with Transformers' own attention, or run the forward under torch.no_grad()"
        )
