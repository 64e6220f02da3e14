"""Forwards of known modules whose small operations run as one kernel, in decode steps on pages.

A module is known by the bytecode of its class's forward. Before a kernel is used, it is compared with the module's own
operations on made-up numbers. All other calls run the module's own forward.
"""

import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama as llama
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from torch_bridge.fused import kernels
from torch_bridge.fused.checked import agree, is_right, numbers
from torch_bridge.fused.fused_forward import FusedForward, fits, has_hooks, is_plain
from torch_bridge.fused.known_code import is_same
from torch_bridge.fused.linear import compute_together, forget_products

_NORMS = {
    llama.LlamaRMSNorm: kernels.ROUNDED,
    GemmaRMSNorm: kernels.CENTRED,
    Olmo2RMSNorm: kernels.WIDE,
}
_ACTIVATIONS = {
    torch.nn.SiLU: kernels.SILU,
    SiLUActivation: kernels.SILU,
    GELUTanh: kernels.GELU_TANH,
}
_ROTATION = "apply_rotary_pos_emb"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMED = "_jaxkv_normed"
"""Name of the attribute of a tensor that has a norm of it."""
_OF_LAYER = {
    "attention_mask": None,
    "position_ids": None,
    "past_key_values": None,
    "use_cache": False,
    "position_embeddings": None,
}
"""Defaults of the arguments that Llama's decoder layer passes on to attention."""


class FusedNorm(FusedForward):
    """RMS norms in the forms of Llama, Gemma and OLMo 2."""

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the norm of one tensor."""
        if kwargs or len(args) != 1 or not _fits_norm(module, args[0]):
            return None
        (x,) = args
        known = getattr(x, _NORMED, None)
        if known is not None:
            # It is used once; tensors that a caller keeps or saves do not hold modules.
            delattr(x, _NORMED)
            if known.norm is module and known.version == x._version:
                return known.result
        return kernels.norm(x, module.weight, _epsilon(module), _form(module))


class FusedLayer(FusedForward):
    """Decoder layers in Llama's order: each of the two sums and the norm that reads it are one kernel."""

    def __init__(self, module: torch.nn.Module, inner: Callable[..., Any] | None = None) -> None:
        super().__init__(module, inner)
        self._next: weakref.ref[torch.nn.Module] | None = None

    def read_by(self, norm: torch.nn.Module) -> None:
        """Names the norm that reads the layer's result."""
        self._next = weakref.ref(norm)

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the layer's result; its parts are called as modules, except for norms without hooks."""
        norm = module.post_attention_layernorm
        if len(args) != 1 or "hidden_states" in kwargs or not _fits_sum(norm, args[0]):
            return None
        (residual,) = args
        hidden = module.input_layernorm(residual)
        hidden, _ = module.self_attn(hidden_states=hidden, **(_OF_LAYER | kwargs))
        if _fits_sum(norm, hidden) and hidden.shape == residual.shape:
            residual, hidden = _add_and_norm(norm, hidden, residual)
        else:
            residual = residual + hidden
            hidden = norm(residual)
        hidden = module.mlp(hidden)
        following = None if self._next is None else self._next()
        if following is None or not _fits_sum(following, hidden):
            return residual + hidden
        if hidden.shape != residual.shape or hidden.is_inference():
            return residual + hidden
        total, normed = _add_and_norm(following, hidden, residual)
        setattr(total, _NORMED, _Normed(following, total._version, normed))
        return total


@dataclass(frozen=True)
class _Normed:
    """A norm of a tensor, which holds this as an attribute.

    Attributes:
        norm: the norm's module.
        version: the tensor's version, which operations in place change.
        result: the result.
    """

    norm: torch.nn.Module
    version: int
    result: torch.Tensor


def _fits_norm(norm: Any, x: torch.Tensor) -> bool:  # noqa: ANN401
    """Whether the kernel stands for a norm of a tensor."""
    weight = norm.weight
    if not fits(x, weight) or x.shape[-1:] != weight.shape:
        return False

    def check() -> bool:
        given = numbers((2, len(weight)), weight)
        found = kernels.norm(given, weight, _epsilon(norm), _form(norm))
        return agree(found, type(norm).forward(norm, given))

    return is_right(("norm", type(norm), len(weight), weight.dtype, weight.device), check)


def _fits_sum(norm: Any, x: torch.Tensor) -> bool:  # noqa: ANN401
    """Whether the kernel stands for a norm of a sum that has the shape of a tensor; `norm` is not called then."""
    own = vars(norm).get("forward")
    is_own = isinstance(own, FusedNorm) and own.stands_for(norm)
    if not is_own or has_hooks(norm) or not _fits_norm(norm, x):
        return False

    def check() -> bool:
        one, other = (numbers((2, len(norm.weight)), norm.weight, factor) for factor in (1.0, 0.4))
        total, found = _add_and_norm(norm, one, other)
        return torch.equal(total, other + one) and agree(found, type(norm).forward(norm, total))

    return is_right(("sum and norm", type(norm), *norm.weight.shape, x.dtype, x.device), check)


