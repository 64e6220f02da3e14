"""The end of a column of `gathered_matmul` in the code of a thread: scale, bias, activation and gate."""

from typing import Any

from pallas_kernels.activations import CLAMPED_RATE
from pallas_kernels.gathered_matmul.epilogue import Epilogue
from pallas_kernels.gathered_matmul.geometry import Geometry
from pallas_kernels.mosaic.per_thread import Threads
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.softmax import LOG2_E

_ROOT = 0.7978845608028654  # sqrt(2 / pi)


def group_of(threads: Threads, chosen: Ref, pair: Any, g: Geometry) -> Any:  # noqa: ANN401 - words
    """Returns the group of a choice."""
    return threads.most(threads.least(threads.load(chosen, pair), g.groups - 1), 0)


def store_column(
    threads: Threads,
    sums: list[Any],
    pair: Any,  # noqa: ANN401 - a word
    group: Any,  # noqa: ANN401 - a word
    column: Any,  # noqa: ANN401 - a word
    factors: list[Ref],
    bias: Ref | None,
    out: Ref,
    g: Geometry,
    *,
    where: Any,  # noqa: ANN401 - a condition
) -> None:
    """Stores a column of the result.

    Args:
        threads: the threads, each of which has a column.
        sums: its sum, or those of its gate and of its other factor, without scales of whole rows.
        pair: the choice.
        group: its group.
        column: the column of the result, which is there.
        factors: scales and zero points of the weight.
        bias: all biases.
        out: all results.
        g: the geometry.
        where: whether the thread's column is wanted.
    """
    ended = []
    for half, found in enumerate(sums):
        row = column + half * g.results
        if g.has_row_scales:
            found = threads.product(found, threads.load_number(factors[0], g.row(group, row)))
        if bias is not None:
            added = threads.load_number(bias, group * g.out + row)
            found = threads.multiply_add(found, threads.constant(1.0), added)
        ended.append(found)
    result = _finished(threads, ended, g.epilogue)
    threads.store_number(out, pair * g.results + column, result, where=where)


def added_bias(
    threads: Threads,
    row: Any,  # noqa: ANN401 - a word
    column: Any,  # noqa: ANN401 - a word
    chosen: Ref,
    weights: Ref,
    bias: Ref | None,
    g: Geometry,
) -> Any:  # noqa: ANN401 - a number
    """Returns the weighted sum of the biases of a row's choices in a column; 0 without any."""
    added = threads.lane * 0
    if bias is None:
        return added
    for choice in range(g.count):
        pair = row * g.count + choice
        of_group = threads.load_number(bias, group_of(threads, chosen, pair, g) * g.out + column)
        added = threads.multiply_add(of_group, threads.load_number(weights, pair), added)
    return added


def _finished(threads: Threads, sums: list[Any], epilogue: Epilogue) -> Any:  # noqa: ANN401 - a number
    """Returns `Epilogue.applied` of the sum of a column, or of a gate and of its factor."""
    first, *others = sums
    if epilogue.clamp is not None:
        high = threads.constant(epilogue.clamp)
        first = threads.smaller(first, high)
        [up] = others
        up = threads.larger(threads.smaller(up, high), threads.constant(-epilogue.clamp))
        others = [threads.multiply_add(up, threads.constant(1.0), threads.constant(1.0))]
        first = _times_sigmoid(threads, first, first, CLAMPED_RATE)
    elif epilogue.activation == "silu":
        first = _times_sigmoid(threads, first, first, 1.0)
    elif epilogue.activation == "gelu_tanh":
        # (1 + tanh(a)) / 2 is sigmoid(2 * a).
        cube = threads.product(threads.product(first, first), first)
        inner = threads.multiply_add(cube, threads.constant(0.044715), first)
        first = _times_sigmoid(threads, first, inner, 2 * _ROOT)
    elif epilogue.activation == "relu2":
        positive = threads.larger(first, threads.constant(0.0))
        first = threads.product(positive, positive)
    return threads.product(first, others[0]) if others else first


def _times_sigmoid(
    threads: Threads,
    factor: Any,  # noqa: ANN401 - a number
    number: Any,  # noqa: ANN401 - a number
    rate: float,
) -> Any:  # noqa: ANN401 - a number
    """Returns `factor * sigmoid(rate * number)`."""
    power = threads.power_of_two(threads.product(number, threads.constant(-rate * LOG2_E)))
    one = threads.constant(1.0)
    return threads.quotient(factor, threads.multiply_add(power, one, one))
