"""Static parameters of one build of the `delta_scan` kernels, and what their blocks share."""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array

from pallas_kernels.delta_scan.mosaic_geometry import SIDE, Geometry
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import WGMMA, swizzled, untiled_swizzle

SQUARE = (SIDE, SIDE)
# Transforms of 64 x 64 squares of 16-bit elements: the view for copies, and the view for products.
_SWIZZLED, TILED = untiled_swizzle(128), swizzled(SIDE, jnp.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """The kernels for one geometry.

    Attributes:
        geometry: sizes of the layer.
        has_snapshots: whether snapshots are an input of the scan.
        interpret: whether Pallas's interpreter runs the kernels on the CPU.
    """

    geometry: Geometry
    has_snapshots: bool
    interpret: bool

    def squares(self, *lead: int) -> Any:  # noqa: ANN401 - private to JAX
        """Returns shared memory for squares of tokens, as a union of views.

        Tokens start anywhere, but copies into tiled shared memory must start at a multiple of 8 rows. So tokens are
        copied into a view that is swizzled and not tiled, and wgmma reads a tiled view; both have the same bytes. The
        third view is for copies of single rows.
        """
        shape, dtype = (*lead, *SQUARE), self.geometry.dtype
        if self.interpret:
            # The interpreter treats the members of a union as one buffer.
            return plgpu.SMEM(shape, dtype)
        views = [plgpu.SMEM(shape, dtype, transforms=form) for form in (_SWIZZLED, TILED)]
        return plgpu.RefUnion(*views, plgpu.SMEM(shape, dtype))

    def named(self, refs: dict[str, Ref], *names: str) -> dict[str, Ref]:
        """Returns references by name, with the views of squares as `<name>_copied`, `<name>` and `<name>_rows`."""
        found = dict(refs)
        for name in names:
            views = (refs[name],) * 3 if self.interpret else tuple(refs[name])
            found |= dict(zip((f"{name}_copied", name, f"{name}_rows"), views, strict=True))
        return found

    def copy(self, refs: dict[str, Ref], start: Array, column: Any, to: Ref, done: Ref) -> None:  # noqa: ANN401
        """Starts the copy of one square of tokens."""
        source = refs["qkv"].at[pl.ds(start, SIDE), pl.ds(column, SIDE)]
        plgpu.copy_gmem_to_smem(source, to, done)


def zeros() -> Array:
    """Returns a square of zeros in the layout of accumulators."""
    return plgpu.layout_cast(jnp.zeros(SQUARE, jnp.float32), WGMMA)
