"""Cache specs of recurrent layers of Transformers models, in Transformers' own shapes, by the class of their mixer.

The state of a convolution holds the last `width` inputs of each channel. What a mixer remembers beside it has the shape
that the mixer's class gives it, in float32 whatever the model computes in.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from jaxkv.cache.spec import ArraySpec, CacheLayout, StateSpec
from pallas_kernels.dispatch import Unsupported

type _Shape = Callable[[torch.nn.Module], tuple[int, ...]]


def _sizes(*names: str) -> _Shape:
    """Returns a function that reads the sizes of a state from attributes of its mixer."""
    return lambda mixer: tuple(int(getattr(mixer, name)) for name in names)


_MAMBA = ("mamba1", "ssm", _sizes("intermediate_size", "ssm_state_size"))
_MAMBA2 = ("mamba2", "ssm", _sizes("num_heads", "head_dim", "ssm_state_size"))
_DELTA = ("delta", "delta", _sizes("num_v_heads", "head_k_dim", "head_v_dim"))
_KIMI_DELTA = ("delta", "delta", _sizes("num_heads", "head_dim", "head_dim"))
_CONV = ("short_conv", "", _sizes())

MIXERS: Mapping[str, tuple[str, str, _Shape]] = MappingProxyType(
    {
        "MambaMixer": _MAMBA,
        "FalconMambaMixer": _MAMBA,
        "JambaMambaMixer": _MAMBA,
        "Mamba2Mixer": _MAMBA2,
        "BambaMixer": _MAMBA2,
        "GraniteMoeHybridMambaLayer": _MAMBA2,
        "NemotronHMamba2Mixer": _MAMBA2,
        "FalconH1Mixer": _MAMBA2,
        "Qwen3NextGatedDeltaNet": _DELTA,
        "Qwen3_5GatedDeltaNet": _DELTA,
        "Qwen3_5MoeGatedDeltaNet": _DELTA,
        "OlmoHybridGatedDeltaNet": _DELTA,
        "KimiLinearDeltaAttention": _KIMI_DELTA,
        "Lfm2ShortConv": _CONV,
        "Lfm2MoeShortConv": _CONV,
    }
)
"""Class of a mixer -> kind of its spec, role of its state beside the convolution's ("" for none), and that shape."""


def can_begin_from_states(layout: CacheLayout) -> bool:
    """Whether a forward of several tokens continues the states that it finds.

    Transformers' scan of Mamba's first version begins at zero, whatever the state.
    """
    return all(group.spec.kind != "mamba1" for group in layout.state_groups)


def mixers_by_layer(model: torch.nn.Module) -> dict[int, torch.nn.Module]:
    """Returns layer -> its recurrent mixer, for the mixers in `MIXERS`."""
    known = (one for one in model.modules() if type(one).__name__ in MIXERS)
    return {
        layer: one for one in known if isinstance(layer := getattr(one, "layer_idx", None), int)
    }


def state_spec(
    config: Any,  # noqa: ANN401 - every family has a class of its own
    layer: int,
    mixer: torch.nn.Module | None,
    dtype: str,
) -> StateSpec:
    """Returns the spec of the states of one layer.

    Args:
        config: config of the decoder.
        layer: index of the layer.
        mixer: the layer's mixer; `None` if it has none of `MIXERS`.
        dtype: dtype name of the model, which is that of the convolution's inputs.

    Raises:
        Unsupported: there is no such mixer, or the model keeps several states per layer.
    """
    name, several = type(config).__name__, getattr(config, "number_of_conv_states", 1) != 1
    conv = None
    if mixer is not None and not several:
        conv = next((one for one in mixer.children() if isinstance(one, torch.nn.Conv1d)), None)
    if mixer is None or conv is None:
        raise Unsupported(
            f"layer {layer} of {name} has recurrent states that JaxkvCache does not know; it knows one state per layer "
            f"of {', '.join(MIXERS)}. Use Transformers' DynamicCache for this model"
        )
    kind, role, shape = MIXERS[type(mixer).__name__]
    arrays = [ArraySpec("conv", (conv.in_channels, conv.kernel_size[0]), dtype)]
    if role:
        arrays.append(ArraySpec(role, shape(mixer), "float32"))
    return StateSpec(kind, tuple(arrays))
