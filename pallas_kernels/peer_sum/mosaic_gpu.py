"""`peer_sum` on Hopper with a Mosaic GPU kernel.

Each block sends its words of the array to the mailboxes of all devices, its own included, and adds up the words that
have come to its own. They travel as in NCCL's protocol LL: 4 bytes of data with 4 bytes of flag in one access, so who
reads the flag of this sum has the data of this sum, and no fence and no signal is needed. The flag is the number of the
sum, which every device counts in its mailbox. A mailbox has two slots for each device, used in turn: a device sends its
words of a sum only after the sum before, for which all others must have read the words of the sum before that.

While the words of other devices are on their way, a thread loads its words of the residual stream and of the next
norm's weight. A warp has 32 adjacent words of one row, whose squares it adds up.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from pallas_kernels.arrays import ArrayOrStruct
from pallas_kernels.mosaic.dialects import (
    Value,
    add,
    arith,
    constant,
    divide,
    i32,
    inline,
    ir,
    llvm,
    scf,
    times,
    utils,
    vector,
)
from pallas_kernels.mosaic.launch import LANE_PARAMS, mosaic_kernel
from pallas_kernels.mosaic.private_types import Ref
from pallas_kernels.mosaic.words import do, i64, of_bytes, thread
from pallas_kernels.peer_sum.mailboxes import BLOCKS, HEADER, MOST_BYTES, SLOT

_THREADS = 128
_WARP = 32

_WORD = 8
"""Bytes of data of one access of 16 bytes, which has two flags beside them."""

_LOADS = 8
"""Accesses of a thread that wait at the same time."""

_PATIENCE = 60 * 10**9
"""Nanoseconds until a block that waits for another device ends the program with an error."""

_TYPES = {"bfloat16": "BF16Type", "float16": "F16Type", "float32": "F32Type"}


@dataclass(frozen=True)
class Geometry:
    """Sizes of one launch.

    Attributes:
        words: accesses of 16 bytes that carry the array.
        words_per_row: those of one row.
        dtype: the array's, one of `_TYPES`.
        devices: number of devices.
        joins: whether the residual stream is added.
        weighs: whether the sum times a norm's weight, and sums of its squares, are results too.
        norm_row: the row of norms that has this weight.
    """

    words: int
    words_per_row: int
    dtype: str
    devices: int
    joins: bool
    weighs: bool
    norm_row: int

    @property
    def blocks(self) -> int:
        """Number of blocks: a power of two, so each has the same number of counters."""
        wanted = max(1, self.words // _THREADS)
        return min(BLOCKS, 2 ** (wanted.bit_length() - 1))

    @property
    def at_once(self) -> int:
        """Words for which a thread waits at the same time, in the slots of all devices."""
        of_thread = math.ceil(self.words / (self.blocks * _THREADS))
        return min(max(1, _LOADS // self.devices), of_thread)

    @property
    def rounds(self) -> int:
        """Number of times that a thread has `at_once` words."""
        return math.ceil(self.words / (self.blocks * _THREADS * self.at_once))

    @property
    def names(self) -> list[str]:
        """Names of the operands and results, in order."""
        operands = ["part", "peers", *["residual"] * self.joins, *["norms"] * self.weighs]
        return [*operands, "out", *["weighed", "squares"] * self.weighs]


def refusal(part: Shaped[ArrayOrStruct, "rows width"], *, weighs: bool = False) -> str | None:
    """Returns why the kernel cannot sum `[rows, width]`, and weigh it for a norm, or `None` if it can."""
    of_warp = _WARP * _WORD // part.dtype.itemsize
    if weighs and part.shape[1] % of_warp:
        return f"weighs rows of a multiple of {of_warp} numbers, got {part.shape[1]}"
    num_bytes = part.size * part.dtype.itemsize
    if part.dtype.name not in _TYPES:
        return f"sums {', '.join(_TYPES)}, got {part.dtype}"
    if not 0 < num_bytes <= MOST_BYTES:
        return f"sums up to {MOST_BYTES} bytes, got {num_bytes}"
    return f"sums multiples of {_WORD} bytes, got {num_bytes}" if num_bytes % _WORD else None


# A model's layers call this with equal shapes; under its own jit the kernel is lowered once for all of them.
@partial(jax.jit, static_argnames="norm_row")
def peer_sum(
    part: Shaped[Array, "rows width"],
    peers: Int[Array, "1 numbers"],
    residual: Shaped[Array, "rows width"] | None = None,
    norms: Shaped[Array, "norms width"] | None = None,
    *,
    norm_row: int = 0,
) -> list[Array]:
    """Implements `api.peer_sum`; returns one result, or three if there are `norms`."""
    rows, width = part.shape
    per_row = width * part.dtype.itemsize // _WORD
    geometry = Geometry(
        words=part.size * part.dtype.itemsize // _WORD,
        words_per_row=per_row,
        dtype=part.dtype.name,
        devices=peers.shape[1] // 2 - 1,
        joins=residual is not None,
        weighs=norms is not None,
        norm_row=norm_row,
    )
    same = jax.ShapeDtypeStruct(part.shape, part.dtype)
    squares = jax.ShapeDtypeStruct((per_row // _WARP, rows), jnp.float32)
    run = mosaic_kernel(
        partial(_kernel, geometry=geometry),
        interpret=False,
        out_type=[same, same, squares] if geometry.weighs else [same],
        kernel_name="peer_sum",
        grid=(geometry.blocks,),
        grid_names=("block",),
        compiler_params=LANE_PARAMS,
    )
    given = (residual, norms)
    return run(part, peers, *(array for array in given if array is not None))


def _kernel(*refs: Ref, geometry: Geometry) -> None:
    @inline(arg_types=(plgpu.RefType(),) * len(refs))
    def run(_: Value, *arrays: Value) -> None:
        places = map(_address, map(utils.memref_ptr, arrays))
        _Block(geometry, dict(zip(geometry.names, places, strict=True))).emit()

    run(*refs)


class _Block:
    """Emits the code of a block.

    Args:
        geometry: the sizes.
        places: name -> address of each operand and result; "peers" is this device's row of `Mailboxes.peers`.
    """

    def __init__(self, geometry: Geometry, places: Mapping[str, Value]) -> None:
        self._geometry, self._places = geometry, places
        self._block = utils.block_idx()
        self._device = _load(places["peers"], "ld.global.b32", i32(), "r")
        self._boxes = [self._box(constant(one)) for one in range(geometry.devices)]
        self._own = self._box(self._device)

    def emit(self) -> None:
        """Emits sending and receiving."""
        number = self._count()
        first = times(arith.andi(number, constant(1)), self._geometry.devices)
        own = _further(_further(of_bytes(first, SLOT), HEADER), of_bytes(self._device, SLOT))
        self._rounds(partial(self._send, number, [_further(box, own) for box in self._boxes]))
        came = _further(_further(self._own, of_bytes(first, SLOT)), HEADER)
        slots = [_further(came, SLOT * one) for one in range(self._geometry.devices)]
        self._rounds(partial(self._receive, number, slots))

    def _box(self, device: Value) -> Value:
        """Returns the address of a device's mailbox."""
        place = _further(_further(self._places["peers"], 8), of_bytes(device, 8))
        return _load(place, "ld.global.b64", i64(), "l")

    def _count(self) -> Value:
        """Returns the number of this sum.

        Each block has a counter, and a launch of fewer blocks than counters has each block count in several, so that
        all counters are equal after each sum.
        """
        blocks = self._geometry.blocks
        place = _further(self._own, of_bytes(self._block, 4))
        number = add(_load(place, "ld.relaxed.gpu.global.b32", i32(), "r"), 1)
        do("bar.sync 0;", "~{memory}")
        counts = arith.cmpi(arith.CmpIPredicate.ult, thread(), constant(BLOCKS // blocks))
        code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.relaxed.gpu.global.b32 [$0], $1; }"
        place = _further(place, of_bytes(thread(), 4 * blocks))
        do(code, "l,r,r,~{memory}", place, number, arith.extui(i32(), counts))
        return number

    def _rounds(self, run: Callable[[list[Value]], None]) -> None:
        """Emits `run` for all words of a thread, given the indices of some of them."""
        geometry = self._geometry
        own = add(times(self._block, _THREADS), thread())
        stride = geometry.blocks * _THREADS

        def words(index: Value) -> list[Value]:
            first = add(own, times(index, stride * geometry.at_once))
            return [add(first, stride * one) for one in range(geometry.at_once)]

        if geometry.rounds == 1:
            run(words(constant(0)))
            return
        bounds = (utils.c(one, ir.IndexType.get()) for one in (0, geometry.rounds, 1))
        loop = scf.ForOp(*bounds)
        with ir.InsertionPoint(loop.body):
            run(words(arith.index_cast(i32(), loop.induction_variable)))
            scf.yield_([])

    def _send(self, number: Value, slots: list[Value], words: list[Value]) -> None:
        """Emits the stores of some words to this device's slot of each mailbox."""
        words = list(map(self._within, words))
        sent = [self._load("part", word) for word in words]
        code = (
            "{ .reg .b64 low, high; mov.b64 low, {$1, $3}; mov.b64 high, {$2, $3}; "
            "st.relaxed.sys.global.v2.b64 [$0], {low, high}; }"
        )
        for word, data in zip(words, sent, strict=True):
            for slot in slots:
                place = _further(slot, of_bytes(word, 2 * _WORD))
                do(code, "l,r,r,r,~{memory}", place, *data, number)

    def _receive(self, number: Value, slots: list[Value], words: list[Value]) -> None:
        """Emits the results of some words, once they have come from all devices."""
        geometry, numbers = self._geometry, _Numbers(self._geometry.dtype)
        wanted, words = words, list(map(self._within, words))
        per_row = constant(geometry.words_per_row)
        columns = [arith.remui(word, per_row) for word in words]
        residual = [self._load("residual", word) for word in words] if geometry.joins else []
        of_row = geometry.norm_row * geometry.words_per_row
        norms = (
            [self._load("norms", add(one, of_row)) for one in columns] if geometry.weighs else []
        )
        places = [_further(slot, of_bytes(word, 2 * _WORD)) for word in words for slot in slots]
        came = _await(places, number)
        of_word = 2 * len(slots)
        for index, word in enumerate(words):
            parts = came[of_word * index : of_word * (index + 1)]
            added = [
                [*parts[half::2], *(one[half] for one in residual[index : index + 1])]
                for half in (0, 1)
            ]
            sums = [numbers.narrowed(numbers.total(several)) for several in added]
            self._store("out", word, sums)
            if not geometry.weighs:
                continue
            wide = [numbers.widened(one) for one in sums]
            weights = [numbers.widened(one) for one in norms[index]]
            products = [arith.mulf(*both) for both in zip(wide, weights, strict=True)]
            self._store("weighed", word, [numbers.narrowed(one) for one in products])
            self._store_squares(numbers.of_warp(wide), wanted[index], columns[index])

    def _within(self, word: Value) -> Value:
        """Returns the index of a word; that of the last one for threads that have none, which do it once more."""
        return arith.minui(word, constant(self._geometry.words - 1))

    def _load(self, name: str, word: Value) -> list[Value]:
        """Emits the load of the two 32-bit words of a word of an array."""
        pair = llvm.StructType.get_literal([i32()] * 2)
        place = _further(self._places[name], of_bytes(word, _WORD))
        both = _load(place, "ld.global.v2.b32", pair, "r", count=2)
        return [llvm.extractvalue(i32(), both, [half]) for half in (0, 1)]

    def _store(self, name: str, word: Value, values: list[Value]) -> None:
        """Emits the store of the two 32-bit words of a word of an array."""
        place = _further(self._places[name], of_bytes(word, _WORD))
        do("st.global.v2.b32 [$0], {$1, $2};", "l,r,r,~{memory}", place, *values)

    def _store_squares(self, total: Value, word: Value, column: Value) -> None:
        """Emits the store of a warp's sum of squares by its first thread, if the warp has words of its own."""
        geometry = self._geometry
        rows = geometry.words // geometry.words_per_row
        row = arith.divui(word, constant(geometry.words_per_row))
        place = add(times(divide(column, _WARP)[0], rows), row)
        is_first = arith.cmpi(arith.CmpIPredicate.eq, divide(thread(), _WARP)[1], constant(0))
        has_words = arith.cmpi(arith.CmpIPredicate.ult, word, constant(geometry.words))
        chosen = arith.extui(i32(), arith.andi(is_first, has_words))
        code = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1; }"
        place = _further(self._places["squares"], of_bytes(place, 4))
        do(code, "l,r,r,~{memory}", place, arith.bitcast(i32(), total), chosen)


