"""What lies between two attentions of a plain decoder as one kernel: `o`, norm, gated feed-forward, norm, `qkv`.

It knows how to build the chain of such a layer; what a chain is, mosaic_chain.py says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.backend import get_default_device
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.device import SHARED_BYTES_PER_BLOCK, why_not_mosaic
from pallas_kernels.skinny_matmul.mosaic_activation import ACTIVATIONS
from pallas_kernels.skinny_matmul.mosaic_chain import Chain, Phase
from pallas_kernels.skinny_matmul.mosaic_ending import Ending
from pallas_kernels.skinny_matmul.mosaic_schedule import HEIGHT, ROW_TILE, Geometry, Schedule

# Bytes of a layer's weights below which its products alone measured faster; and so they did beyond 8 rows (NOTES.md).
_LEAST_BYTES = 128 * 2**20
# Pieces of 64 numbers per chunk: a turn's weights are 16 KiB.
_DEPTH = 2
_MOST_STAGES, _LEAST_STAGES = 12, 4


@dataclass(frozen=True)
class Norms:
    """Where the weights of the two norms lie, and what is added to mean squares.

    Attributes:
        here: row of "norms" for the norm before the feed-forward.
        after: row of "next_norms" for the norm before the next attention.
        eps: of both.
    """

    here: int
    after: int
    eps: float


class Tail(NamedTuple):
    """What comes out.

    Attributes:
        hidden: the residual stream after the feed-forward.
        qkv: the next layer's projection; `None` after the last layer.
        met: the barrier's counter.
    """

    hidden: Float[Array, "rows hidden_size"]
    qkv: Float[Array, "rows qkv_size"] | None
    met: Int[Array, "1"]


def why_not(
    weights: Mapping[str, Array | jax.ShapeDtypeStruct],
    rows: int,
    dtype: DTypeLike,
    activation: str,
) -> str | None:
    """Returns why a layer's tail cannot be one kernel on the default device, or `None` if it can.

    Args:
        weights: "o", "gate_up", "down" and, but for the last layer, "qkv", or their shapes.
        rows: of the step.
        dtype: of the rows.
        activation: of the gates.
    """
    refusal = why_not_mosaic()
    if refusal is not None:
        return refusal
    if activation not in ACTIVATIONS:
        return f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
    if rows > ROW_TILE:
        return f"at most {ROW_TILE} rows, got {rows}"
    size = sum(weight.size * weight.dtype.itemsize for weight in weights.values())
    if size < _LEAST_BYTES:
        return f"weights of {size} bytes are faster product by product"
    chain = chain_of(weights, rows, dtype, activation, Norms(0, 0, 0.0))
    if isinstance(chain, str):
        return chain
    found = getattr(get_default_device(), "core_count", None)
    if found is None or found < chain.blocks:
        # Blocks that are not at work at once would wait for one another forever.
        return f"needs {chain.blocks} multiprocessors, found {found}"
    return None


def chain_of(
    weights: Mapping[str, Array | jax.ShapeDtypeStruct],
    rows: int,
    dtype: DTypeLike,
    activation: str,
    norms: Norms,
    *,
    blocks: int | None = None,
) -> Chain | str:
    """Returns the kernel for such weights and rows, or why there is none."""
    hidden, heads = weights["o"].shape
    ffn = weights["down"].shape[1]
    dtype = jnp.dtype(dtype)
    if any(weight.dtype != dtype for weight in weights.values()):
        return f"all weights must be {dtype}"
    qkv = weights["qkv"].shape[0] if "qkv" in weights else 0
    sizes = {"o": (hidden, heads), "gate_up": (ffn, hidden), "down": (hidden, ffn)}
    sizes |= {"qkv": (qkv, hidden)} if qkv else {}
    # Each block has the same columns of every product, so that all of them come to a barrier at once.
    counts = (
        [blocks] if blocks else [count for count in range(132, 95, -1) if not hidden % (8 * count)]
    )
    counts = [
        count for count in counts if all(not out % (ROW_TILE * count) for out, _ in sizes.values())
    ]
    if not counts:
        return f"columns of {sizes} cannot be shared out evenly"
    count = counts[0]
    endings = {
        "o": Ending(dtype, has_residual=True, weighs=True, norm_row=norms.here),
        "gate_up": Ending(dtype, activation=activation, norm_eps=norms.eps),
        "down": Ending(dtype, has_residual=True, weighs=bool(qkv), norm_row=norms.after),
        "qkv": Ending(dtype, norm_eps=norms.eps),
    }
    phases, outputs = [], []
    for name, (out, inner) in sizes.items():
        geometry = Geometry(rows, out, inner, name == "gate_up", dtype, dtype)
        schedule = _cut(geometry, count)
        if schedule is None:
            return f"{name}'s {out} x {inner} cannot be cut for {count} blocks"
        used = {"weight", "x", *endings[name].inputs, *endings[name].outputs}
        names = tuple(pair for pair in _NAMES[name] if pair[0] in used)
        phases.append(Phase(geometry, schedule, endings[name], names))
        outputs += _outputs(name, phases[-1])
    return _filled(Chain(tuple(phases), _inputs(bool(qkv)), tuple(outputs), count))


_NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "o": (
        ("weight", "o"),
        ("x", "mixed"),
        ("residual", "hidden"),
        ("next_norm", "norms"),
        ("out", "middle"),
        ("weighed", "middle_weighed"),
        ("squares_out", "middle_squares"),
    ),
    "gate_up": (
        ("weight", "gate_up"),
        ("x", "middle_weighed"),
        ("squares", "middle_squares"),
        ("out", "gated"),
    ),
    "down": (
        ("weight", "down"),
        ("x", "gated"),
        ("residual", "middle"),
        ("next_norm", "next_norms"),
        ("out", "last"),
        ("weighed", "last_weighed"),
        ("squares_out", "last_squares"),
    ),
    "qkv": (
        ("weight", "qkv"),
        ("x", "last_weighed"),
        ("squares", "last_squares"),
        ("out", "projected"),
    ),
}


def _inputs(has_next: bool) -> tuple[str, ...]:
    names = ("mixed", "hidden", "o", "norms", "gate_up", "down")
    return (*names, "next_norms", "qkv") if has_next else names


def _outputs(name: str, phase: Phase) -> list[tuple[str, tuple[int, ...], Any]]:
    """Returns the arrays that a phase makes."""
    g, names = phase.geometry, dict(phase.names)
    found = [(names["out"], (g.rows, g.out), phase.ending.result)]
    if phase.ending.weighs:
        squares = (phase.schedule.tiles(g), g.rows)
        found += [(names["weighed"], (g.rows, g.out), phase.ending.result)]
        found += [(names["squares_out"], squares, jnp.float32)]
    return found


def _cut(geometry: Geometry, blocks: int) -> Schedule | None:
    """Returns tiles of one height that give each block as many columns as the others, the widest there are."""
    share = geometry.out // blocks
    for columns in (64, 32, 16, 8):
        folds = HEIGHT // (columns * geometry.parts)
        if share % columns or not folds:
            continue
        schedule = Schedule(columns, folds, _DEPTH, 1, 1, blocks)
        if schedule.refusal(geometry) is None:
            return schedule
    return None


def _filled(chain: Chain) -> Chain | str:
    """Returns the chain with as many slots as shared memory holds and steps there are."""
    for stages in range(_MOST_STAGES, _LEAST_STAGES - 1, -1):
        phases = tuple(
            replace(phase, schedule=replace(phase.schedule, stages=stages))
            for phase in chain.phases
        )
        filled = replace(chain, phases=phases)
        steps = sum(phase.steps for phase in phases)
        if filled.shared_bytes <= SHARED_BYTES_PER_BLOCK and stages <= steps:
            return filled
    return f"fewer than {_LEAST_STAGES} turns fit shared memory"


def layer_tail(
    mixed: Float[Array, "rows heads_size"],
    hidden: Float[Array, "rows hidden_size"],
    weights: Mapping[str, Array],
    met: Int[Array, "1"],
    *,
    activation: str,
    norms: Norms,
    blocks: int | None = None,
    interpret: bool = False,
) -> Tail:
    """Computes what follows a layer's attention, up to the next layer's projection.

    Args:
        mixed: what the heads say.
        hidden: the residual stream.
        weights: "o", "norms" [norms, hidden_size], "gate_up", "down", and but for the last layer "next_norms", "qkv".
        met: the barrier's counter, zeros before the first layer of a step. Donate it: it is written in place.
        activation: of the gates.
        norms: which rows of the norms' weights to take.
        blocks: how many work; chosen if `None`.
        interpret: run on the CPU, slowly, with one block.

    Raises:
        ValueError: there is no such kernel for these sizes.
    """
    products = {name: weights[name] for name in ("o", "gate_up", "down", "qkv") if name in weights}
    chain = chain_of(products, mixed.shape[0], mixed.dtype, activation, norms, blocks=blocks)
    if isinstance(chain, str):
        raise ValueError(f"the Mosaic GPU kernel cannot take this: {chain}")
    arrays = {"mixed": mixed, "hidden": hidden, **weights}
    return _launch(
        tuple(arrays[name] for name in chain.inputs), met, chain=chain, interpret=interpret
    )


# The layers of a model call this many times with equal shapes: under its own jit the kernel is lowered once.
@partial(jax.jit, static_argnames=("chain", "interpret"))
def _launch(
    arrays: tuple[Array, ...], met: Int[Array, "1"], *, chain: Chain, interpret: bool
) -> Tail:
    counter = jax.new_ref(met)
    found = chain.build(interpret)(*arrays, counter)
    named = {name: array for (name, _, _), array in zip(chain.outputs, found, strict=True)}
    return Tail(named["last"], named.get("projected"), jax.freeze(counter))
