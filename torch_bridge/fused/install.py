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
    from torch_bridge.fused.forwards import FusedLayer, kind_of, linears_of
    from torch_bridge.fused.linear import FusedLinear

    for module in model.modules():
        kind = kind_of(module)
        if kind is not None:
            vars(module)[_NAME] = kind(module)
            for part in linears_of(module):
                vars(part)[_NAME] = FusedLinear(part)
    for module in model.modules():
        layers = getattr(module, "layers", None)
        norm = getattr(module, "norm", None)
        if isinstance(layers, torch.nn.ModuleList) and isinstance(norm, torch.nn.Module):
            norms = [getattr(layer, "input_layernorm", None) for layer in layers[1:]]
            for layer, following in zip(layers, [*norms, norm], strict=True):
                forward = vars(layer).get(_NAME)
                if isinstance(forward, FusedLayer) and following is not None:
                    forward.read_by(following)


def _take(model: torch.nn.Module, _: None) -> None:
    from torch_bridge.fused.fused_forward import FusedForward

    for module in model.modules():
        if isinstance(vars(module).get(_NAME), FusedForward):
            del vars(module)[_NAME]


_FUSED = OnModel(_put, _take)
