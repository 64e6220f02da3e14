"""`load_by_rules`: reads a checkpoint into a model's parameters, leaf by leaf."""

import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
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
from jaxkv.weights.quantised import read_quantised
from jaxkv.weights.rules import HeadPairs, Recipe, Regrouped, RuleSet, copies, expand
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, open_checkpoint
from jaxkv.wording import clip

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}

MOST_IN_FLIGHT = 2 * 2**30
"""Bytes of leaves that are read at once, unless a single leaf is larger."""

_READERS = 8


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


@dataclass(frozen=True)
class _Leaf:
    """One parameter leaf: its tensors in order, and the operations on them (see `Rule`)."""

    target: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: tuple[StoredTensor | BlockScaled, ...]
    transposed: bool = False
    selected: bool = False
    arrange: Callable[[np.ndarray], np.ndarray] | None = None
    regroup: Regrouped | None = None
    offset: float = 0.0
    pairs: HeadPairs | None = None

    @property
    def stored_bytes(self) -> int:
        return sum(source.nbytes for source in self.sources)

    @property
    def host_bytes(self) -> int:
        """Bytes that reading it takes on the host; rearranging needs a second buffer, or two."""
        stored = sum(math.prod(source.shape) for source in self.sources)
        rearranged = self.transposed or self.regroup is not None or self.pairs is not None
        copies = 2 if self.arrange is not None else int(rearranged)
        return (stored + copies * math.prod(self.shape)) * self.dtype.itemsize


