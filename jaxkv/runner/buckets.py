"""Buckets: the padded sizes that programs are compiled for, and the choice of a bucket for a given size."""

from bisect import bisect_right
from collections.abc import Sequence

MOST_PADDING = 1.25
"""Most padded tokens per real token, in a step of more than `LOOSE_TOKENS` tokens."""

LOOSE_TOKENS = 64
"""Up to this many tokens, reading the weights dominates the cost of a step, so padding costs little."""

FEW_MASKS = 16
"""Up to so many masks of grammars cost little to send: 0.3 MB for a vocabulary of 151,936 tokens."""


def power_of_two_buckets(minimum: int, maximum: int) -> tuple[int, ...]:
    """Returns the powers of two from `minimum`, rounded up to a power, to below `maximum`, and then `maximum`.

    Raises:
        ValueError: a bound is below 1.
    """
    if min(minimum, maximum) < 1:
        raise ValueError(f"buckets must be at least 1, got bounds {minimum} and {maximum}")
    sizes = []
    size = 1 << (minimum - 1).bit_length()
    while size < maximum:
        sizes.append(size)
        size *= 2
    return (*sizes, maximum)


def token_buckets(
    maximum: int, *, per_octave: int, minimum: int = 16, fine_up_to: int = LOOSE_TOKENS
) -> tuple[int, ...]:
    """Returns powers of two from `minimum` to 64, then `per_octave` even sizes per doubling, and `maximum`.

    With at least four sizes per doubling, no size above `LOOSE_TOKENS` is padded by more than `MOST_PADDING`. With
    fewer, steps must be cut to the size that `filled` returns.

    Args:
        maximum: the largest bucket.
        per_octave: sizes per doubling above 64.
        minimum: the smallest bucket.
        fine_up_to: up to this size there are at least four sizes per doubling.
    """
    sizes = []
    for power in power_of_two_buckets(minimum, maximum)[:-1]:
        steps = 1 if power < LOOSE_TOKENS else max(per_octave, 4 if power < fine_up_to else 1)
        sizes += [power * (steps + step) // steps for step in range(steps)]
    return (*(size for size in sizes if size < maximum), maximum)


def coarse_buckets(minimum: int, maximum: int, factor: int) -> tuple[int, ...]:
    """Returns `maximum` and its quotients by powers of `factor` down to `minimum`, ascending."""
    sizes = [maximum]
    while sizes[-1] // factor >= minimum:
        sizes.append(sizes[-1] // factor)
    return tuple(reversed(sizes))


def mask_buckets(rows: int) -> tuple[int, ...]:
    """Returns the numbers of masks that programs of `rows` rows take: few, and one for each row."""
    return (FEW_MASKS, rows) if rows > FEW_MASKS else (rows,)


def bucket(size: int, sizes: Sequence[int]) -> int:
    """Returns the smallest of `sizes` that is at least `size`.

    Args:
        size: the size to pad.
        sizes: the buckets, ascending.

    Raises:
        ValueError: `size` is below 1, or above the largest bucket.
    """
    if size < 1:
        raise ValueError(f"there is no bucket for {size}; the size must be at least 1")
    for candidate in sizes:
        if candidate >= size:
            return candidate
    raise ValueError(
        f"{size} is more than the largest bucket, {max(sizes, default=0)}; split the batch, or make buckets for "
        f"a larger maximum"
    )


def filled(least: int, most: int, sizes: Sequence[int]) -> int | None:
    """Returns the most tokens in [`least`, `most`] that fit a bucket within `MOST_PADDING`.

    That is `most` itself, or a full bucket below it; `None` if that bucket is below `least`.
    """
    if most <= LOOSE_TOKENS or bucket(most, sizes) <= MOST_PADDING * most:
        return most
    below = bisect_right(sizes, most)
    full = sizes[below - 1] if below else 0
    return full if full >= least else None
