"""Fills a model's parameters from a checkpoint, leaf by leaf. Knows no file format and no family."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree
from tqdm import tqdm

from jaxkv.config.model import ModelConfig
from jaxkv.errors import BadCheckpoint
from jaxkv.weights.block_scaled import BlockScaled, with_scales
from jaxkv.weights.directory import existing_directory, read_json_if_there
from jaxkv.weights.families import rules_for
from jaxkv.weights.quantised import read_quantised
from jaxkv.weights.rules import Recipe, Regrouped, RuleSet, expand
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, open_checkpoint
from jaxkv.wording import clip

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@runtime_checkable
class Loadable(Protocol):
    """What the loader asks of a model."""

    @property
    def config(self) -> ModelConfig:
        """The model as data."""
        ...

    def param_shapes(self, dtype: str) -> Any:  # noqa: ANN401 - a pytree
        """Returns the tree of every parameter leaf's shape and dtype."""
        ...


@dataclass(frozen=True)
class _Leaf:
    """One parameter leaf and the tensors it is made of, in order, and what is done to them (see `Rule`)."""

    target: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: tuple[StoredTensor | BlockScaled, ...]
    turned: bool = False
    picked: bool = False
    arrange: Callable[[np.ndarray], np.ndarray] | None = None
    regroup: Regrouped | None = None
    offset: float = 0.0

    @property
    def stored_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)


