"""The attention implementation "jaxkv" for Transformers: paged kernels that read the pages of a `JaxkvCache`.

Importing `torch_bridge` registers it; `model.set_attn_implementation("jaxkv")` chooses it.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from pallas_kernels.dispatch import Unsupported
from torch_bridge import kernels
from torch_bridge.ops.calls import call, hand_out, run
from torch_bridge.ops.direct import decode_kernel, fitted, ragged_kernel
from torch_bridge.sharing.dlpack import from_torch
from torch_bridge.transformers_cache.gradients import refuse_gradient
from torch_bridge.transformers_cache.model_layout import caches_latents
from torch_bridge.transformers_cache.step import Step, active
from torch_bridge.transformers_cache.tables import GroupTables, NotRecordable, padded
from torch_bridge.transformers_cache.uncompiled import uncompiled

NAME = "jaxkv"
_SMALLEST_PACKING = 16
_REWRITES = (
    f'attends to other keys or values than it gave the cache, which attention "{NAME}" would read in the pages; use '
    f'model.set_attn_implementation("sdpa"), which works with JaxkvCache too'
)
_REWRITING = ("diffllama", "hrm_text", "jetmoe")
"""Model types that transform cached keys before attention, or whose cache index is not the layer's `layer_idx`."""


def attends_pages(model: PreTrainedModel) -> bool:
    """Whether a model's attention is "jaxkv".

    Raises:
        Unsupported: the attention is "jaxkv", but the model attends to other keys than those it caches.
    """
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        return False
    if config.model_type in _REWRITING or caches_latents(config):
        raise Unsupported(f"{type(model).__name__} {_REWRITES}")
    return True


