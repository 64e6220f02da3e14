"""The Mosaic GPU kernel of `rotary_write` for Hopper: geometry, launch, and the work of one block.

A block of one warpgroup moves one token, or a part of it, from global memory through registers and back. Warps share
nothing, so shared memory would only add latency. A head's row is within one warp, so norms and scales are reductions
over lanes. Refs to whole arrays have the names of the arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.formats.quantise import scales_of, stored
from pallas_kernels.mosaic.jax_versions import assign
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, Piece, broadcast, load, row_pieces, store_per_row

# Most components of a token that one block processes alone, and most components of queries per block otherwise.
_SMALL, _MOST_QUERIES = 3072, 4096

Columns = tuple[int, int]
"""First column and width of a part of a head."""


@dataclass(frozen=True)
class Geometry:
    """Sizes and dtypes that the kernel is specialised for.

    Attributes:
        heads: query heads.
        kv_heads: key heads.
        head_dim: components of a head.
        half: number of rotated pairs of components.
        dtype: dtype of qkv.
        stored: dtype of the pools of keys and values.
    """

    heads: int
    kv_heads: int
    head_dim: int
    half: int
    dtype: DTypeLike
    stored: DTypeLike

    @classmethod
    def of(
        cls, pages: tuple[ArrayOrStruct, ...], qkv: ArrayOrStruct, cos: ArrayOrStruct
    ) -> "Geometry":
        """Returns the geometry of these arrays."""
        kv_heads, head_dim = pages[0].shape[2:]
        heads = qkv.shape[1] - 2 * kv_heads
        return cls(heads, kv_heads, head_dim, cos.shape[1], qkv.dtype, pages[0].dtype)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"qkv must be bfloat16 or float16, got {self.dtype}"
        if self.stored != self.dtype and not self.quantised:
            return f"pages must have qkv's dtype or 8 bits with scales, got {self.stored}"
        least = LOAD_BYTES // 2
        if self.half % least or self.head_dim % least:
            return (
                f"head_dim and half the rotated width must be multiples of {least}, so that every "
                f"load has {LOAD_BYTES} bytes, got {self.head_dim} and {self.half}"
            )
        if self.head_dim > 256:
            return f"head_dim must be at most 256, got {self.head_dim}"
        return None

    @property
    def quantised(self) -> bool:
        """Whether the pools have scales."""
        return jnp.dtype(self.stored).name in LARGEST

    @property
    def parts(self) -> list[Columns]:
        """The two column ranges of a head that are rotated with each other, and the rest if there is any."""
        turned = [(0, self.half), (self.half, self.half)]
        rest = self.head_dim - 2 * self.half
        return [*turned, (2 * self.half, rest)] if rest else turned

    def parts_of(self, kind: str) -> list[Columns]:
        """Returns the column ranges in which heads of this kind are loaded; values are not rotated, so one range."""
        return [(0, self.head_dim)] if kind == "v" else self.parts

    @property
    def blocks(self) -> int:
        """Blocks per token (NOTES.md): one for a small token, else the last one processes keys and values."""
        everything = (self.heads + 2 * self.kv_heads) * self.head_dim
        if everything <= _SMALL:
            return 1
        return 1 + -(-self.heads * self.head_dim // _MOST_QUERIES)

    def pieces(self, rows: int, parts: list[Columns]) -> tuple[Piece, ...]:
        """Cuts rows for loads of these column ranges."""
        common = gcd(*(size for part in parts for size in part))
        columns = common & -common
        return row_pieces(rows, min(columns, 32 * LOAD_BYTES // 2), LOAD_BYTES // 2)


class Loaded(NamedTuple):
    """A job's loaded arrays: column ranges of heads, and per column (cosines, sines) and weights of the norm."""

    heads: list[Array]
    angles: tuple[Array, ...] = ()
    norm: tuple[Array, ...] = ()


