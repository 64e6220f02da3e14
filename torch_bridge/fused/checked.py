"""Compares each kernel once with the operations in whose place it runs, and keeps why one is not used."""

import subprocess
from collections.abc import Callable
from math import prod
from typing import Any

import torch

_FOUND: dict[tuple[Any, ...], str | None] = {}
"""Operations that were compared with their kernel, and why the kernel is not used; `None` if it is."""


def why_not_fused() -> str | None:
    """Returns why kernels that were tried are not used, or `None`."""
    return "; ".join(dict.fromkeys(filter(None, _FOUND.values()))) or None


def numbers(shape: tuple[int, ...], like: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Returns numbers between -4 and 4 in the dtype and on the device of another tensor."""
    count = torch.arange(prod(shape), device=like.device, dtype=torch.float32)
    return (4 * (count * 0.7 * factor).sin()).to(like.dtype).view(shape)


def agree(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether results differ by rounding alone."""
    step = torch.finfo(wanted.dtype).eps
    same = found.dtype == wanted.dtype and found.shape == wanted.shape
    return same and torch.allclose(
        found.float(), wanted.float(), rtol=2 * step, atol=step / 16, equal_nan=True
    )


def is_right(kind: tuple[Any, ...], check: Callable[[], bool]) -> bool:
    """Returns whether a kernel gives the results of the operations in its place; compares them once per kind."""
    if kind not in _FOUND:
        if torch.cuda.is_current_stream_capturing():
            return False
        name = f"the kernel in the place of {kind[0]} {getattr(kind[1], '__name__', kind[1])}"
        try:
            with torch.no_grad():
                _FOUND[kind] = None if check() else f"{name} has other results in {kind[-2]}"
        except _failures() as error:
            _FOUND[kind] = f"{name} failed: {type(error).__name__}: {error}"
    return _FOUND[kind] is None


def _failures() -> tuple[type[Exception], ...]:
    """Returns the errors of Triton, which needs a C compiler."""
    # Here, since Triton takes a second to import and is only there with a GPU.
    from triton import TritonError

    return RuntimeError, OSError, subprocess.SubprocessError, TritonError
