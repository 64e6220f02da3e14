"""Puts fused forwards on the modules of a model while caches use it."""

import importlib.util
from collections.abc import Callable

import torch

from torch_bridge.on_model import OnModel

_NAME = "forward"


def install(model: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """Puts fused forwards on the model's known modules, where kernels can run.

    Args:
        model: the model; only a weak reference is kept.
        device: the model's device.

    Returns:
        A function that takes them back; the last of a model's callers removes them.
    """
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return lambda: None
    return _FUSED.use(model)


def _put(model: torch.nn.Module) -> None:
    # Here, since Triton takes a second to import and is only there with a GPU.
    from torch_bridge.fused.forwards import kind_of

    for module in model.modules():
        kind = kind_of(module)
        if kind is not None:
            vars(module)[_NAME] = kind(module)


def _take(model: torch.nn.Module, _: None) -> None:
    from torch_bridge.fused.forwards import FusedForward

    for module in model.modules():
        if isinstance(vars(module).get(_NAME), FusedForward):
            del vars(module)[_NAME]


_FUSED = OnModel(_put, _take)