def _add_and_norm(
    norm: Any,  # noqa: ANN401
    x: torch.Tensor,
    residual: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    return kernels.add_and_norm(x, residual, norm.weight, _epsilon(norm), _form(norm))


def _form(norm: torch.nn.Module) -> int:
    form = _form_of_norm(type(norm))
    assert form is not None
    return form


def _epsilon(norm: Any) -> float:  # noqa: ANN401
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class FusedGate(FusedForward):
    """Feed-forward layers `down(activation(gate(x)) * up(x))`."""

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the layer's result; the projections are called as modules."""
        if kwargs or len(args) != 1:
            return None
        x, activation = args[0], module.act_fn
        form = _ACTIVATIONS.get(type(activation))
        is_own = "forward" not in vars(activation) and not has_hooks(activation)
        if form is None or not is_own or not fits(x, x):
            return None

        def check() -> bool:
            given, up = numbers((2, 3000), x), numbers((2, 3000), x, 1.3)
            return agree(kernels.gate(given, up, form), activation(given) * up)

        kind = ("gate", type(activation), type(activation).forward, x.dtype, x.device)
        if not is_right(kind, check):
            return None
        compute_together(x, (module.gate_proj, module.up_proj))
        given, up = module.gate_proj(x), module.up_proj(x)
        forget_products(x)
        same = given.shape == up.shape and given.dtype == up.dtype
        if not same or not fits(given, up):
            return module.down_proj(activation(given) * up)
        return module.down_proj(kernels.gate(given, up, form))


class Rotating(FusedForward):
    """Attention layers: their class's own forward, which finds a kernel in the place of `apply_rotary_pos_emb`."""

    def fused(self, module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Returns the layer's result."""
        forward = type(module).forward
        own = _rotation_of(forward)
        if own is None:
            return None
        turned = types.FunctionType(
            forward.__code__,
            {**forward.__globals__, _ROTATION: partial(_rotated, own)},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        turned.__kwdefaults__ = forward.__kwdefaults__
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor):
            parts = [getattr(module, name, None) for name in _PROJECTIONS[:3]]
            compute_together(hidden, parts)
        out = turned(module, *args, **kwargs)
        forget_products(hidden)
        return out


def _rotated(
    own: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *args: Any,  # noqa: ANN401 - the model's own
    **kwargs: Any,  # noqa: ANN401
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `own(q, k, cos, sin, ...)`."""

    def check() -> bool:
        given = [numbers((2, heads, 1, q.shape[3]), q, heads) for heads in (3, 2)]
        angles = [numbers((2, 1, q.shape[3]), q, factor) for factor in (0.6, 0.8)]
        pairs = zip(kernels.rotate(*given, *angles), own(*given, *angles), strict=True)
        return all(agree(*pair) for pair in pairs)

    kind = ("rotation", own, q.shape[-1], q.dtype, q.device)
    if args or kwargs or not _fits_rotation(q, k, cos, sin) or not is_right(kind, check):
        return own(q, k, cos, sin, *args, **kwargs)
    return kernels.rotate(q, k, cos, sin)


def _fits_rotation(*tensors: torch.Tensor) -> bool:
    """Whether queries and keys are those of one token per row, and the angles are one per element of a head."""
    q, k, cos, sin = tensors
    rows, width = len(q), q.shape[-1]
    if not all(map(is_plain, tensors)) or not (q.dtype == k.dtype == cos.dtype == sin.dtype):
        return False
    if q.ndim != 4 or k.shape != (rows, k.shape[1], 1, width) or q.shape[2] != 1 or width % 2:
        return False
    if cos.shape not in ((rows, 1, width), (1, 1, width)) or sin.shape != cos.shape:
        return False
    return (
        all(one.stride(1) == width and one.stride(3) == 1 for one in (q, k))
        and cos.stride() == sin.stride()
        and cos.stride(2) == 1
    )


def linears_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns the projections inside a fused module whose products kernels may compute."""
    names = {FusedGate: ("gate_proj", "up_proj", "down_proj"), Rotating: _PROJECTIONS}
    found = names.get(type(vars(module).get("forward")), ())
    parts = [getattr(module, name, None) for name in found]
    return [one for one in parts if type(one) is torch.nn.Linear and "forward" not in vars(one)]


def kind_of(module: torch.nn.Module) -> type[FusedForward] | None:
    """Returns the fused forward of a module, or `None` if its class's forward is unknown or not the one it calls."""
    forward = type(module).forward
    if "forward" in vars(module) or not isinstance(forward, types.FunctionType):
        return None
    if _form_of_norm(type(module)) is not None and isinstance(
        getattr(module, "weight", None), torch.nn.Parameter
    ):
        return FusedNorm
    if is_same(forward, llama.LlamaMLP.forward) and type(module.act_fn) in _ACTIVATIONS:
        return FusedGate
    known = llama.LlamaDecoderLayer.forward
    names = forward.__code__.co_varnames == known.__code__.co_varnames
    if names and is_same(forward, known):
        return FusedLayer
    return None if _rotation_of(forward) is None else Rotating


def _form_of_norm(kind: type[Any]) -> int | None:
    """Returns the form of a class of norms, or `None`."""
    return _form_of(kind.forward, getattr(kind, "_norm", None))


@cache
def _form_of(forward: object, norm: object) -> int | None:
    """Returns the form of norms with a forward, and the method `_norm` that it may call, or `None`."""
    for kind, form in _NORMS.items():
        known = getattr(kind, "_norm", None)
        same_norm = norm is known is None or is_same(norm, known)
        if same_norm and is_same(forward, kind.forward):
            return form
    return None


def _rotation_of(forward: types.FunctionType) -> types.FunctionType | None:
    """Returns the rotation that a forward calls, if it is Llama's."""
    if _ROTATION not in forward.__code__.co_names:
        return None
    own = forward.__globals__.get(_ROTATION)
    return own if is_same(own, llama.apply_rotary_pos_emb) else None
