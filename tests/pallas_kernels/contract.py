"""What the contract suites share: calling an implementation by name, bits, permuted rows."""

import inspect
import re
from functools import partial

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.formats.few_bits import FewBits

# Every implementation signs the same contract; one that needs a GPU joins with that mark.
ON_GPU = {"mosaic_gpu", "cudnn"}


def implementations(*names, slow=()):
    """Parametrises a test over implementations; those in `slow` are slow."""
    params = [
        pytest.param(
            name,
            marks=[pytest.mark.gpu] * (name in ON_GPU) + [pytest.mark.slow] * (name in slow),
        )
        for name in names
    ]
    return pytest.mark.parametrize("implementation", params)


def implementations_in(*names):
    """Parametrises a test over implementations and dtypes; plain XLA in bfloat16 is slow."""
    params = []
    for name in names:
        for dtype in ("float32", "bfloat16"):
            on_cpu = [pytest.mark.slow] * (dtype == "bfloat16")
            marks = [pytest.mark.gpu] if name in ON_GPU else on_cpu
            params.append(pytest.param(name, dtype, id=f"{name}-{dtype}", marks=marks))
    return pytest.mark.parametrize(("implementation", "dtype"), params)


def cases(all_cases, *, fast=None):
    """Parametrises a test over cases; the large ones are for GPUs, and those that `fast` does not name are slow."""

    def marks(case):
        if not case.ci:
            return [pytest.mark.gpu]
        return [pytest.mark.slow] * (fast is not None and case.name not in fast)

    if fast is not None:
        assert set(fast) <= {case.name for case in all_cases}
    params = [pytest.param(case, id=case.name, marks=marks(case)) for case in all_cases]
    return pytest.mark.parametrize("case", params)


def compared(all_cases, *, slow=()):
    """Parametrises a test over implementations, cases and dtypes.

    Plain XLA runs everywhere, in float32 and, once, in bfloat16; the rest is for GPUs. XLA's cases in `slow` are slow.
    """
    params = []
    for case in all_cases:
        for implementation, dtype in (
            ("xla", "float32"),
            ("xla", "bfloat16"),
            ("mosaic_gpu", "bfloat16"),
            ("mosaic_gpu", "float32"),
        ):
            everywhere = case.ci and (dtype == "float32" or case is all_cases[0])
            if implementation == "xla" and everywhere:
                marks = [pytest.mark.slow] * (case.name in slow)
            else:
                marks = [pytest.mark.gpu]
            name = f"{case.name}-{implementation}-{dtype}"
            params.append(pytest.param(implementation, case, dtype, id=name, marks=marks))
    return pytest.mark.parametrize(("implementation", "case", "dtype"), params)


def device(inputs):
    """Returns the arguments with the arrays, those in tuples included, on the device."""

    def put(value):
        return jnp.asarray(value) if isinstance(value, np.ndarray) else value

    return {name: jax.tree.map(put, value) for name, value in inputs.items()}


PROGRAMS: dict | None = None
"""The programs of the test that runs; `None` if it compiles each call anew. A fixture of conftest.py sets it."""


def program_of(function):
    """Returns a `partial` that is compiled at its first call; within a test, equal ones are one program."""
    key = function.func, function.args, tuple(sorted(function.keywords.items()))
    try:
        return (
            jax.jit(function) if PROGRAMS is None else PROGRAMS.setdefault(key, jax.jit(function))
        )
    except TypeError:  # an option has no hash
        return jax.jit(function)


def compiled(op, inputs):
    """Runs an op as production does: arrays are traced, options are not."""
    # An array that is on the device already would be a constant of the program, which takes minutes if it is large.
    traced = np.ndarray | jax.Array | FewBits
    arrays = {name: value for name, value in inputs.items() if isinstance(value, traced)}
    options = {name: value for name, value in inputs.items() if name not in arrays}
    return program_of(partial(op, **options))(**arrays)


def call(op, refusal, inputs, implementation):
    """Runs an implementation; if it refuses, checks that the op says so in its words, and skips aloud."""
    reason = refusal(implementation, inputs)
    if reason is None:
        return compiled(partial(op, implementation=implementation), inputs)
    with pytest.raises(Unsupported, match=re.escape(reason)):
        compiled(partial(op, implementation=implementation), inputs)
    pytest.skip(f"{implementation} refuses: {reason}")


def by_name(implementation, *groups):
    """Returns a function of values of `groups` as one of the op's arguments by name."""

    def run(**given):
        made, others = grouped(given, *groups)
        return implementation(*made, **others)

    return run


def grouped(inputs, *groups):
    """Returns the arguments of an implementation: a value of each of `groups`, and the other inputs by name.

    A group is a class of named tuples or a dataclass.
    """
    names = [tuple(inspect.signature(group).parameters) for group in groups]
    made = [
        group(**{name: inputs[name] for name in own if name in inputs})
        for group, own in zip(groups, names, strict=True)
    ]
    taken = {name for own in names for name in own}
    return made, {name: value for name, value in inputs.items() if name not in taken}


def refusals(**kernels):
    """Returns the refusal of an implementation, given a function of the op's arguments by name for each kernel."""

    def refusal(implementation, inputs):
        if implementation not in kernels:
            return None
        return kernels[implementation](**device(inputs))

    return refusal


def bits(array):
    """The bytes of each row, so that equality means equal bits (NaN and signed zeros included)."""
    array = np.asarray(array)
    return [row.tobytes() for row in array]


def equations(jaxpr):
    """All equations of a jaxpr, those of inner jaxprs included."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from equations(inner)
