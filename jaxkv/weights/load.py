"""`load_by_rules`: reads a checkpoint into a model's parameters, leaf by leaf."""

import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree
from tqdm import tqdm

from jaxkv.config.model import ModelConfig
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.directory import existing_directory, read_json_if_there
from jaxkv.weights.quantised.config import BESIDE, read_quantised
from jaxkv.weights.quantised.expected_types import expected_type
from jaxkv.weights.quantised.few_bits_leaf import FewBitsLeaf, few_bits_leaf, moves_rows
from jaxkv.weights.quantised.join_scales import with_scales
from jaxkv.weights.quantised.quantised_tensor import QuantisedTensor
from jaxkv.weights.quantised.rounding import ROUNDINGS, rounded
from jaxkv.weights.quantised.scheme import Scheme
from jaxkv.weights.rules import Recipe, RuleSet, copies, expand
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, open_checkpoint
from jaxkv.weights.staging import READERS, Placed, fill_leaves
from jaxkv.weights.stored_leaf import Arrangement, LeafPlan, Readable, StoredLeaf, Tensor
from jaxkv.wording import clip, listed

_LOG = logging.getLogger(__name__)

_LAG = 2 * READERS
"""Parameters of several arrays whose codes are read before the scales of an earlier one, which is read by then."""

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@runtime_checkable
class Loadable(Protocol):
    """The members of a model that the loader needs."""

    @property
    def config(self) -> ModelConfig:
        """Architecture and sizes of the model."""
        ...

    def param_shapes(self, dtype: str) -> Any:  # noqa: ANN401 - a pytree
        """Returns the parameter tree as `jax.ShapeDtypeStruct`s."""
        ...

    def few_bits_leaves(self) -> frozenset[str]:
        """Returns the dotted paths of the parameters that may be a `FewBits`."""
        ...


def load_by_rules(
    directory: str | os.PathLike[str],
    model: Loadable,
    rules: RuleSet,
    *,
    dtype: str,
    device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
    quantization: str | None = None,
    progress: bool = True,
    placed: Placed | None = None,
) -> PyTree[jax.Array]:
    """Reads a Hugging Face checkpoint into the parameters of a model.

    All names, shapes and dtypes are checked before any data is read. Threads read leaves while earlier ones are copied
    to the device (`jaxkv.weights.staging`).
    Projections and experts that are quantised (`jaxkv.weights.quantised`) become `FewBits`, with the bits that the
    checkpoint has. Other quantised weights are widened to `dtype` while they are read, and so is a parameter whose
    parts have no common form; a warning names it.

    Args:
        directory: a directory with `model.safetensors`, or shards and their index.
        model: the model whose parameters to read.
        rules: which tensors make up which parameter.
        dtype: "float32", "bfloat16" or "float16"; the stored numbers are rounded to it.
        device: device or sharding of the parameters; `None` for JAX's default device.
        quantization: "fp8", "int8" or "int4" rounds projections and experts of a plain checkpoint while they are read
            (`jaxkv.weights.quantised.rounding`); `None` leaves weights as the checkpoint has them.
        progress: show a progress bar on stderr.
        placed: returns what becomes of a parameter that has arrived, see `fill_leaves`.

    Returns:
        The tree of `model.param_shapes(dtype)` as arrays, with a `FewBits` for each parameter in 8 or 4 bits.

    Raises:
        ValueError: `dtype` or `quantization` is not one of these, or the checkpoint is quantised already.
        BadCheckpoint: the checkpoint is damaged or does not fit the model; the message names file and tensor in one
            line.
        UnknownConfig: `quantization_config` in config.json has an unsupported format.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = existing_directory(directory)
    scheme = scheme_of(folder)
    check_quantization(quantization, scheme)
    with open_checkpoint(folder) as stored:
        plans, structure = plan_leaves(with_scales(stored, scheme), model, rules, dtype, folder)
        if quantization is not None:
            plans = [rounded_plan(plan, model, quantization) for plan in plans]
        made = _leaves(plans, model)
        leaves = [one.leaves if isinstance(one, FewBitsLeaf) else [one] for one in made]
        bar = tqdm(
            total=sum(leaf.stored_bytes for each in leaves for leaf in each),
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        )
        order = reading_order([len(each) for each in leaves])
        arrays: dict[tuple[int, int], jax.Array] = {}
        with bar:
            queue = [leaves[parameter][part] for parameter, part in order]
            arrays |= zip(order, fill_leaves(queue, device, bar.update, placed), strict=True)
        return structure.unflatten(
            one.joined([arrays[at, part] for part in range(len(one.leaves))], placed)
            if isinstance(one, FewBitsLeaf)
            else arrays[at, 0]
            for at, one in enumerate(made)
        )


def reading_order(parts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the number of a parameter, and of its array, in the order in which arrays are read.

    Scales and zero points come after the codes of some further parameters: when codes are rounded as they are read, the
    scales are then known (`rounding`), and no thread reads the rows again.

    Args:
        parts: number of arrays of each parameter.
    """
    order: list[tuple[int, int]] = []
    waiting: deque[list[tuple[int, int]]] = deque()
    for at, count in enumerate(parts):
        order.append((at, 0))
        if count > 1:
            waiting.append([(at, part) for part in range(1, count)])
        if len(waiting) > _LAG:
            order += waiting.popleft()
    return [*order, *chain.from_iterable(waiting)]


