"""Weights that are arguments of the program: kernels may copy them while the previous kernel still runs.

From JAX 0.12 on, a kernel's blocks start while the previous kernel ends (`pallas_kernels.mosaic.launch`), and wait
before they read what that kernel may have written. No kernel of a program writes a weight that is an argument of it, so
its first chunks may be copied into shared memory meanwhile. A kernel sees a traced array, not where that comes from. So
the code that traces a whole program promises it with `argument_weights`, and checks the promise in the finished trace
with `computed_weights`. The arguments must not be donated, and must be complete when the program is launched: another
program that still writes them on the same stream is not waited for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var, jaxprs_in_params

# Part of the keys of JAX's caches of traces, so that a trace without the promise is not mistaken for one with it.
_ARE_ARGUMENTS = jax.make_user_context(False)

_KERNELS = ("deferred_kernel", "mpmd_map", "core_map", "pallas_call")
"""What a kernel is in a trace: a deferred one of ours, or what JAX 0.11 and 0.12 call one."""

_POSITIONAL = (
    *("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "shard_map"),
)
"""Primitives whose inner traces have their inputs in order."""

EARLY = "_of_argument"
"""End of the names of kernels that copy their first operand early."""


def argument_weights(on: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which weights given to ops are arguments of the program that is traced."""
    return _ARE_ARGUMENTS(on)


def are_arguments() -> bool:
    """Returns whether weights of ops that are traced now are arguments of the program."""
    return bool(_ARE_ARGUMENTS.value)


def computed_weights(jaxpr: Jaxpr, are_given: Sequence[bool]) -> set[str]:
    """Returns the names of kernels that copy a weight early which is no argument, in a trace or a part of one.

    Args:
        jaxpr: the trace.
        are_given: for each variable of its input whether it is an argument of the whole program that is not donated.
    """
    return _computed(jaxpr, tuple(are_given), {})


def _computed(
    jaxpr: Jaxpr, are_given: tuple[bool, ...], known: dict[tuple[int, tuple[bool, ...]], set[str]]
) -> set[str]:
    """Returns what `computed_weights` does; `known` has the answers for traces that several equations share."""
    key = id(jaxpr), are_given
    if key not in known:
        arguments = {
            variable for variable, is_given in zip(jaxpr.invars, are_given, strict=True) if is_given
        }
        found: set[str] = set()
        for equation in jaxpr.eqns:
            given = [isinstance(one, Var) and one in arguments for one in equation.invars]
            name = str(equation.params.get("name"))
            if str(equation.primitive) in _KERNELS:
                found |= {name} if name.endswith(EARLY) and not given[0] else set()
                continue
            for inner, are_inner in _inner(equation, given):
                found |= _computed(inner, tuple(are_inner), known)
        known[key] = found
    return known[key]


def _inner(equation: JaxprEqn, given: list[bool]) -> Iterator[tuple[Jaxpr, list[bool]]]:
    """Yields the traces inside an equation, and which of their inputs are arguments; what a loop carries is none."""
    params, kind = equation.params, str(equation.primitive)
    for name, value in params.items():
        for inner in jaxprs_in_params({name: value}):
            own = given
            if kind == "while":
                first = params["cond_nconsts"]
                rest = given[first:][: params["body_nconsts"]]
                own = given[:first] if name == "cond_jaxpr" else rest
            elif kind == "scan":
                own = given[: _constants_of_scan(params)]
            elif kind == "cond":
                own = given[1:]
            elif kind not in _POSITIONAL or len(inner.invars) != len(given):
                own = []
            yield inner, own + [False] * (len(inner.invars) - len(own))


def _constants_of_scan(params: Mapping[str, Any]) -> int:
    """Returns the number of inputs that are the same in all iterations; 0 if this version of JAX hides it."""
    try:
        constants, *_ = params["ft_in"].unpack()
        return len(constants)
    except (AttributeError, KeyError, TypeError):
        return 0
