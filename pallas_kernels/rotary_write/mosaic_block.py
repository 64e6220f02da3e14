"""The Mosaic GPU kernel of `rotary_write` for Hopper: what one block does with its tokens.

A block of one warpgroup takes a token, or its share of one, straight from memory into registers and back: there is
nothing to share, so shared memory would only add latency. A row of a head lies within one warp, so that norms and
scales are sums and maxima over lanes. Refs to whole arrays are named like the arrays.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.formats.eight_bit import LARGEST
from pallas_kernels.formats.quantise import scales_of, stored
from pallas_kernels.mosaic.launch import LANE_PARAMS, interpreter
from pallas_kernels.mosaic.private_types import Layout, Ref
from pallas_kernels.mosaic.rows import LOAD_BYTES, Piece, broadcast, load, row_pieces, store_per_row

# Components up to which a token is left to one block, and components of queries that a block takes at most.
_SMALL, _MOST_QUERIES = 3072, 4096

Columns = tuple[int, int]
"""First column and width of a part of a head."""


@dataclass(frozen=True)
class Geometry:
    """The sizes that the kernel is built from; `stored` is the dtype of the pools."""

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
        """Returns the sizes of these arrays."""
        kv_heads, head_dim = pages[0].shape[2:]
        heads = qkv.shape[1] - 2 * kv_heads
        return cls(heads, kv_heads, head_dim, cos.shape[1], qkv.dtype, pages[0].dtype)

    def refusal(self) -> str | None:
        """Returns why the kernel cannot be built for these sizes, or `None` if it can."""
        if self.dtype not in (jnp.bfloat16, jnp.float16):
            return f"qkv must be bfloat16 or float16, got {self.dtype}"
        if self.stored != self.dtype and not self.quantised:
            return f"pages must have qkv's dtype or be quantised, got {self.stored}"
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
        """The columns of a head that are turned with one another, and those that are left as they are."""
        turned = [(0, self.half), (self.half, self.half)]
        rest = self.head_dim - 2 * self.half
        return [*turned, (2 * self.half, rest)] if rest else turned

    def parts_of(self, kind: str) -> list[Columns]:
        """The columns of a head that are read at once: values are not turned."""
        return [(0, self.head_dim)] if kind == "v" else self.parts

    @property
    def blocks(self) -> int:
        """Blocks that share a token (NOTES.md): a small one is left to one, else the last takes keys and values."""
        everything = (self.heads + 2 * self.kv_heads) * self.head_dim
        if everything <= _SMALL:
            return 1
        return 1 + -(-self.heads * self.head_dim // _MOST_QUERIES)

    def pieces(self, rows: int, parts: list[Columns]) -> tuple[Piece, ...]:
        """Cuts rows for loads of these parts of them."""
        common = gcd(*(size for part in parts for size in part))
        columns = common & -common
        return row_pieces(rows, min(columns, 32 * LOAD_BYTES // 2), LOAD_BYTES // 2)


class Loaded(NamedTuple):
    """What a job reads: parts of heads, and per column cosines and sines, and weights of the norm."""

    heads: list[Array]
    angles: tuple[Array, ...] = ()
    norm: tuple[Array, ...] = ()


class Job(NamedTuple):
    """Some neighbouring heads of one token, and what becomes of them."""

    kind: str
    piece: Piece
    first: int


@dataclass(frozen=True)
class Kernel:
    """The kernel for one geometry and a number of blocks per token; `norm_eps` is `None` where there is no norm."""

    geometry: Geometry
    blocks: int
    norm_eps: float | None

    def build(self, tokens: int, interpret: bool) -> Callable[..., Array]:
        """Returns the function of arrays and of the pools' refs that launches the kernel."""
        g = self.geometry
        return plgpu.kernel(
            self._body,
            out_type=jax.ShapeDtypeStruct((tokens, g.heads, g.head_dim), g.dtype),
            # One axis: of several, all but the last one end at 65535.
            grid=(tokens * self.blocks,),
            grid_names=("block",),
            compiler_params=LANE_PARAMS,
            interpret=interpreter(interpret),
            kernel_name="rotary_write",
        )

    def _body(self, *refs: Ref) -> None:
        names = ["qkv", "cos", "sin", "slots"]
        names += [] if self.norm_eps is None else ["norm"]
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
    """One block at work on a token."""

    def __init__(self, kernel: Kernel, refs: Mapping[str, Ref], token: Array) -> None:
        self.geometry, self.norm_eps, self.refs = kernel.geometry, kernel.norm_eps, refs
        self.token = token

    def run(self, jobs: list[Job]) -> None:
        """Does its jobs; all loads are sent before the first store waits for one."""
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
        """Slots of the pools."""
        num_pages, page_size = self.refs["k_pages"].shape[:2]
        return num_pages * page_size

    def load(self, job: Job) -> Loaded:
        """Sends for all that a job needs."""
        refs, layout = self.refs, job.piece.layout
        rows = pl.ds(job.first + job.piece.start, job.piece.size)
        parts = self.geometry.parts_of(job.kind)
        heads = [load(refs["qkv"].at[self.token, rows, pl.ds(*part)], layout) for part in parts]
        if job.kind == "v":
            return Loaded(heads)
        per_column = layout.reduce(0)
        angles = tuple(load(refs[name].at[self.token], per_column) for name in ("cos", "sin"))
        if self.norm_eps is None:
            return Loaded(heads, angles)
        norm = refs["norm"].at[0 if job.kind == "q" else 1]
        weights = tuple(load(norm.at[pl.ds(*part)], per_column) for part in parts)
        return Loaded(heads, angles, weights)

    def rotated(self, job: Job, loaded: Loaded) -> list[Array]:
        """Returns the parts of a job's rows as attention is to see them; values stay as they are."""
        heads, layout = loaded.heads, job.piece.layout
        if self.norm_eps is not None and loaded.norm:
            heads = self.normalised(heads, loaded.norm, layout, self.norm_eps)
        if not loaded.angles:
            return heads
        first, second = (part.astype(jnp.float32) for part in heads[:2])
        cos, sin = (broadcast(angle, first.shape, 1, layout) for angle in loaded.angles)
        turned = [first * cos - second * sin, second * cos + first * sin]
        return [*(part.astype(self.geometry.dtype) for part in turned), *heads[2:]]

    def normalised(
        self,
        heads: list[Array],
        norm: tuple[Array, ...],
        layout: Layout,
        eps: float,
    ) -> list[Array]:
        """Scales rows to unit root mean square and rounds, then weighs and rounds."""
        dtype = self.geometry.dtype
        wide = [part.astype(jnp.float32) for part in heads]
        squares = _over_rows(jnp.add, jnp.sum, [part * part for part in wide])
        inverse = lax.rsqrt(squares / self.geometry.head_dim + eps)
        weighed = []
        for part, weight in zip(wide, norm, strict=True):
            unit = (part * broadcast(inverse, part.shape, 0, layout)).astype(dtype)
            weight = broadcast(weight.astype(jnp.float32), part.shape, 1, layout)
            weighed.append((unit.astype(jnp.float32) * weight).astype(dtype))
        return weighed

    def write_queries(self, job: Job, heads: list[Array]) -> None:
        """Stores the rows of one job."""
        rows = pl.ds(job.first + job.piece.start, job.piece.size)
        for part, columns in zip(heads, self.geometry.parts, strict=True):
            self.refs["q"][self.token, rows, pl.ds(*columns)] = part

    def write_pages(self, slot: Array, jobs: list[Job], loaded: list[Loaded]) -> None:
        """Stores keys and values."""
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
                pool[*place, rows, pl.ds(*columns)] = part

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
    """Reduces rows that lie in parts; parts of equal width are joined first, because lanes then talk once."""
    same = [part for part in parts if part.shape == parts[0].shape]
    other = [part for part in parts if part.shape != parts[0].shape]
    return reduce(both, [along(part, axis=1) for part in (reduce(both, same), *other)])