def _await(places: list[Value], number: Value) -> list[Value]:
    """Returns the two words of data at each place, once all flags there are `number`."""
    count = len(places)
    outs = 2 * count
    loads = " ".join(
        f"ld.relaxed.sys.global.v2.b64 {{w{2 * one}, w{2 * one + 1}}}, [${outs + one}];"
        for one in range(count)
    )
    flags = " ".join(
        f"mov.b64 {{${one}, flag}}, w{one}; xor.b32 flag, flag, ${outs + count}; or.b32 wrong, wrong, flag;"
        for one in range(outs)
    )
    code = f"""{{
        .reg .pred is_done, is_early;
        .reg .b32 wrong, flag;
        .reg .b64 w<{outs}>, now, end;
        mov.u64 end, %globaltimer;
        add.u64 end, end, {_PATIENCE};
    again:
        {loads}
        mov.b32 wrong, 0;
        {flags}
        setp.eq.b32 is_done, wrong, 0;
        @is_done bra done;
        mov.u64 now, %globaltimer;
        setp.lt.u64 is_early, now, end;
        @is_early bra again;
        trap;
    done:
    }}"""
    # "=&r": results are written before the last argument is read.
    kinds = ",".join(["=&r"] * outs + ["l"] * count + ["r", "~{memory}"])
    several = llvm.StructType.get_literal([i32()] * outs)
    found = llvm.inline_asm(several, [*places, number], code, kinds, has_side_effects=True)
    return [llvm.extractvalue(i32(), found, [one]) for one in range(outs)]


