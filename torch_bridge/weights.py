"""Parameters of a jaxkv model from a torch model's weights, in the same memory where both have the same layout."""

from collections.abc import Mapping
from typing import Any

import jax
import torch

from jaxkv.models.registry import rules_for
from jaxkv.weights.load import Loadable
from jaxkv.weights.rules import Recipe, expand
from jaxkv.wording import listed
from torch_bridge.errors import NotZeroCopy
from torch_bridge.sharing.dlpack import from_torch, why_not_zero_copy

_SHOWN = 4


def share_params(
    source: torch.nn.Module | Mapping[str, torch.Tensor], model: Loadable, *, copy: bool = False
) -> Any:  # noqa: ANN401 - a pytree, as the model has it
    """Returns jaxkv parameters made of a Transformers model's weights, shared without copies where possible.

    Projections of the same input are one matrix in jaxkv and several in torch, so a whole model needs `copy=True`.
    Their weights are then concatenated once. If `source` is a module, its parameters become views of the concatenated
    matrix: both models share memory again and use no more of it than before.

    Args:
        source: a Transformers model, or its `state_dict()`, whose tensors stay unchanged.
        model: the jaxkv model of the same config, from `jaxkv.models.registry.build_model`.
        copy: allow copies of weights whose layout differs.

    Returns:
        A tree like `model.param_shapes(dtype)`. Do not donate it: torch uses the same memory. JAX takes the arrays for
        constant, so stop jaxkv's steps before torch changes its weights, and share again afterwards.

    Raises:
        NotZeroCopy: some parameters would be copies, and `copy` is False; the message lists them with the reasons.
        ValueError: a tensor is missing or has another shape or dtype, or the family computes its parameters by more
            than concatenation.
    """
    if isinstance(source, torch.nn.Module):
        tensors: Mapping[str, torch.Tensor] = source.state_dict(keep_vars=True)
    else:
        tensors = source
    _refuse_few_bits(tensors)
    rules = rules_for(model.config)
    tensors = {rules.name_of(name, model.config): tensor for name, tensor in tensors.items()}
    recipes = expand(rules, model.config)
    dtype = _dtype_of(tensors, recipes)
    leaves, structure = jax.tree_util.tree_flatten_with_path(model.param_shapes(dtype))
    named = [
        (recipes[jax.tree_util.keystr(path, simple=True, separator=".")], leaf.shape)
        for path, leaf in leaves
    ]
    _check_joins(named)
    sources = [_sources(recipe, shape, tensors) for recipe, shape in named]
    refusals = [
        f"{recipe.target}: {reason}"
        for (recipe, _), parts in zip(named, sources, strict=True)
        if (reason := _why_not_shared(recipe, parts)) is not None
    ]
    if refusals and not copy:
        raise NotZeroCopy(
            f"{len(refusals)} of {len(named)} parameters cannot be shared without a copy: "
            f"{listed(refusals, separator='; ', most=_SHOWN)}. Pass copy=True to copy only these"
        )
    arrays = [
        _share(recipe, parts, repoint=isinstance(source, torch.nn.Module))
        for (recipe, _), parts in zip(named, sources, strict=True)
    ]
    return structure.unflatten(arrays)


def _refuse_few_bits(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises `ValueError` for a model whose weights are quantised."""
    ends = (
        ".qweight",
        ".weight_packed",
        ".weight_scale",
        ".weight_scale_inv",
        "_blocks",
        ".absmax",
    )
    found = sorted(name for name in tensors if name.endswith(ends))
    if found:
        raise ValueError(
            f"the torch model's weights are quantised ({listed(found, most=_SHOWN)}), and their layout is not that of "
            "jaxkv, so they cannot be shared; read the checkpoint with jaxkv.load_model"
        )


def _dtype_of(tensors: Mapping[str, torch.Tensor], recipes: Mapping[str, Recipe]) -> str:
    names = {name for recipe in recipes.values() for name in recipe.sources}
    missing = sorted(names - tensors.keys())
    if missing:
        raise ValueError(
            f"the weights lack {missing[0]!r} and {len(missing) - 1} more that the model is made of; give the model "
            f"with its head (...ForCausalLM), of the same config"
        )
    dtypes = {str(tensors[name].dtype)[6:] for name in names}
    if len(dtypes) != 1:
        raise ValueError(
            f"the weights must share one dtype, got {sorted(dtypes)}; call model.to(...)"
        )
    return dtypes.pop()


def _check_joins(named: list[tuple[Recipe, tuple[int, ...]]]) -> None:
    """Raises `ValueError` for families whose parameters are not plain copies or concatenations of torch's weights."""
    for recipe, shape in named:
        joined = recipe.combine == "stack" and len(recipe.sources) == shape[0]
        plain = joined or recipe.combine in ("copy", "concat", "taps")
        reordered = recipe.regroup is not None or recipe.pairs is not None
        if not plain or recipe.offset or reordered:
            raise ValueError(
                f"{recipe.target} is made of {recipe.sources[0]!r} by more than putting weights together, so this "
                "family cannot be shared; save the model and read it with jaxkv.models.registry.load_params"
            )


def _sources(
    recipe: Recipe, shape: tuple[int, ...], tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    parts = [tensors[name] for name in recipe.sources]
    for name, part, wanted in zip(recipe.sources, parts, recipe.source_shapes(shape), strict=True):
        if tuple(part.shape) != wanted:
            raise ValueError(f"{name!r} has shape {list(part.shape)}, wanted {list(wanted)}")
    return parts


def _why_not_shared(recipe: Recipe, parts: list[torch.Tensor]) -> str | None:
    if recipe.combine == "copy":
        return why_not_zero_copy(parts[0].detach())
    if recipe.combine == "taps":
        return f"{recipe.sources[0]} has its axes in another order in torch"
    if _joined_already(recipe, parts) is not None:
        return None
    return f"{', '.join(name.rpartition('.')[0] for name in recipe.sources)} are separate in torch and one matrix here"


def _joined_already(recipe: Recipe, parts: list[torch.Tensor]) -> torch.Tensor | None:
    """Returns the tensor that the parts are consecutive pieces of, as an earlier call leaves them; else `None`."""
    first = parts[0].detach()
    end = first.data_ptr()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (same and part.is_contiguous() and part.data_ptr() == end):
            return None
        end += part.numel() * part.element_size()
    shape = (len(parts), *first.shape)
    if recipe.combine == "concat":
        shape = (sum(recipe.rows), *first.shape[1:])
    strides = torch.empty(shape, device="meta").stride()
    whole = first.as_strided(shape, strides)
    return whole if why_not_zero_copy(whole) is None else None


def _share(recipe: Recipe, parts: list[torch.Tensor], *, repoint: bool) -> jax.Array:
    """Returns one parameter; with `repoint`, the torch parameters become views of the concatenated tensor."""
    if recipe.combine == "copy":
        return from_torch(parts[0].detach(), copy=True)
    if recipe.combine == "taps":
        return from_torch(parts[0].detach()[:, 0].T.contiguous())
    whole = _joined_already(recipe, parts)
    if whole is None:
        stacked = recipe.combine == "stack"
        whole = (torch.stack if stacked else torch.cat)([part.detach() for part in parts])
        pieces = whole.unbind() if stacked else whole.split(list(recipe.rows))
        for part, piece in zip(parts, pieces, strict=True):
            if repoint:
                part.data = piece
    return from_torch(whole)
