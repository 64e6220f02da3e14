"""`audit`: proves from the compiled program's text that it updates its cache in place, without running it.

On every backend each donated array must be returned in its own memory, and must not be copied. On a GPU a pool must
also not be laid out anew, converted or passed through arithmetic as a whole, which costs as much as a copy. That is
reported but allowed in two cases: on the CPU, where XLA converts operands of matrix products itself, and for a pool of
a single page or state, all of which a step reads anyway.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from math import prod

import jax

from jaxkv.errors import ProgramRefused
from jaxkv.programs.alias_flow import PoolCopy, follow_pools
from jaxkv.programs.hlo import Module, find_instructions, parse_module, text_of

SMALL_BYTES = 4096
"""Arrays up to this size may be copied: that costs less than launching the kernel that does it."""

_MOST_SUMMED = 8 * 2**20
"""Most bytes that XLA's kernel over peer memory sums; NCCL, whose buffers all programs share, sums more."""
GRANULE = 2 * 2**20
"""Bytes of which a device's memory is a multiple that its peers can read."""


@dataclass(frozen=True)
class AuditReport:
    """The memory of a compiled program, and the copies that it makes of its cache.

    Attributes:
        backend: "cpu" or "gpu".
        cache_bytes: bytes of the cache on each device, as all bytes here.
        alias_bytes: bytes that outputs share with donated inputs.
        temp_bytes: bytes of temporary memory.
        sum_bytes: bytes outside of JAX's pool that sums over several GPUs keep from the first run on, see `sum_bytes`.
        copies: all copies of pools, allowed or not; `PoolCopy.pool` is the index among the cache's arrays.
        problems: reasons to refuse the program; empty if there are none.
    """

    backend: str
    cache_bytes: int
    alias_bytes: int
    temp_bytes: int
    copies: tuple[PoolCopy, ...]
    problems: tuple[str, ...]
    sum_bytes: int = 0

    def raise_if_bad(self, program: str) -> None:
        """Raises `ProgramRefused` with every problem, if there is one."""
        if self.problems:
            listed = "\n  ".join(self.problems)
            raise ProgramRefused(
                f"{program} does not update its cache in place:\n  {listed}\n"
                f"Donate the cache, return its arrays with the same order, shapes and dtypes, update them by scatters "
                f"alone, and let each write to an array depend on the earlier reads of it."
            )


@dataclass(frozen=True)
class _Pools:
    """The arrays of the cache among the parameters of the compiled module. They are also its first outputs.

    Attributes:
        names: name of each array, for messages.
        num_bytes, num_units: bytes on each device, and pages or states, of each array.
        inputs: parameter number of each array; `None` if the program does not read it, since JAX drops such arguments.
        num_inputs: number of parameters of the module.
    """

    names: tuple[str, ...]
    num_bytes: tuple[int, ...]
    num_units: tuple[int, ...]
    inputs: tuple[int | None, ...]
    num_inputs: int


def audit(compiled: jax.stages.Compiled, *, cache_argument: int | None) -> AuditReport:
    """Returns the audit's report on a program that returns its cache, or a tuple that starts with it.

    Args:
        compiled: the program.
        cache_argument: position of the donated cache among its arguments; `None` if it takes none.
    """
    pools = _find_pools(compiled, cache_argument)
    memory = compiled.memory_analysis()
    assert memory is not None, "every backend we compile for reports its memory"
    text = text_of(compiled)
    module = parse_module(text)
    backend = next(iter(jax.tree.leaves(compiled.input_shardings)[0].device_set)).platform
    problems = _alias_problems(pools, module, memory.alias_size_in_bytes)
    copies: tuple[PoolCopy, ...] = ()
    if module.num_parameters == pools.num_inputs:
        large = [at for at, size in enumerate(pools.num_bytes) if size > SMALL_BYTES]
        followed = {pools.inputs[at]: at for at in large}
        flow = follow_pools(
            module, {place: at for place, at in followed.items() if place is not None}
        )
        copies = flow.copies
        problems += _pairing_problems(pools, {at: flow.outputs.get(at) for at in large})
        problems += [
            f"{pools.names[copy.pool]} ({pools.num_bytes[copy.pool]} bytes) is copied by {copy.line}"
            for copy in copies
            if copy.exact or (backend != "cpu" and pools.num_units[copy.pool] > 1)
        ]
    return AuditReport(
        backend=backend,
        cache_bytes=sum(pools.num_bytes),
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        copies=copies,
        problems=tuple(problems),
        sum_bytes=sum_bytes(text) if backend == "gpu" else 0,
    )


