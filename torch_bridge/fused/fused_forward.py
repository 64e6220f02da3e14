"""`FusedForward`: the base of forwards in which kernels stand for operations, and when they may."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from torch_bridge.own_forward import OwnForward
from torch_bridge.transformers_cache.step import active

IS_ON = True
"""Whether kernels run at all; otherwise every module's own forward does."""

_DTYPES = (torch.bfloat16, torch.float16)


class FusedForward(OwnForward):
    """Callable in the place of a module's forward; refers to the module weakly, and is copied and pickled with it."""

    def __init__(self, module: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(module, inner)
        self._known = type(module).forward

    def stands_for(self, module: torch.nn.Module) -> bool:
        """Whether the forward of the module's class is still the one in whose place this was put."""
        return type(module).forward is self._known

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the module's own
        """Computes the module's forward, with a kernel where one stands for it."""
        module: Any = self.module()
        is_wanted = IS_ON and not torch.compiler.is_compiling() and _is_wanted()
        if is_wanted and self.stands_for(module):
            out = self.fused(module, *args, **kwargs)
            if out is not None:
                return out
        return type(module).forward(module, *args, **kwargs)

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the forward's result, or `None` if no kernel stands for it."""
        raise NotImplementedError


def _is_wanted() -> bool:
    step = active()
    return step is not None and step.decodes and step.attends_pages


def fits(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a kernel can compute with two tensors."""
    return (
        is_plain(x)
        and is_plain(other)
        and x.dtype == other.dtype
        and x.is_contiguous()
        and other.is_contiguous()
        and x.numel() > 0
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a kernel can read a tensor: in 16 bits, on torch's current GPU, and without a gradient."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.dtype in _DTYPES
        and _runs_on(tensor.device)
        and not (torch.is_grad_enabled() and tensor.requires_grad)
    )


def _runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return False
    return device.index == torch.cuda.current_device()


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling a module calls more than its forward."""
    hooks = [*module._forward_hooks, *module._forward_pre_hooks]
    return bool(hooks) or bool(torch_module._has_any_global_hook())