class _Numbers:
    """Emits arithmetic on 32-bit words of one or two numbers, as vectors of float32."""

    def __init__(self, dtype: str) -> None:
        self._lanes = 1 if dtype == "float32" else 2
        self._narrow = ir.VectorType.get((self._lanes,), getattr(ir, _TYPES[dtype]).get())
        self._broad = ir.VectorType.get((self._lanes,), ir.F32Type.get())
        self._word = ir.VectorType.get((1,), i32())

    def widened(self, word: Value) -> Value:
        """Returns a word's numbers."""
        found = vector.bitcast(self._narrow, vector.from_elements(self._word, [word]))
        return found if self._narrow == self._broad else arith.extf(self._broad, found)

    def narrowed(self, numbers: Value) -> Value:
        """Returns the word of some numbers, rounded."""
        if self._narrow != self._broad:
            numbers = arith.truncf(self._narrow, numbers)
        return vector.extract(vector.bitcast(self._word, numbers), [], [0])

    def total(self, words: list[Value]) -> Value:
        """Returns the sums of the words' numbers, added up in order."""
        total, *others = map(self.widened, words)
        for one in others:
            total = arith.addf(total, one)
        return total

    def of_warp(self, several: list[Value]) -> Value:
        """Returns the sum of the squares of all numbers of the warp's threads."""
        total = None
        for numbers in several:
            squares = arith.mulf(numbers, numbers)
            for lane in range(self._lanes):
                square = vector.extract(squares, [], [lane])
                total = square if total is None else arith.addf(total, square)
        for distance in (1, 2, 4, 8, 16):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        return total


def _load(place: Value, code: str, result: Value, letter: str, count: int = 1) -> Value:
    """Emits a load from an address, a 64-bit integer."""
    outs = [f"${one}" for one in range(count)]
    target = outs[0] if count == 1 else f"{{{', '.join(outs)}}}"
    kinds = ",".join([f"={letter}"] * count + ["l", "~{memory}"])
    text = f"{code} {target}, [${count}];"
    return llvm.inline_asm(result, [place], text, kinds, has_side_effects=True)


def _address(pointer: Value) -> Value:
    """Returns a pointer as a 64-bit integer."""
    return llvm.ptrtoint(i64(), pointer)


def _further(address: Value, offset: Value | int) -> Value:
    """Returns the address `offset` bytes after another, both 64-bit integers."""
    if isinstance(offset, int):
        offset = arith.constant(i64(), offset)
    return arith.addi(address, offset)