def sum_bytes(text: str) -> int:
    """Returns the bytes that XLA keeps on each GPU for a program's sums over several of them.

    Each sum of a program has signals and two copies of its array, in memory of its own that peers can read. All of them
    are there from the first run to the end of the program (XLA's `CollectiveKernelThunk`, JAX 0.12). JAX's statistics
    of memory do not count them.

    Args:
        text: the result of `Compiled.as_text()` or `text_of`.
    """
    kept = 0
    for line in find_instructions(text, "all-reduce") + find_instructions(text, "all-reduce-start"):
        summed = sum(array.num_bytes for array in line.results)
        copies = -(-2 * summed // GRANULE) * GRANULE
        kept += GRANULE + copies if summed <= _MOST_SUMMED else 0
    return kept


def _find_pools(compiled: jax.stages.Compiled, cache_argument: int | None) -> _Pools:
    arguments = compiled.args_info[0]
    numbers = count()
    # Arguments that are not read have no sharding.
    shardings = jax.tree.structure(arguments).flatten_up_to(compiled.input_shardings[0])
    places = [None if sharding is None else next(numbers) for sharding in shardings]
    num_inputs = next(numbers)
    if cache_argument is None:
        return _Pools((), (), (), (), num_inputs)
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments[cache_argument])
    first = len(jax.tree.leaves(arguments[:cache_argument]))
    placed = shardings[first : first + len(leaves)]
    return _Pools(
        names=tuple(f"cache{jax.tree_util.keystr(path)}" for path, _ in leaves),
        num_bytes=tuple(
            prod(leaf.shape if place is None else place.shard_shape(leaf.shape))
            * leaf.dtype.itemsize
            for (_, leaf), place in zip(leaves, placed, strict=True)
        ),
        num_units=tuple(leaf.shape[0] if leaf.shape else 1 for _, leaf in leaves),
        inputs=tuple(places[first : first + len(leaves)]),
        num_inputs=num_inputs,
    )


def _alias_problems(pools: _Pools, module: Module, alias_bytes: int) -> list[str]:
    """Returns a problem for each array i of the cache that is not output i in the same memory."""
    if module.num_parameters != pools.num_inputs:
        return [
            f"it takes {module.num_parameters} arrays where its arguments have {pools.num_inputs}, so they "
            f"cannot be told apart; pass every array as an argument"
        ]
    problems = []
    for at, name in enumerate(pools.names):
        came_from = module.aliases.get(at)
        if came_from is None:
            problems.append(
                f"{name} ({pools.num_bytes[at]} bytes) does not come back in its own memory"
            )
        elif pools.inputs[at] is None:
            problems.append(
                f"{name} comes back as a new array, and the one that went in is not read"
            )
        elif came_from != pools.inputs[at]:
            problems.append(
                f"{name} comes back in the memory of input {came_from}, not of its own, "
                f"{pools.inputs[at]}"
            )
    if not problems and alias_bytes != sum(pools.num_bytes):
        problems.append(
            f"{alias_bytes} bytes are updated in place, but the cache has {sum(pools.num_bytes)}"
        )
    return problems


def _pairing_problems(pools: _Pools, outputs: Mapping[int, int | None]) -> list[str]:
    """Returns a problem for each output that is not computed from the array whose memory it takes.

    JAX pairs donated inputs with outputs by shape alone, so an array may be returned in the memory of another.
    """
    problems = []
    for at, pool in outputs.items():
        if pool is None:
            problems.append(
                f"{pools.names[at]} comes back as a new array, not as the one that went in, updated"
            )
        elif pool != at:
            problems.append(f"{pools.names[pool]} comes back in the place of {pools.names[at]}")
    return problems
