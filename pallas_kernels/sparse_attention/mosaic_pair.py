"""Gather by a pair of blocks in the `sparse_attention` kernel (inline PTX): loads, decoding, barriers, DSMEM copies.

Each block gathers 32 of a tile's 64 records, four threads per record, writes them into its own shared memory, and
copies the result to the other block. Each half of a tile has an mbarrier in shared memory (`came`) that counts the
block's own threads and the bytes from the other block. mosaic_records.py describes the layout of tiles. Of each 64
columns a thread has 16, two pieces of 16 bytes. The interpreter does not support this file's functions.
"""

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.latent_kernel.schedule import COLUMN_TILE
from pallas_kernels.mosaic.dialects import (
    Value,
    add,
    arith,
    constant,
    divide,
    elements,
    i32,
    inline,
    ir,
    llvm,
    times,
    utils,
)
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.tiles import swizzled
from pallas_kernels.mosaic.words import (
    at,
    decoded,
    do,
    flat,
    four,
    fragments,
    load_words,
    of_bytes,
    thread,
    wide,
    words_of,
)
from pallas_kernels.sparse_attention.mosaic_records import PIECE, Place, Rows

SHARED_ROWS = 32
"""Records of a tile that each block gathers."""
_THREADS = 128
_THREADS_PER_ROW = 4
_ATOM = 64
_ATOM_BYTES = 1024
_ROW_BYTES = 128
_SCALAR = plgpu.Layout.WG_SPLAT(())

_WAIT = """{
    .reg .pred has_come;
    again:
    mbarrier.try_wait.parity.shared::cta.b64 has_come, [$0], $1;
    @!has_come bra again;
}"""
_MEET = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
_SEND = (
    "@$4 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    "[$0], [$1], $2, [$3];"
)


def begin(came: Ref) -> None:
    """Initialises the mbarriers of halves of tiles and waits for the whole cluster."""

    @inline(arg_types=(plgpu.RefType(),))
    def run(_: Value, came: Value) -> None:
        first = arith.cmpi(arith.CmpIPredicate.eq, utils.thread_idx(), constant(0))
        for number in range(_size(came) // 2):
            barrier = add(_address(came), 8 * number)
            do(f"@$1 mbarrier.init.shared::cta.b64 [$0], {_THREADS};", "r,b", barrier, first)
        do("fence.mbarrier_init.release.cluster;", "")
        do(_MEET, "")

    run(came)


def end() -> None:
    """Waits for both blocks of the cluster."""

    @inline()
    def run(_: Value) -> None:
        do(_MEET, "")

    run()


def wait(came: Ref, number: int, parity: Array) -> None:
    """Waits until the mbarrier of a half completes the phase of this parity."""

    @inline(arg_types=(plgpu.RefType(), _SCALAR))
    def run(_: Value, came: Value, parity: Value) -> None:
        barrier = add(_address(came), 8 * number)
        do(_WAIT, "r,r,~{memory}", barrier, parity.registers.item())

    run(came, parity)


def find(rows: Rows, rank: Array) -> Array:
    """Issues the load of the slot of this thread's record; the result is only meant for `load`."""
    types = (plgpu.RefType(), *[_SCALAR] * 4)
    result = plgpu.ShapeDtypeStruct(
        (4 * _THREADS,), jnp.dtype(jnp.int32), layout=flat(4 * _THREADS)
    )

    @inline(arg_types=types, return_type=result)
    def run(_: Value, slots: Value, *scalars: Value) -> Value:
        token, first, count, rank = (scalar.registers.item() for scalar in scalars)
        row, _member = _own(rank)
        place = arith.addi(first, row)
        is_chosen = arith.cmpi(arith.CmpIPredicate.slt, place, count)
        topk = constant(ir.MemRefType(slots.type).shape[1])
        place = arith.addi(arith.muli(token, topk), arith.select(is_chosen, place, constant(0)))
        source = at(utils.memref_ptr(slots), of_bytes(place, 4))
        chosen = arith.extui(i32(), is_chosen)
        (slot,) = load_words(source, chosen, 1)
        return fragments([four([slot, chosen, constant(0), constant(0)])])

    return run(rows.slots, rows.token, rows.first, rows.count, rank)


def load(records: Ref, found: Array, place: Place) -> tuple[Array, Array]:
    """Issues the loads of this thread's part of one place of its record; returns elements and scales as words.

    For slots past the count the words are zeros and nothing is read.
    """
    per_atom = 1 if place.scales is not None else 2
    loads = place.columns // _ATOM * per_atom
    sizes = (4 * loads * _THREADS, 4 * _THREADS)
    result = [
        plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.int32), layout=flat(size)) for size in sizes
    ]

    @inline(arg_types=(plgpu.RefType(), flat(4 * _THREADS)), return_type=result)
    def run(_: Value, records: Value, found: Value) -> list[Value]:
        slot, chosen, *_rest = elements(found)
        kind = ir.MemRefType(records.type)
        size = kind.shape[-1] * utils.bytewidth(kind.element_type)
        start = at(utils.memref_ptr(records), of_bytes(slot, size))
        member = divide(thread(), _THREADS_PER_ROW)[1]
        own = at(start, wide(times(member, per_atom * PIECE)))
        numbers = []
        for number in range(loads):
            atom, half = divmod(number, per_atom)
            further = place.start + atom * per_atom * _ATOM + half * PIECE
            numbers.append(four(load_words(at(own, further), chosen, 4)))
        scales = [constant(0)] * 4
        if place.scales is not None:
            groups = place.columns // 128
            scales[:groups] = load_words(at(start, place.scales), chosen, groups)
        return [fragments(numbers), fragments([four(scales)])]

    numbers, scales = run(records, found)
    return numbers, scales


