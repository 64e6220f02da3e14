"""The attention implementation "jaxkv" of Transformers: our paged kernels on the pages of a `JaxkvCache`.

Importing `torch_bridge` registers it; `model.set_attn_implementation("jaxkv")` chooses it.
"""

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from torch_bridge.calls import hand_out, run
from torch_bridge.direct import decode_kernel
from torch_bridge.dlpack import from_torch
from torch_bridge.gradients import refuse_gradient
from torch_bridge.step import ACTIVE, Step, padded

NAME = "jaxkv"
_SMALLEST_PACKING = 16


def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401 - Transformers passes more than attention needs
) -> tuple[torch.Tensor, None]:
    """Attends causally from the step's queries to their rows' pages, which hold the step's keys already.

    Args:
        module: the attention layer; its `layer_idx` names the pages.
        query: [rows, heads, queries, head_dim], rotated.
        key: the step's keys, unused: they are in the pages.
        value: likewise.
        attention_mask: must be `None`; padding and windows are known from the cache.
        scaling: factor on the scores; `None` for `head_dim ** -0.5`.
        dropout: must be 0.
        sliding_window: tokens a query sees; must be what the cache has for the layer, where it is given.
        softcap: bound of the scores.
        s_aux: one logit per head that joins the softmax's denominator.
        **kwargs: unused.

    Returns:
        [rows, queries, heads, head_dim] in the query's dtype, zero for padding, and no weights.

    Raises:
        ValueError: the forward has no `JaxkvCache`, or asks for something the kernels cannot do.
    """
    step = ACTIVE.get()
    if step is None:
        raise ValueError(
            f'attention "{NAME}" reads the pages of a JaxkvCache, and this forward has none: pass '
            f"past_key_values=JaxkvCache(model), to the model it was made for, or "
            f'model.set_attn_implementation("sdpa")'
        )
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    window = step.window(layer)
    if attention_mask is not None:
        raise ValueError(
            f'attention "{NAME}" takes 2-D masks of padding alone, got {list(attention_mask.shape)}; use "sdpa"'
        )
    if dropout or not getattr(module, "is_causal", True):
        raise ValueError(
            f'attention "{NAME}" is causal and has no dropout; call model.eval(), or use "sdpa"'
        )
    if sliding_window is not None and sliding_window != window:
        raise ValueError(
            f"layer {layer} wants a window of {sliding_window}, the cache was made for {window}"
        )
    options = {
        "scale": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "window": window,
        "soft_cap": softcap,
        "sinks": None if s_aux is None else from_torch(s_aux.detach().to(query.dtype)),
    }
    out = _attend(step, layer, query.detach(), options)
    return refuse_gradient(out.to(query.dtype), query), None


def _attend(step: Step, layer: int, query: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Returns [rows, queries, heads, head_dim]."""
    names = [f"layer{layer}.{role}" for role in ("key", "value")]
    keys, values = (step.lease[name] for name in names)
    packed = step.pack(query).to(keys.dtype).contiguous()
    tables = step.tables(layer)
    decodes = step.num_queries == 1 and step.is_dense
    if decodes and options["sinks"] is None:
        shared = {name: options[name] for name in ("scale", "window", "soft_cap")}
        tensors = (packed, keys, values, tables.page_table, step.seq_lens)
        launch = decode_kernel(*tensors, **shared)
        if launch is not None:
            return step.unpack(launch(*tensors))
    rows = (tables.page_table_array, step.seq_lens_array)
    pages = [step.lease.array(name) for name in names]
    if decodes:
        out = run("paged_attention", from_torch(packed), *pages, *rows, **options)
        return step.unpack(hand_out(out))
    # Programs are compiled for padded lengths; what lies past the last row's end is not read.
    room = padded(step.num_tokens, _SMALLEST_PACKING)
    packed = torch.nn.functional.pad(packed, (0, 0, 0, 0, 0, room - step.num_tokens))
    arrays = (from_torch(packed), *pages, *rows, step.cu_q_lens_array)
    out = hand_out(run("ragged_attention", *arrays, **options))
    return step.unpack(out[: step.num_tokens])


def no_mask(*args: Any, mask_function: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:  # noqa: ANN401
    """Makes no mask: the cache knows padding and windows. Refuses masks that hide or show anything else."""
    windowed = kwargs.get("local_size") is not None
    if use_vmap or (not windowed and mask_function is not causal_mask_function):
        raise ValueError(
            f'attention "{NAME}" is causal, with windows and padding; this model asks for another mask, use "sdpa"'
        )


AttentionInterface.register(NAME, paged_attention_forward)
AttentionMaskInterface.register(NAME, no_mask)
