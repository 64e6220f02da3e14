"""Kernels whose bodies are traced when a program is lowered, and not with the program, and once for all programs.

A program is traced to find it in the store of compiled programs, which needs no lowering. Two thirds of that trace were
the bodies of kernels. A deferred kernel is one equation of the trace: the name and sizes from which its body follows.
Programs that differ in how they choose tokens, or in their steps per launch, have the same kernels, and most of the
time to lower a program is its kernels.
"""

import functools
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.backend import get_default_device
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import batching, mlir

from pallas_kernels.argument_weights import are_arguments, argument_weights
from pallas_kernels.fixed_order import fixed_order, is_fixed
from pallas_kernels.mosaic.jax_versions import honours_register_requests, overlaps_launches

DEFERRED = "deferred_kernel"
"""Name of the primitive; its parameter "name" is the kernel's."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel and everything that its code depends on, besides the sources of this package.

    Two are equal if their descriptions are. Then one is lowered, and both run its code.

    Attributes:
        text: description of the body with its sizes, of the launch's options, and of the contexts it was called in.
        run: launches the kernel.
    """

    text: str
    run: Callable[..., Any]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


def deferred(
    run: Callable[..., Any], body: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns a function that does what `run` does, and leaves the trace of `body` to the lowering.

    It calls `run` at once if an operand is a Ref, which the kernel changes, or if `describe` does not know a value.

    Args:
        run: launches the kernel: a function of arrays.
        body: the kernel.
        options: those of `plgpu.kernel`; "out_type" and "kernel_name" among them.
    """
    in_order, given = is_fixed(), are_arguments()
    versions = (overlaps_launches(), honours_register_requests())
    contexts = (in_order, given, versions)
    try:
        text = describe((body, options, contexts))
    except _Unknown:
        return run
    out_type, name = options["out_type"], options["kernel_name"]
    leaves, structure = jax.tree.flatten(out_type)

    def launch(*arrays: Any) -> Any:  # noqa: ANN401 - as `run` returns it
        now = (overlaps_launches(), honours_register_requests())
        assert now == versions, "tests change them around trace and lowering together"
        with fixed_order(in_order), argument_weights(given):
            return jax.tree.leaves(run(*arrays))

    def call(*arrays: Any) -> Any:  # noqa: ANN401 - as `run` returns it
        if not all(isinstance(jax.typeof(each), ShapedArray) for each in arrays):
            return run(*arrays)
        kernel = Kernel(text, launch)
        types = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
        return structure.unflatten(_primitive.bind(*arrays, kernel=kernel, name=name, types=types))

    return call


class _Unknown(Exception):
    """A value has no description that is the same in every process."""


def describe(value: Any) -> str:  # noqa: ANN401 - what a kernel's code may depend on
    """Returns a text that is equal for equal values, in every process.

    Raises:
        _Unknown: the value, or a part of it, may depend on something that no text of it tells.
    """
    match value:
        case Enum():
            return f"{type(value).__qualname__}.{value.name}"
        case None | bool() | int() | float() | str() | np.dtype():
            return repr(value)
        case functools.partial():
            parts = (value.func, value.args, value.keywords)
            return f"partial{describe(parts)}"
        case types.MethodType():
            return f"{describe(value.__self__)}.{value.__func__.__qualname__}"
        case types.FunctionType() if value.__closure__ is None and "<" not in value.__qualname__:
            return f"{value.__module__}.{value.__qualname__}"
        case jax.ShapeDtypeStruct() | ShapedArray():
            return f"{value.dtype}{list(value.shape)}"
        case Mapping():
            return f"{{{', '.join(f'{name}: {describe(value[name])}' for name in value)}}}"
        case tuple() | list():
            listed = ", ".join(map(describe, value))
            return f"{type(value).__name__}({listed})"
    if is_dataclass(value) and not isinstance(value, type):
        listed = ", ".join(
            f"{part.name}={describe(getattr(value, part.name))}" for part in fields(value)
        )
        return f"{type(value).__module__}.{type(value).__qualname__}({listed})"
    if isinstance(value, type) and "<" not in value.__qualname__:
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type(jnp.float32)):
        return jnp.dtype(value).name
    raise _Unknown(type(value))


def _run(*arrays: Any, kernel: Kernel, **_: object) -> Any:  # noqa: ANN401 - arrays
    return kernel.run(*arrays)


def _run_batched(arrays: Any, axes: Any, *, kernel: Kernel, **_: object) -> Any:  # noqa: ANN401 - arrays
    out = jax.vmap(kernel.run, in_axes=axes)(*arrays)
    return out, [0] * len(out)


_lowered: dict[Hashable, bytes] = {}
"""Modules of the kernels that this process has lowered, for the programs that follow."""


def _lower(
    context: Any,  # noqa: ANN401 - private to JAX
    *operands: Any,  # noqa: ANN401 - values of MLIR
    kernel: Kernel,
    name: str,
    **_: object,
) -> Sequence[Any]:
    """Takes a kernel over from the module that the first program with it has lowered."""
    program = context.module_context
    types = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in context.avals_in]
    platforms = tuple(program.platforms)
    # A kernel's code depends on the device that JAX compiles for.
    key = (kernel.text, *map(str, types), platforms, get_default_device().device_kind)
    if key not in _lowered:

        def run(*arrays: Any) -> Any:  # noqa: ANN401 - as `Kernel.run` returns it
            return kernel.run(*arrays)

        run.__name__ = name
        module = jax.jit(run).trace(*types).lower(lowering_platforms=platforms).compiler_ir()
        assert module is not None, "JAX lowers to StableHLO by default"
        _lowered[key] = mlir.module_to_bytecode(module)
    module: Any = ir.Module.parse(_lowered[key], context=program.context)
    (main,) = [one for one in module.body.operations if one.sym_name.value == "main"]
    (body,) = main.body.blocks
    first, *rest = body.operations
    given, last = list(first.operands), list(rest[-1].operands)
    if len(rest) == 1 and given == list(body.arguments) and last == list(first.results):
        # The kernel alone, which needs no function around it. JAX 0.11 lists attributes, JAX 0.12 their names.
        attributes = first.operation.attributes
        names = [getattr(each, "name", each) for each in attributes]
        return ir.Operation.create(
            first.operation.name,
            results=[each.type for each in first.results],
            operands=list(operands),
            attributes={each: attributes[each] for each in names},
            # It has the kernel's name, by which profiles and tests know it.
            loc=first.operation.location,
        ).results
    symbol = mlir.merge_mlir_modules(program.module, name, module, program.symbol_table)
    results = program.symbol_table[symbol].type.results
    return func.CallOp(results, ir.FlatSymbolRefAttr.get(symbol), list(operands)).results


_primitive = Primitive(DEFERRED)
_primitive.multiple_results = True
_primitive.def_impl(_run)
_primitive.def_abstract_eval(lambda *_, types, **__: list(types))
batching.primitive_batchers[_primitive] = _run_batched
mlir.register_lowering(_primitive, _lower)