def load_params(
    directory: str | os.PathLike[str],
    model: Loadable,
    *,
    dtype: str,
    device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
    progress: bool = True,
) -> PyTree[jax.Array]:
    """Reads a Hugging Face checkpoint into the parameters of a model.

    Every name, shape and dtype is checked before the first number is read. Host memory holds one leaf at a time
    beyond what the device holds. Numbers of 8 or 4 bits with scales (`jaxkv.weights.quantised`) are multiplied by them
    on the way, so they take as much room as any others.

    Args:
        directory: holds `model.safetensors`, or shards and their index.
        model: says what it needs; the built-in decoders do.
        dtype: "float32", "bfloat16" or "float16"; the stored numbers are rounded to it.
        device: where the parameters go; `None` is JAX's default device.
        progress: show a bar on stderr.

    Returns:
        The tree of `model.param_shapes(dtype)`, filled.

    Raises:
        BadCheckpoint: one line that names the file, the tensor and what is wrong with it.
        UnknownConfig: `quantization_config` in config.json describes numbers that cannot be read.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = existing_directory(directory)
    rules = rules_for(model.config)
    shapes, structure = jax.tree_util.tree_flatten_with_path(model.param_shapes(dtype))
    quantised = read_quantised(read_json_if_there(folder, "config.json"))
    with open_checkpoint(folder) as stored:
        tensors = with_scales(stored, quantised)
        recipes = expand(rules, model.config)
        leaves = [_plan(_dotted(path), shape, recipes, tensors, folder) for path, shape in shapes]
        assert len(leaves) == len(recipes), recipes.keys() - {leaf.target for leaf in leaves}
        used = {source.name for leaf in leaves for source in leaf.sources}
        _check_unused(tensors, used, rules, model.config)
        total = sum(leaf.stored_bytes for leaf in leaves)
        bar = tqdm(
            total=total,
            desc="loading weights",
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        )
        with bar:
            return structure.unflatten([_fill(leaf, device, bar) for leaf in leaves])


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _plan(
    target: str,
    wanted: jax.ShapeDtypeStruct,
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, StoredTensor | BlockScaled],
    folder: Path,
) -> _Leaf:
    """Finds the tensors of a leaf and checks their shapes and dtypes."""
    assert target in recipes, f"no weight rule makes the parameter {target}"
    recipe = _of_stored(recipes[target], tensors)
    sources = []
    for name, shape in zip(recipe.sources, recipe.source_shapes(wanted.shape), strict=True):
        if name not in tensors:
            raise BadCheckpoint(f"{folder}: the checkpoint lacks {name!r}, of shape {list(shape)}")
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
    turned = recipe.combine in ("taps", "turn", "stack_turn")
    return _Leaf(
        target,
        wanted.shape,
        np.dtype(wanted.dtype),
        tuple(sources),
        turned,
        recipe.combine == "pick",
        _ARRANGED.get(recipe.combine),
        recipe.regroup,
        recipe.offset,
    )


def _of_stored(recipe: Recipe, tensors: Mapping[str, StoredTensor | BlockScaled]) -> Recipe:
    """Returns the recipe that fits how the sources are stored."""
    turned = next(
        (name for name in recipe.sources if name in tensors and tensors[name].turned), None
    )
    if turned is None:
        return recipe
    fitting = recipe.of_turned_source()
    if fitting is None:
        raise BadCheckpoint(
            f"{tensors[turned].path}: {turned!r} is stored in blocks of 4 bits, which only experts of gpt_oss may be"
        )
    return fitting


def _check_unused(
    tensors: Mapping[str, StoredTensor | BlockScaled],
    used: set[str],
    rules: RuleSet,
    config: ModelConfig,
) -> None:
    """Raises if the checkpoint holds something that the model would silently leave out."""
    originals = dict(rules.tied) if config.tie_embeddings else {}
    for name in sorted(tensors.keys() - used):
        tensor = tensors[name]
        if name in originals and originals[name] in tensors:
            if not tensor.equals(tensors[originals[name]]):
                raise BadCheckpoint(
                    f"{tensor.path}: {name!r} differs from {originals[name]!r}, "
                    "although the config ties them (tie_word_embeddings)"
                )
        elif not rules.ignores(name, config):
            raise BadCheckpoint(
                f"{tensor.path} holds {clip(repr(name))}, which a {config.family} model of this config has no use for"
            )


def _fill(
    leaf: _Leaf,
    device: jax.Device | Sharding | None,  # pyright: ignore[reportInvalidTypeForm]
    bar: "tqdm[NoReturn]",
) -> jax.Array:
    """Reads one leaf into a host buffer and moves it to the device."""
    first, second = leaf.shape[:2] if leaf.turned else (0, 0)
    shape = (second, first, *leaf.shape[2:]) if leaf.turned else leaf.shape
    shape = leaf.sources[0].shape if leaf.picked or leaf.arrange else shape
    buffer = np.empty(shape, leaf.dtype)
    flat, begin = buffer.reshape(-1), 0
    for source in leaf.sources:
        count = math.prod(source.shape)
        source.read(flat[begin : begin + count])
        begin += count
        bar.update(source.nbytes)
    if leaf.regroup is not None:
        rows = buffer[: leaf.sources[0].shape[0]]
        sections = _sections(rows, leaf.regroup)
        if leaf.picked:
            buffer = sections.reshape(leaf.shape)
        else:
            rows[...] = sections
    if leaf.offset:
        buffer += np.asarray(leaf.offset, buffer.dtype)
    if leaf.arrange is not None:
        buffer = np.ascontiguousarray(leaf.arrange(buffer))
    if leaf.turned:
        buffer = np.ascontiguousarray(buffer.swapaxes(0, 1))
    # Waiting keeps the next leaf's buffer from being made while this one's is still being copied.
    return jax.block_until_ready(jax.device_put(buffer, device))


def _part(buffer: np.ndarray) -> np.ndarray:
    """Puts even places of the last axis before odd ones."""
    return np.concatenate((buffer[..., ::2], buffer[..., 1::2]), axis=-1)


_ARRANGED: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "part": _part,
    "part_rows": lambda buffer: np.concatenate((buffer[:, ::2], buffer[:, 1::2]), axis=1),
    "part_turn": lambda buffer: _part(buffer).swapaxes(1, 2),
    "last_first": lambda buffer: np.moveaxis(buffer, 2, 0),
}


def _sections(rows: np.ndarray, regroup: Regrouped) -> np.ndarray:
    """Returns rows section by section, which come group by group."""
    bounds = np.cumsum((0, *regroup.sections))
    assert len(rows) == regroup.groups * bounds[-1], (len(rows), regroup)
    grouped = rows.reshape(regroup.groups, bounds[-1], -1)
    return np.concatenate(
        [grouped[:, bounds[at] : bounds[at + 1]].reshape(-1, rows.shape[1]) for at in regroup.order]
    )