def decode(numbers: Array, scales: Array, dtype: DTypeLike) -> Array:
    """Decodes the 8-bit elements and scales of `load` to 16-bit elements."""
    size = 2 * numbers.shape[0]
    types = (flat(numbers.shape[0]), flat(4 * _THREADS))
    result = plgpu.ShapeDtypeStruct((size,), jnp.dtype(jnp.int32), layout=flat(size))

    @inline(arg_types=types, return_type=result)
    def run(_: Value, numbers: Value, scales: Value) -> Value:
        words, factors = elements(numbers), elements(scales)
        pieces = []
        for atom in range(len(words) // 4):
            mine = words[4 * atom : 4 * atom + 4]
            pieces += decoded(mine, factors[atom // 2], dtype)
        return fragments(pieces)

    return run(numbers, scales)


def store(pieces: Array, tile: Ref, rank: Array, dtype: DTypeLike) -> None:
    """Writes this thread's 16-bit elements into the block's tile."""
    types = (plgpu.RefType(swizzled(COLUMN_TILE, dtype)), flat(pieces.shape[0]), _SCALAR)

    @inline(arg_types=types)
    def run(_: Value, target: Value, pieces: Value, rank: Value) -> None:
        atoms = len(pieces.registers.flat) // 2
        starts = [_piece_place(target, rank.registers.item(), atoms, half) for half in (0, 1)]
        for index, piece in enumerate(pieces.registers.flat):
            atom, half = divmod(index, 2)
            here = add(starts[half], atom * _ATOM_BYTES)
            code = "st.shared.v4.b32 [$0], {$1, $2, $3, $4};"
            do(code, "r,r,r,r,r,~{memory}", here, *words_of(piece))

    run(tile, pieces, rank)


def expect(came: Ref, barrier: Array, columns: int) -> None:
    """Arrives on a half's mbarrier after this thread's writes, and expects as many bytes from the other block."""
    num_bytes = 2 * columns * SHARED_ROWS // _THREADS

    @inline(arg_types=(plgpu.RefType(), _SCALAR))
    def run(_: Value, came: Value, barrier: Value) -> None:
        place = add(_address(came), times(barrier.registers.item(), 8))
        do("fence.proxy.async.shared::cta;", "~{memory}")
        code = f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$0], {num_bytes};"
        do(code, "r,~{memory}", place)

    run(came, barrier)


def send(tile: Ref, came: Ref, rank: Array, barrier: Array, dtype: DTypeLike) -> None:
    """Starts the copy of this block's rows of a tile to the other block.

    All threads must have written their part and committed it (`commit_smem`).
    """
    types = (plgpu.RefType(swizzled(COLUMN_TILE, dtype)), plgpu.RefType(), _SCALAR, _SCALAR)

    @inline(arg_types=types)
    def run(_: Value, tile: Value, came: Value, *scalars: Value) -> None:
        rank, barrier = (scalar.registers.item() for scalar in scalars)
        atoms = ir.MemRefType(tile.type).shape[-3]
        num_bytes = SHARED_ROWS * atoms * _ROW_BYTES
        source = add(_address(tile), times(rank, num_bytes))
        theirs = _of_other(add(_address(came), times(barrier, 8)), rank)
        first = arith.cmpi(arith.CmpIPredicate.eq, thread(), constant(0))
        size, target = constant(num_bytes), _of_other(source, rank)
        do(_SEND, "r,r,r,r,b,~{memory}", target, source, size, theirs, first)

    run(tile, came, rank, barrier)


def _own(rank: Value) -> tuple[Value, Value]:
    """Returns the row of a tile that this thread writes, and the thread's index among the row's threads."""
    row, member = divide(thread(), _THREADS_PER_ROW)
    return add(row, times(rank, SHARED_ROWS)), member


def _piece_place(tile: Value, rank: Value, atoms: int, half: int) -> Value:
    """Returns the address of one of this thread's two pieces of the first 64 columns."""
    row, member = _own(rank)
    eight, turned = divide(row, 8)
    piece = arith.xori(add(times(member, 2), half), turned)
    place = add(times(eight, atoms * _ATOM_BYTES), times(turned, _ROW_BYTES))
    return add(_address(tile), add(place, times(piece, PIECE)))


def _of_other(address: Value, rank: Value) -> Value:
    """Maps a shared-memory address to the same address in the other block of the cluster."""
    other = arith.xori(rank, constant(1))
    return llvm.inline_asm(
        i32(), [address, other], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r"
    )


def _address(reference: Value) -> Value:
    return llvm.ptrtoint(i32(), utils.memref_ptr(reference))


def _size(reference: Value) -> int:
    return ir.MemRefType(reference.type).shape[0]