class Job(NamedTuple):
    """A run of adjacent heads of one token.

    Attributes:
        kind: "q", "k" or "v".
        piece: the run's rows and register layout.
        first: index in qkv of the head that the piece counts from.
    """

    kind: str
    piece: Piece
    first: int


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and a number of blocks per token.

    Attributes:
        geometry: sizes and dtypes.
        blocks: blocks per token.
        normalised: kinds of heads that have a norm, such as "qk".
        norm_eps: epsilon of the norms.
    """

    geometry: Geometry
    blocks: int
    normalised: str
    norm_eps: float

    def build(self, tokens: int, interpret: bool) -> Callable[..., Array]:
        """Returns the function of arrays and of the pools' refs that launches the kernel."""
        g = self.geometry
        return mosaic_kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct((tokens, g.heads, g.head_dim), g.dtype),
            # All blocks are on one axis: grid axes other than the last are limited to 65535.
            grid=(tokens * self.blocks,),
            grid_names=("block",),
            compiler_params=LANE_PARAMS,
            interpret=interpret,
            kernel_name="rotary_write",
        )

    def _body(self, *refs: Ref) -> None:
        names = ["qkv", "cos", "sin", "slots"]
        names += ["norm"] * ("q" in self.normalised)
        names += ["k_pages", "v_pages"] + ["k_scales", "v_scales"] * self.geometry.quantised
        named = dict(zip([*names, "q"], refs, strict=True))
        block, count = lax.axis_index("block"), jnp.int32(self.blocks)
        at_work = _Block(self, named, lax.div(block, count))
        for share, jobs in enumerate(self.shares()):
            run = partial(at_work.run, jobs)
            if self.blocks == 1:
                run()
            else:
                pl.when(lax.rem(block, count) == share)(run)

    def shares(self) -> list[list[Job]]:
        """Returns the jobs of each block of a token."""
        g = self.geometry
        keys = _jobs("k", g.pieces(g.kv_heads, g.parts), g.heads)
        values = _jobs("v", g.pieces(g.kv_heads, g.parts_of("v")), g.heads + g.kv_heads)
        count = max(1, self.blocks - 1)
        bounds = [index * g.heads // count for index in range(count + 1)]
        queries = [
            _jobs("q", g.pieces(stop - start, g.parts), start) for start, stop in pairwise(bounds)
        ]
        if self.blocks == 1:
            return [[*queries[0], *keys, *values]]
        return [*queries, [*keys, *values]]


def _jobs(kind: str, pieces: tuple[Piece, ...], first: int) -> list[Job]:
    return [Job(kind, piece, first) for piece in pieces]


class _Block:
    """One block, which processes a token or a part of it."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], token: Array) -> None:
        self.kernel, self.geometry, self.refs = kernel, kernel.geometry, refs
        self.token = token

    def run(self, jobs: list[Job]) -> None:
        """Runs its jobs; all loads are issued before the first store."""
        slot = self.refs["slots"][self.token]
        loaded = [self.load(job) for job in jobs]
        for job, rows in zip(jobs, loaded, strict=True):
            if job.kind == "q":
                self.write_queries(job, self.rotated(job, rows))
        if any(job.kind != "q" for job in jobs):
            real = (slot >= 0) & (slot < self.num_slots)
            pl.when(real)(partial(self.write_pages, slot, jobs, loaded))

    @property
    def num_slots(self) -> int:
        """Number of slots of a pool."""
        num_pages, page_size = self.refs["k_pages"].shape[:2]
        return num_pages * page_size

    def load(self, job: Job) -> Loaded:
        """Issues all loads of a job."""
        refs, layout = self.refs, job.piece.layout
        rows = pl.ds(job.first + job.piece.start, job.piece.size)
        parts = self.geometry.parts_of(job.kind)
        heads = [load(refs["qkv"].at[self.token, rows, pl.ds(*part)], layout) for part in parts]
        if job.kind == "v":
            return Loaded(heads)
        per_column = layout.reduce(0)
        angles = tuple(load(refs[name].at[self.token], per_column) for name in ("cos", "sin"))
        if job.kind not in self.kernel.normalised:
            return Loaded(heads, angles)
        norm = refs["norm"].at[0 if job.kind == "q" else 1]
        weights = tuple(load(norm.at[pl.ds(*part)], per_column) for part in parts)
        return Loaded(heads, angles, weights)

    def rotated(self, job: Job, loaded: Loaded) -> list[Array]:
        """Returns a job's rows after norm and rotation; values have no rotation."""
        heads, layout = loaded.heads, job.piece.layout
        if job.kind in self.kernel.normalised:
            heads = self.unit(heads, layout)
            heads = self.weighed(heads, loaded.norm, layout) if loaded.norm else heads
        if not loaded.angles:
            return heads
        first, second = (part.astype(jnp.float32) for part in heads[:2])
        cos, sin = (broadcast(angle, first.shape, 1, layout) for angle in loaded.angles)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return [*(part.astype(self.geometry.dtype) for part in turned), *heads[2:]]

    def unit(self, heads: list[Array], layout: Layout) -> list[Array]:
        """Divides rows by their root mean square, and rounds."""
        wide = [part.astype(jnp.float32) for part in heads]
        squares = _over_rows(jnp.add, jnp.sum, [part * part for part in wide])
        inverse = lax.rsqrt(squares / self.geometry.head_dim + self.kernel.norm_eps)
        return [
            (part * broadcast(inverse, part.shape, 0, layout)).astype(self.geometry.dtype)
            for part in wide
        ]

    def weighed(self, heads: list[Array], norm: tuple[Array, ...], layout: Layout) -> list[Array]:
        """Multiplies rows by a norm's weights, and rounds."""
        weighed = []
        for part, weight in zip(heads, norm, strict=True):
            weight = broadcast(weight.astype(jnp.float32), part.shape, 1, layout)
            weighed.append((part.astype(jnp.float32) * weight).astype(self.geometry.dtype))
        return weighed

    def write_queries(self, job: Job, heads: list[Array]) -> None:
        """Stores the query rows of one job."""
        rows = pl.ds(job.first + job.piece.start, job.piece.size)
        for part, columns in zip(heads, self.geometry.parts, strict=True):
            assign(self.refs["q"], (self.token, rows, pl.ds(*columns)), part)

    def write_pages(self, slot: Array, jobs: list[Job], loaded: list[Loaded]) -> None:
        """Stores the jobs' keys and values at the slot."""
        page_size = self.refs["k_pages"].shape[1]
        place = lax.div(slot, page_size), lax.rem(slot, page_size)
        for job, parts in zip(jobs, loaded, strict=True):
            if job.kind == "q":
                continue
            heads = self.rotated(job, parts)
            rows = pl.ds(job.piece.start, job.piece.size)
            if self.geometry.quantised:
                heads, scales = self.quantised(heads, job.piece.layout)
                store_per_row(self.refs[f"{job.kind}_scales"], rows, scales, lead=place)
            pool = self.refs[f"{job.kind}_pages"]
            for part, columns in zip(heads, self.geometry.parts_of(job.kind), strict=True):
                assign(pool, (*place, rows, pl.ds(*columns)), part)

    def quantised(self, heads: list[Array], layout: Layout) -> tuple[list[Array], Array]:
        """Returns a job's rows in the pools' dtype, and their scales."""
        dtype = self.geometry.stored
        wide = [part.astype(jnp.float32) for part in heads]
        scales = scales_of(
            _over_rows(jnp.maximum, jnp.max, [jnp.abs(part) for part in wide]), dtype
        )
        return [
            stored(part, broadcast(scales, part.shape, 0, layout), dtype) for part in wide
        ], scales


def _over_rows(
    both: Callable[[Array, Array], Array],
    along: Callable[..., Array],
    parts: list[Array],
) -> Array:
    """Reduces rows that are split into parts; parts of equal width are combined first, which saves lane shuffles."""
    same = [part for part in parts if part.shape == parts[0].shape]
    other = [part for part in parts if part.shape != parts[0].shape]
    return reduce(both, [along(part, axis=1) for part in (reduce(both, same), *other)])