def scheme_of(folder: Path) -> Scheme | None:
    """Returns the format of a model directory's quantised weights; `None` if they are not quantised.

    Raises:
        UnknownConfig: the format is not supported.
    """
    beside = {name: read_json_if_there(folder, name) for name in BESIDE}
    return read_quantised(read_json_if_there(folder, "config.json"), beside)


def check_quantization(quantization: object, scheme: Scheme | None) -> None:
    """Raises `ValueError` if weights cannot be rounded to a form."""
    if quantization is None:
        return
    if quantization not in ROUNDINGS:
        raise ValueError(
            f"quantization must be one of {', '.join(ROUNDINGS)}, or None for weights as the checkpoint has them, got "
            f"{clip(repr(quantization), 80)}"
        )
    if scheme is not None:
        raise ValueError(
            f"quantization = {quantization!r} rounds plain weights, and this checkpoint is quantised already "
            f"({scheme.name}); leave it out"
        )


def expected_shapes(
    model: Loadable, rules: RuleSet, *, dtype: str, scheme: Scheme | None, quantization: str | None
) -> Any:  # noqa: ANN401 - a pytree
    """Returns the types of the parameters of a checkpoint of which only the config is known.

    Args:
        model: the model.
        rules: which tensors make up which parameter.
        dtype: dtype name of plain parameters.
        scheme: the checkpoint's format; `None` if it is not quantised.
        quantization: see `load_by_rules`.
    """
    plain = model.param_shapes(dtype)
    if scheme is None and quantization is None:
        return plain
    leaves, structure = jax.tree_util.tree_flatten_with_path(plain)
    recipes, few = expand(rules, model.config), model.few_bits_leaves()
    return structure.unflatten(
        expected_type(leaf, recipes[_dotted(path)], scheme, quantization)
        if _dotted(path) in few
        else leaf
        for path, leaf in leaves
    )


def rounded_plan[S: Readable](
    plan: LeafPlan[S], model: Loadable, quantization: str
) -> LeafPlan[Any]:
    """Returns the plan of a leaf that may be in few bits with its sources rounded; any other one unchanged."""
    fits = moves_rows(plan.arrangement.combine, len(plan.shape)) and not plan.offset
    if plan.target not in model.few_bits_leaves() or not fits:
        return plan
    sources = tuple(
        rounded(source, ROUNDINGS[quantization], plan.dtype)
        for source in plan.sources
        if isinstance(source, StoredTensor)
    )
    return replace(plan, sources=sources)


def _leaves(plans: Sequence[LeafPlan[Any]], model: Loadable) -> list[StoredLeaf | FewBitsLeaf]:
    """Returns how each leaf is read; warns of those that take more memory than the checkpoint's form would."""
    few, made, wide = model.few_bits_leaves(), [], []
    for plan in plans:
        quantised = any(isinstance(source, QuantisedTensor) for source in plan.sources)
        leaf = few_bits_leaf(plan) if quantised and plan.target in few else ""
        if isinstance(leaf, str) and leaf:
            wide.append(f"{plan.target} ({leaf})")
        made.append(StoredLeaf.of(plan) if isinstance(leaf, str) else leaf)
    if wide:
        _LOG.warning(
            "%d parameters are widened to %s: %s",
            len(wide),
            plans[0].dtype.name,
            clip(listed(wide, separator="; "), 400),
        )
    return made


def plan_leaves[S: Tensor](
    tensors: Mapping[str, S], model: Loadable, rules: RuleSet, dtype: str, where: object
) -> tuple[list[LeafPlan[S]], Any]:
    """Returns how each leaf of a model is made of a checkpoint's tensors, and the structure of the parameters.

    Args:
        tensors: by their names in the checkpoint.
        model: the model.
        rules: which tensors make up which leaf.
        dtype: dtype name of the leaves.
        where: where the tensors are, for error messages.

    Raises:
        BadCheckpoint: a tensor is missing, has a wrong shape or dtype, has two names, or has no use.
    """
    shapes, structure = jax.tree_util.tree_flatten_with_path(model.param_shapes(dtype))
    named = _by_rule_names(tensors, rules, model.config)
    recipes = expand(rules, model.config)
    leaves = [_plan(_dotted(path), shape, recipes, named, where) for path, shape in shapes]
    assert len(leaves) == len(recipes), recipes.keys() - {leaf.target for leaf in leaves}
    used = {rules.name_of(source.name, model.config) for leaf in leaves for source in leaf.sources}
    _check_unused(named, used, rules, model.config)
    return leaves, structure


