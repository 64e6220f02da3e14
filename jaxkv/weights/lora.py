"""Reads low-rank adapters in PEFT's layout (Hu et al., LoRA, 2021), and adds one to the tensors of a checkpoint."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxkv.errors import BadCheckpoint
from jaxkv.weights import directory as files
from jaxkv.weights.safetensors import FLOAT_DTYPES, StoredTensor, open_checkpoint, read_header
from jaxkv.wording import clip, listed, shown

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_OFF: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config"), (None,)),
    "use_bdlora": (False, None),
    # Other ways to begin change the weights that the adapter is added to.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Key of adapter_config.json -> values with which an adapter is the product of its two factors and no more."""


@dataclass(frozen=True)
class Adapter:
    """The factors of one weight, of which `scale * outer @ inner` is added to it.

    Attributes:
        inner: PEFT's A.
        outer: PEFT's B.
        scale: alpha divided by the rank, or by its root.
    """

    inner: Float[np.ndarray, "rank inputs"]
    outer: Float[np.ndarray, "outputs rank"]
    scale: float


def merged_tensors(
    directory: Path, adapter: str | os.PathLike[str] | None, *, dtype: str
) -> Iterator[tuple[str, Array]]:
    """Yields (name, array) of a checkpoint with an adapter added, as `LLM.update_weights` takes them.

    The sum is computed in float32 and rounded once.

    Args:
        directory: the model directory.
        adapter: a folder with adapter_config.json and adapter_model.safetensors; `None` adds nothing.
        dtype: dtype name of the weights with an adapter; others have that of the checkpoint.

    Raises:
        BadCheckpoint: a file is damaged or has no float weights, the adapter is more than pairs of factors, or it does
            not fit the model.
    """
    adapters = {} if adapter is None else read_adapters(Path(adapter))
    with open_checkpoint(directory) as tensors:
        if strange := sorted(adapters.keys() - tensors.keys()):
            raise BadCheckpoint(
                f"{adapter} adapts {clip(listed(strange[:3]))}, which {directory} has not; an adapter fits the model "
                "that it was trained on alone"
            )
        for name, tensor in tensors.items():
            weight = jnp.asarray(_read(tensor))
            if (low := adapters.get(name)) is not None:
                wanted = (low.outer.shape[0], low.inner.shape[1])
                if weight.shape != wanted:
                    raise BadCheckpoint(
                        f"{adapter} is for a {name} of shape {list(wanted)}, got {list(weight.shape)}"
                    )
                weight = _add(weight, low.inner, low.outer, np.float32(low.scale), dtype=dtype)
            yield name, weight


def read_adapters(folder: Path) -> dict[str, Adapter]:
    """Returns name of a weight in the checkpoint -> its adapter.

    Raises:
        BadCheckpoint: a file is missing or damaged, or the adapter is more than pairs of factors.
    """
    if not folder.is_dir():
        instead = f"; give the folder of this file, {folder.parent}" if folder.is_file() else ""
        raise BadCheckpoint(
            f"{folder} is not a directory; wanted the folder of an adapter as PEFT saves it, with {CONFIG} and "
            f"{WEIGHTS}{instead}"
        )
    config = files.read_json(folder, CONFIG)
    for key, values in _OFF.items():
        if config.get(key, values[0]) not in values:
            raise BadCheckpoint(
                f"{folder / CONFIG}: {key} {shown(config[key])} is not supported; merge the adapter by PEFT's "
                "merge_and_unload and load the merged model"
            )
    factors: dict[str, dict[str, np.ndarray]] = {}
    with files.open_inside(folder, WEIGHTS) as file:
        for name, tensor in read_header(file, folder / WEIGHTS).items():
            found = _FACTOR.fullmatch(name)
            if found is None or len(tensor.shape) != 2:
                raise BadCheckpoint(
                    f"{folder / WEIGHTS}: {clip(repr(name))} of shape {list(tensor.shape)} is no lora_A or lora_B of a "
                    "matrix; merge the adapter by PEFT's merge_and_unload and load the merged model"
                )
            factors.setdefault(found[1], {})[found[2]] = _read(tensor).astype(np.float32)
    return {
        f"{name}.weight": _adapter(folder, config, name, pair) for name, pair in factors.items()
    }


def _adapter(
    folder: Path, config: Mapping[str, object], name: str, pair: Mapping[str, np.ndarray]
) -> Adapter:
    if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1]:
        shapes = {key: list(factor.shape) for key, factor in pair.items()}
        raise BadCheckpoint(
            f"{folder / WEIGHTS}: {name} needs lora_A [rank, inputs] and lora_B [outputs, rank], got {shapes}"
        )
    rank, alpha = pair["A"].shape[0], config.get("lora_alpha", 8)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise BadCheckpoint(
            f"{folder / CONFIG}: alpha_pattern must be an object, got {shown(patterns)}"
        )
    for pattern, its_alpha in patterns.items():
        # As PEFT matches it; a module's name or the end of one, so no pattern of an untrusted file is executed.
        if name == pattern or name.endswith(f".{pattern}"):
            alpha = its_alpha
            break
        if re.escape(pattern).replace(r"\.", ".") != pattern:
            raise BadCheckpoint(
                f"{folder / CONFIG}: the alpha_pattern {shown(pattern)} is no name of a module"
            )
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise BadCheckpoint(f"{folder / CONFIG}: lora_alpha must be a number, got {shown(alpha)}")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    return Adapter(pair["A"], pair["B"], alpha / divisor)


def _read(tensor: StoredTensor) -> np.ndarray:
    stored = FLOAT_DTYPES.get(tensor.dtype)
    if stored is None:
        raise BadCheckpoint(
            f"{tensor.path}: {tensor.name!r} is stored as {tensor.dtype}, and adapters are added to weights of "
            "floating point alone; use a checkpoint that is not quantised"
        )
    # JAX has no float64 unless it is turned on.
    flat = np.empty(math.prod(tensor.shape), np.float32 if tensor.dtype == "F64" else stored)
    tensor.read(flat)
    return flat.reshape(tensor.shape)


@partial(jax.jit, static_argnames="dtype")
def _add(
    weight: Float[Array, "outputs inputs"],
    inner: Float[Array, "rank inputs"],
    outer: Float[Array, "outputs rank"],
    scale: Float[Array, ""],
    *,
    dtype: str,
) -> Float[Array, "outputs inputs"]:
    product = jnp.matmul(outer, inner, precision=jax.lax.Precision.HIGHEST)
    return (weight.astype(jnp.float32) + scale * product).astype(dtype)
