"""The padded sizes we compile for, and which of them serves a given size. Knows nothing of programs or arrays."""

from collections.abc import Sequence


def power_of_two_buckets(minimum: int, maximum: int) -> tuple[int, ...]:
    """Returns the powers of two from `minimum` (rounded up to one) up to below `maximum`, then `maximum`.

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


def bucket(size: int, sizes: Sequence[int]) -> int:
    """Returns the smallest of `sizes`, which ascend, that holds `size`; never cuts anything off.

    Raises:
        ValueError: `size` is below 1, or above the largest bucket.
    """
    if size < 1:
        raise ValueError(f"there is no bucket for {size}; at least 1 is needed")
    for candidate in sizes:
        if candidate >= size:
            return candidate
    raise ValueError(
        f"{size} is more than the largest bucket, {max(sizes, default=0)}; split the work, or plan for "
        f"a larger maximum"
    )
