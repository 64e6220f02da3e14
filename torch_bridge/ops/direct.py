"""Which of our kernels torch launches by itself, without XLA: those that need nothing of XLA's around them.

`calls.py` serves the rest. A CUDA graph of torch's may record such a launch once it has been made outside.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from math import log, prod

import jax
import numpy as np
import torch

import pallas_kernels
from pallas_kernels.page_write import mosaic_gpu as page_write
from pallas_kernels.paged_attention import mosaic_gpu as paged_attention
from pallas_kernels.ragged_attention import mosaic_gpu as ragged_attention
from torch_bridge.ops.launch import Launch, load
from torch_bridge.sharing.dlpack import jax_device

IS_ON = True
"""Whether calls are launched so; otherwise through XLA, as everywhere but on Hopper."""

Like = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""

Plan = Callable[..., tuple[jax.Array, jax.Array]]
"""Makes of `seq_lens` and `cu_q_lens` what a kernel for packed queries is told of its work."""


class Decode:
    """Decode attention: the launch, and what torch does around it.

    Args:
        launch: of the kernel.
        missing: heads of zeros that it wants after those of the queries.
        columns: where the heads are among what it writes, if it splits rows; `None` otherwise.
        device: the current one.
    """

    def __init__(
        self, launch: Launch, missing: int, columns: np.ndarray | None, device: torch.device
    ) -> None:
        self._launch, self._missing = launch, missing
        self._columns = None if columns is None else torch.from_numpy(columns).to(device)

    def __call__(self, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Returns the output, [rows, heads, head_dim]. Checks nothing.

        Args:
            q: [rows, heads, head_dim].
            *others: `k_pages, v_pages, page_table, seq_lens`.
        """
        if self._missing:
            q = torch.nn.functional.pad(q, (0, 0, 0, self._missing))
        out, *more = self._launch(q, *others)
        return out if self._columns is None else self._join(out, *more).to(q.dtype)

    def _join(self, out: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """Joins the shares of each row: `Alone` says what they are. Rows without keys give zeros."""
        assert self._columns is not None
        by_head = out.transpose(3, 4).flatten(2, 3).index_select(2, self._columns)
        weight = (lse.flatten(2).index_select(2, self._columns) * log(2)).softmax(1).nan_to_num(0.0)
        return (by_head * weight[..., None]).sum(1)


def decode_kernel(
    *tensors: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> Decode | None:
    """Returns the launch for tensors like these, or `None`: `q, k_pages, v_pages, page_table, seq_lens`.

    It is `None` where XLA would have to fill groups of heads, where `launches_on` says so, and if `load` refuses.

    Raises:
        ValueError: shapes, dtypes or options do not fit, as `pallas_kernels.paged_attention` says.
        RuntimeError: such a kernel would have to be loaded while torch records a CUDA graph.
    """
    # Whoever shares them with JAX says what is wrong with tensors that do not lie as they should.
    if not launches_on(*tensors):
        return None
    return _decode(tensors[0].device, _alike(tensors), scale, window, soft_cap)


def ragged_kernel(
    *tensors: torch.Tensor, scale: float, window: int | None, soft_cap: float | None
) -> tuple[Launch, Plan] | None:
    """Returns the launch for tensors like these, and what plans it, or `None` as above.

    Args:
        *tensors: `q, k_pages, v_pages, page_table, seq_lens, cu_q_lens`.
        scale: as `pallas_kernels.ragged_attention` has it.
        window: likewise.
        soft_cap: likewise.

    Returns:
        The launch takes `q, k_pages, v_pages, page_table` and the two tensors that the plan, a JAX program, makes of
        arrays of `seq_lens` and `cu_q_lens`.
    """
    if not launches_on(*tensors):
        return None
    return _ragged(tensors[0].device, _alike(tensors), scale, window, soft_cap)


def write_kernel(*tensors: torch.Tensor) -> Launch | None:
    """Returns the launch for tensors like these, or `None` as above: `slots`, values of each pool, and the pools.

    Values are [tokens, ...] of their pool's dtype, pools [pages, page_size, ...]. The kernel writes into the pools.
    """
    if not launches_on(*tensors):
        return None
    return _write(tensors[0].device, _alike(tensors))


def launches_on(*tensors: torch.Tensor) -> bool:
    """Whether kernels can be launched on tensors: `IS_ON`, on one GPU, the current device, and as kernels read them."""
    device = tensors[0].device
    if not IS_ON or device.type != "cuda" or device.index != torch.cuda.current_device():
        return False
    return all(tensor.device == device and fits(tensor) for tensor in tensors)


def fits(tensor: torch.Tensor) -> bool:
    """Whether kernels can read a tensor as it lies."""
    return tensor.is_contiguous() and tensor.data_ptr() % 16 == 0


def fitted(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy that kernels can read."""
    return tensor if fits(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=256)
def _decode(
    device: torch.device,
    like: tuple[Like, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Decode | None:
    structs = _structs(like)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.paged_attention, **options), *structs)
        q, k_pages, _, page_table, _ = structs
        kernel = paged_attention.alone(q, k_pages, page_table.shape[1], **options)
        if kernel is None:
            return None
        rows, heads, head_dim = q.shape
        given = jax.ShapeDtypeStruct((rows, kernel.padded_heads, head_dim), q.dtype)
        launch = load(kernel.launch, [given, *structs[1:]], device)
    missing = kernel.padded_heads - heads
    return None if launch is None else Decode(launch, missing, kernel.columns, device)


@lru_cache(maxsize=256)
def _ragged(
    device: torch.device,
    like: tuple[Like, ...],
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[Launch, Plan] | None:
    structs = _structs(like)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    with jax.default_device(jax_device(device)):
        jax.eval_shape(partial(pallas_kernels.ragged_attention, **options), *structs)
        q, k_pages, _, page_table, *lengths = structs
        if window is not None and window >= page_table.shape[1] * k_pages.shape[1]:
            options["window"] = None
        found = ragged_attention.alone(q, k_pages, page_table.shape[0], **options)
        if found is None:
            return None
        kernel, plan = found
        tiles = jax.eval_shape(plan, *lengths)
        launch = load(kernel, [*structs[:4], *tiles], device)
    return None if launch is None else (launch, jax.jit(plan))


@lru_cache(maxsize=256)
def _write(device: torch.device, like: tuple[Like, ...]) -> Launch | None:
    slots, *others = _structs(like)
    count = len(others) // 2
    values, pools = others[:count], others[count:]
    flat = [
        jax.ShapeDtypeStruct((*one.shape[:kept], prod(one.shape[kept:])), one.dtype)
        for kept, ones in ((1, values), (2, pools))
        for one in ones
    ]
    with jax.default_device(jax_device(device)):
        if page_write.why_not(tuple(pools), tuple(values), slots) is not None:
            return None
        return load(page_write.alone, [slots, *flat], device)


def _alike(tensors: tuple[torch.Tensor, ...]) -> tuple[Like, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


def _structs(like: tuple[Like, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, str(dtype)[6:]) for shape, dtype in like]