def load_by_rules(
    directory: str | os.PathLike[str],
    model: Loadable,
    rules: RuleSet,
    *,
    dtype: str,
    device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
    progress: bool = True,
) -> PyTree[jax.Array]:
    """Reads a Hugging Face checkpoint into the parameters of a model.

    All names, shapes and dtypes are checked before any data is read. Threads read several leaves at once while
    earlier ones are copied to the device; the host holds at most `MOST_IN_FLIGHT` bytes of them, or one leaf.
    Quantised weights (`jaxkv.weights.quantised`) are dequantised while they are read, so they need as much device
    memory as others.

    Args:
        directory: a directory with `model.safetensors`, or shards and their index.
        model: the model whose parameters to read.
        rules: which tensors make up which parameter.
        dtype: "float32", "bfloat16" or "float16"; the stored numbers are rounded to it.
        device: device or sharding of the parameters; `None` for JAX's default device.
        progress: show a progress bar on stderr.

    Returns:
        The tree of `model.param_shapes(dtype)` as arrays.

    Raises:
        ValueError: `dtype` is not one of these.
        BadCheckpoint: the checkpoint is damaged or does not fit the model; the message names file and tensor in one
            line.
        UnknownConfig: `quantization_config` in config.json has an unsupported format.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = existing_directory(directory)
    shapes, structure = jax.tree_util.tree_flatten_with_path(model.param_shapes(dtype))
    quantised = read_quantised(read_json_if_there(folder, "config.json"))
    with open_checkpoint(folder) as stored:
        tensors = _by_rule_names(with_scales(stored, quantised), rules)
        recipes = expand(rules, model.config)
        leaves = [_plan(_dotted(path), shape, recipes, tensors, folder) for path, shape in shapes]
        assert len(leaves) == len(recipes), recipes.keys() - {leaf.target for leaf in leaves}
        used = {rules.name_of(source.name) for leaf in leaves for source in leaf.sources}
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
            return structure.unflatten(_fill_all(leaves, device, bar))


def _by_rule_names(
    tensors: Mapping[str, StoredTensor | BlockScaled], rules: RuleSet
) -> dict[str, StoredTensor | BlockScaled]:
    """Returns the tensors by their names in the rules; raises `BadCheckpoint` if two have the same one."""
    named: dict[str, StoredTensor | BlockScaled] = {}
    for stored, tensor in tensors.items():
        name = rules.name_of(stored)
        if name in named:
            both = f"{clip(repr(named[name].name))} and {clip(repr(stored))}"
            raise BadCheckpoint(f"{tensor.path}: {both} are two names of one tensor")
        named[name] = tensor
    return named


def _dotted(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _plan(
    target: str,
    wanted: jax.ShapeDtypeStruct,
    recipes: Mapping[str, Recipe],
    tensors: Mapping[str, StoredTensor | BlockScaled],
    folder: Path,
) -> _Leaf:
    """Returns the leaf with its tensors; raises `BadCheckpoint` if one is missing or has a wrong shape or dtype."""
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
    transposed = recipe.combine in ("taps", "transpose", "stack_transpose")
    return _Leaf(
        target,
        wanted.shape,
        np.dtype(wanted.dtype),
        tuple(sources),
        transposed,
        recipe.combine == "select",
        _REARRANGE.get(recipe.combine),
        recipe.regroup,
        recipe.offset,
        recipe.pairs,
    )


def _of_stored(recipe: Recipe, tensors: Mapping[str, StoredTensor | BlockScaled]) -> Recipe:
    """Returns the recipe for the form and the orientation in which the sources are stored."""
    if recipe.fused in tensors and recipe.sources[0] not in tensors:
        recipe = recipe.of_fused_source()
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
    tensors: Mapping[str, StoredTensor | BlockScaled],
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
        elif not rules.ignores(name, config):
            raise BadCheckpoint(
                f"{tensor.path} holds {clip(repr(tensor.name))}, which a {config.family} model of this config has no "
                "use for"
            )


def _fill_all(
    leaves: Iterable[_Leaf],
    device: jax.Device | Sharding | None,  # pyright: ignore[reportInvalidTypeForm]
    bar: "tqdm[NoReturn]",
) -> list[jax.Array]:
    """Returns all leaves on the device, in order; the first error ends the loading.

    Threads read leaves into host buffers, and this one copies them to the device, one at a time.
    """
    filled: list[jax.Array] = []
    in_flight: deque[tuple[_Leaf, Future[np.ndarray]]] = deque()
    held = 0

    def copy_oldest() -> int:
        leaf, buffer = in_flight.popleft()
        # Blocks until the copy is done, since the buffer counts as held until then.
        filled.append(jax.block_until_ready(jax.device_put(buffer.result(), device)))
        bar.update(leaf.stored_bytes)
        return leaf.host_bytes

    pool = ThreadPoolExecutor(_READERS, thread_name_prefix="jaxkv-load")
    try:
        for leaf in leaves:
            while in_flight and held + leaf.host_bytes > MOST_IN_FLIGHT:
                held -= copy_oldest()
            in_flight.append((leaf, pool.submit(_read, leaf)))
            held += leaf.host_bytes
        while in_flight:
            copy_oldest()
    finally:
        # After an error, leaves that wait are not read, and the files stay open until those under way are.
        pool.shutdown(wait=True, cancel_futures=True)
    return filled


def _read(leaf: _Leaf) -> np.ndarray:
    """Reads one leaf into a host buffer."""
    first, second = leaf.shape[:2] if leaf.transposed else (0, 0)
    shape = (second, first, *leaf.shape[2:]) if leaf.transposed else leaf.shape
    shape = leaf.sources[0].shape if leaf.selected or leaf.arrange else shape
    buffer = np.empty(shape, leaf.dtype)
    flat, begin = buffer.reshape(-1), 0
    for source in leaf.sources:
        count = math.prod(source.shape)
        source.read(flat[begin : begin + count])
        begin += count
    if leaf.regroup is not None:
        rows = buffer[: leaf.sources[0].shape[0]]
        sections = _sections(rows, leaf.regroup)
        if leaf.selected:
            buffer = sections.reshape(leaf.shape)
        else:
            rows[...] = sections
    if leaf.pairs is not None:
        _part_pairs(buffer, leaf.pairs)
    if leaf.offset:
        buffer += np.asarray(leaf.offset, buffer.dtype)
    if leaf.arrange is not None:
        buffer = np.ascontiguousarray(leaf.arrange(buffer))
    if leaf.transposed:
        buffer = np.ascontiguousarray(buffer.swapaxes(0, 1))
    return buffer


def _deinterleave(buffer: np.ndarray) -> np.ndarray:
    """Puts the even positions of the last axis before the odd ones."""
    return np.concatenate((buffer[..., ::2], buffer[..., 1::2]), axis=-1)


_REARRANGE: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "deinterleave": _deinterleave,
    "deinterleave_rows": lambda buffer: np.concatenate((buffer[:, ::2], buffer[:, 1::2]), axis=1),
    "deinterleave_transpose": lambda buffer: _deinterleave(buffer).swapaxes(1, 2),
    "last_axis_first": lambda buffer: np.moveaxis(buffer, 2, 0),
}


def _part_pairs(buffer: np.ndarray, pairs: HeadPairs) -> None:
    """Puts the first rows of each head's rotary pairs before the second ones, in place."""
    heads = buffer[: pairs.rows].reshape(-1, pairs.head_dim, *buffer.shape[1:])
    rotated = heads[:, : pairs.rotary_dim]
    rotated[...] = np.concatenate((rotated[:, ::2], rotated[:, 1::2]), axis=1)


def _sections(rows: np.ndarray, regroup: Regrouped) -> np.ndarray:
    """Returns the rows ordered section by section; `rows` are ordered group by group."""
    bounds = np.cumsum((0, *regroup.sections))
    assert len(rows) == regroup.groups * bounds[-1], (len(rows), regroup)
    grouped = rows.reshape(regroup.groups, bounds[-1], -1)
    chosen = [grouped[:, bounds[at] : bounds[at + 1]] for at in regroup.order]
    ordered, begin = (
        np.empty((sum(part[..., 0].size for part in chosen), rows.shape[1]), rows.dtype),
        0,
    )
    for part in chosen:
        count = part[..., 0].size
        ordered[begin : begin + count].reshape(part.shape)[...] = part
        begin += count
    return ordered