@uncompiled
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
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,  # noqa: ANN401 - Transformers passes more than attention needs
) -> tuple[torch.Tensor, None]:
    """Causal attention from the step's queries to the pages of their rows, which already hold the step's keys.

    Args:
        module: the attention layer; its `layer_idx` names the pages.
        query: [rows, heads, queries, head_dim], rotated.
        key: the step's keys, the same tensor object that the cache was given; attention reads them from the pages.
        value: the step's values, with the same condition.
        attention_mask: must be `None`; the cache has padding and windows.
        scaling: factor on the scores; `None` for `head_dim ** -0.5`.
        dropout: must be 0.
        sliding_window: tokens a query sees, itself included; if given, must equal the cache's window of the layer.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        s_aux: attention sinks: one logit per head, added to the softmax's denominator.
        is_causal: must not be False; `None` for the module's own.
        position_bias: must be `None`.
        **kwargs: unused.

    Returns:
        The output [rows, queries, heads, head_dim] in the query's dtype, zero at padding; and `None` for the weights.

    Raises:
        ValueError: the forward has no `JaxkvCache`, or needs a mask, bias, dropout or window that no kernel supports.
    """
    step = active()
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    if step is not None and not step.keeps(layer):
        raise ValueError(
            f'layer {layer} of {type(module).__name__} has no keys of its own, so attention "{NAME}" has no pages for '
            f'it; use model.set_attn_implementation("sdpa"), which works with JaxkvCache too'
        )
    written = None if step is None else step.take_written(layer)
    if step is None or written is None:
        raise ValueError(
            f'attention "{NAME}" reads the pages of a JaxkvCache, and this forward has none: pass '
            f"past_key_values=JaxkvCache(model), to the model it was made for, or "
            f'model.set_attn_implementation("sdpa"). Transformers itself drops the cache where a text of Phi-3 with '
            f"longrope passes original_max_position_embeddings"
        )
    if written[0] is not key or written[1] is not value:
        raise ValueError(f"{type(module).__name__} {_REWRITES}")
    window = step.window(layer)
    if attention_mask is not None:
        raise ValueError(
            f'attention "{NAME}" takes 2-D masks of padding alone, got {list(attention_mask.shape)}; use "sdpa"'
        )
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if dropout or not is_causal or position_bias is not None:
        raise ValueError(
            f'attention "{NAME}" is causal and has no dropout and no position_bias; call model.eval(), or use "sdpa"'
        )
    if sliding_window is not None and sliding_window != window:
        raise ValueError(
            f"layer {layer} has a window of {sliding_window}, but the cache was made for {window}; make a new one"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    given = query.detach() if query.requires_grad else query
    sinks = None if s_aux is None else s_aux.detach().to(query.dtype)
    out = _launch(step, layer, given, scale, softcap, sinks)
    if out is None:
        options = {"scale": scale, "window": window, "soft_cap": softcap, "sinks": sinks}
        out = _run(step, layer, given, options)
    out = out if out.dtype == query.dtype else out.to(query.dtype)
    return refuse_gradient(out, query), None


def _launch(
    step: Step,
    layer: int,
    query: torch.Tensor,
    scale: float,
    soft_cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor | None:
    """Launches a kernel without XLA; returns [rows, queries, heads, head_dim], or `None` if no kernel supports it.

    The kernel is looked up once per step for all layers of the same group, shape and settings.
    """
    pools = step.pools(layer)
    packed = fitted(_packed(step, query, pools[0].dtype))
    kind = (step.group(layer), packed.shape, scale, soft_cap, sinks is None)
    if kind not in step.launches:
        options = {"scale": scale, "window": step.window(layer), "soft_cap": soft_cap}
        step.launches[kind] = _find_launch(step, layer, packed, options | {"sinks": sinks})
    launch = step.launches[kind]
    return None if launch is None else _unpacked(step, launch(packed, *pools, sinks=sinks))


def _find_launch(
    step: Step, layer: int, packed: torch.Tensor, options: dict[str, Any]
) -> Callable[..., torch.Tensor] | None:
    """Returns a function that launches a kernel on the step's queries and a layer's pools; `None` without a kernel."""
    table, pools = step.tables(layer).page_table, step.pools(layer)
    if step.decodes:
        seq_lens = step.seq_lens
        decode = decode_kernel(packed, *pools, table, seq_lens, **options)
        if decode is None:
            return None
        # The function outlives the step where a graph keeps it, so it must not refer to the step, which has the pools.
        return lambda *tensors, sinks: decode(*tensors, table, seq_lens, sinks=sinks)
    found = ragged_kernel(packed, *pools, table, step.seq_lens, step.cu_q_lens, **options)
    if found is None:
        return None
    if step.fixed_prompt is not None:
        tiles = step.fixed_prompt.tiles(found.plan)
    else:
        planned = call(found.plan, step.seq_lens_array, from_torch(step.cu_q_lens))
        tiles = [hand_out(array) for array in planned]
    return lambda *tensors, sinks: found(*tensors, table, *tiles, sinks=sinks)


def _packed(step: Step, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the step's queries packed row after row, [tokens, heads, head_dim].

    Outside decode, the tokens are padded to a length that programs are compiled for. The padding is not read.
    """
    packed = step.pack(query)
    packed = packed if packed.dtype == dtype else packed.to(dtype)
    if step.decodes:
        return packed
    missing = padded(step.num_tokens, _SMALLEST_PACKING) - step.num_tokens
    return torch.nn.functional.pad(packed, (0, 0, 0, 0, 0, missing)) if missing else packed


def _unpacked(step: Step, out: torch.Tensor) -> torch.Tensor:
    return step.unpack(out if step.decodes else out[: step.num_tokens])


def _run(step: Step, layer: int, query: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Attends through XLA: returns [rows, queries, heads, head_dim]."""
    packed = _packed(step, query, step.pools(layer)[0].dtype).contiguous()
    tables = step.tables(layer)
    if not isinstance(tables, GroupTables):
        return _unpacked(step, _run_recorded(step, layer, packed, options))
    pages = [step.lease.array(f"layer{layer}.{role}") for role in ("key", "value")]
    arrays = [from_torch(packed), *pages, tables.page_table_array, step.seq_lens_array]
    if not step.decodes:
        arrays.append(from_torch(step.cu_q_lens))
    if options["sinks"] is not None:
        options["sinks"] = from_torch(options["sinks"])
    op = "paged_attention" if step.decodes else "ragged_attention"
    return _unpacked(step, hand_out(run(op, *arrays, **options)))


def _run_recorded(
    step: Step, layer: int, packed: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """Attends by a custom op, in a step that is recorded without a kernel that torch launches: on the CPU only."""
    if packed.is_cuda:
        raise NotRecordable(
            f"attention has no kernel here that torch can launch without XLA, for {packed.shape[1]} heads of "
            f"{packed.shape[2]} in {packed.dtype}{'' if options['sinks'] is None else ' with sinks'}; it needs Hopper, "
            f"16 bits and 64 to 256 per head"
        )
    tables = (step.tables(layer).page_table, step.seq_lens)
    # Copies, since JAX may hold its arguments for longer than the lease.
    keys, values = (pool.clone() for pool in step.pools(layer))
    if step.decodes:
        out = kernels.paged_attention(packed.clone(), keys, values, *tables, **options)
    else:
        tables = (*tables, step.cu_q_lens)
        out = kernels.ragged_attention(packed.clone(), keys, values, *tables, **options)
    assert isinstance(out, torch.Tensor)
    return out


def no_mask(*args: Any, mask_function: Any = None, use_vmap: bool = False, **kwargs: Any) -> None:  # noqa: ANN401
    """Returns no mask, since the step has padding and windows; raises `ValueError` for any other mask."""
    windowed = kwargs.get("local_size") is not None
    if use_vmap or (not windowed and mask_function is not causal_mask_function):
        raise ValueError(
            f'attention "{NAME}" supports causal masks with windows and padding, and this model needs another mask; '
            f'use "sdpa"'
        )


AttentionInterface.register(NAME, paged_attention_forward)
AttentionMaskInterface.register(NAME, no_mask)