def _by_rule_names[S: Tensor](
    tensors: Mapping[str, S], rules: RuleSet, config: ModelConfig
) -> dict[str, S]:
    """Returns the tensors by their names in the rules; raises `BadCheckpoint` if two have the same one."""
    named: dict[str, S] = {}
    for stored, tensor in tensors.items():
        name = rules.name_of(stored, config)
        if name in named:
            both = f"{clip(repr(named[name].name))} and {clip(repr(stored))}"
            raise BadCheckpoint(f"{tensor.path}: {both} are two names of one tensor")
        named[name] = tensor
    return named


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _plan[S: Tensor](
    target: str,
    wanted: jax.ShapeDtypeStruct,
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, S],
    where: object,
) -> LeafPlan[S]:
    """Returns the leaf with its tensors; raises `BadCheckpoint` if one is missing or has a wrong shape or dtype."""
    assert target in recipes, f"no weight rule makes the parameter {target}"
    recipe = _of_stored(recipes[target], tensors, wanted.shape)
    sources: list[S] = []
    for name, shape in zip(recipe.sources, recipe.source_shapes(wanted.shape), strict=True):
        if name not in tensors:
            raise BadCheckpoint(f"{where}: the checkpoint lacks {name!r}, of shape {list(shape)}")
        tensor = tensors[name]
        if tensor.shape != shape:
            got = list(tensor.shape)
            raise BadCheckpoint(f"{tensor.path}: {name!r} has shape {got}, wanted {list(shape)}")
        if isinstance(tensor, StoredTensor) and tensor.dtype not in FLOAT_DTYPES:
            known = ", ".join(FLOAT_DTYPES)
            raise BadCheckpoint(
                f"{tensor.path}: {name!r} has dtype {tensor.dtype}, wanted {known}, or numbers with scales "
                "that quantization_config in config.json describes"
            )
        sources.append(tensor)
    rows = sources[0].shape[0] if sources[0].shape else 1
    arrangement = Arrangement(wanted.shape, rows, recipe.combine, recipe.regroup, recipe.pairs)
    return LeafPlan(target, np.dtype(wanted.dtype), tuple(sources), arrangement, recipe.offset)


def _of_stored(recipe: Recipe, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Recipe:
    """Returns the recipe for the form and the orientation in which the sources of a leaf of `shape` are stored."""
    if recipe.fused in tensors and recipe.sources[0] not in tensors:
        recipe = recipe.of_fused_source()
    exchanged, first = recipe.of_exchanged_source(), tensors.get(recipe.sources[0])
    if exchanged is not None and first is not None:
        shapes = recipe.source_shapes(shape), exchanged.source_shapes(shape)
        # With both axes of one size, Transformers leaves them as they are.
        if (first.shape,) != shapes[0] and (first.shape,) == shapes[1]:
            return exchanged
    transposed = next(
        (name for name in recipe.sources if name in tensors and tensors[name].transposed), None
    )
    if transposed is None:
        return recipe
    fitting = recipe.of_transposed_source()
    if fitting is None:
        raise BadCheckpoint(
            f"{tensors[transposed].path}: {transposed!r} is stored as 4-bit blocks, which is supported only for "
            f"experts of gpt_oss"
        )
    return fitting


def _check_unused(
    tensors: Mapping[str, Tensor],
    used: set[str],
    rules: RuleSet,
    config: ModelConfig,
) -> None:
    """Raises `BadCheckpoint` if the checkpoint holds a tensor that neither the model uses nor the rules ignore."""
    originals = copies(rules, config)
    for name in sorted(tensors.keys() - used):
        tensor = tensors[name]
        if name in originals and originals[name] in tensors:
            if not tensor.equals(tensors[originals[name]]):
                is_tied = name in dict(rules.tied)
                why = "ties them (tie_word_embeddings)" if is_tied else "has these layers share it"
                raise BadCheckpoint(
                    f"{tensor.path}: {name!r} differs from {originals[name]!r}, although the config {why}"
                )
        elif not rules.ignores(name, config) and not _is_bias_of_zeros(name, tensors):
            raise BadCheckpoint(
                f"{tensor.path} holds {clip(repr(tensor.name))}, which a {config.family} model of this config has no "
                "use for"
            )


def _is_bias_of_zeros(name: str, tensors: Mapping[str, Tensor]) -> bool:
    """Whether a tensor is a bias without effect beside a quantised weight; AutoGPTQ saves one for each linear map."""
    module, _, last = name.rpartition(".")
    bias, weight = tensors[name], tensors.get(f"{module}.weight")
    if last != "bias" or not isinstance(bias, StoredTensor) or bias.dtype not in FLOAT_DTYPES:
        return False
    if not isinstance(weight, QuantisedTensor) or bias.shape != weight.shape[:1]:
        return False
    numbers = np.empty(bias.shape, np.float32)
    bias.read(numbers)
    return not numbers.any()
