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
from jax.extend.core import Jaxpr, Primitive, jaxprs_in_params
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func
from jax.interpreters import batching, mlir

from pallas_kernels.argument_weights import are_arguments, argument_weights
from pallas_kernels.fixed_order import fixed_order, is_fixed

DEFERRED = "deferred_kernel"
"""Name of the primitive; its parameter "name" is the kernel's."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel and everything that its code depends on, besides the sources of this package.

    Two are equal if their descriptions are. Then one is lowered, and both run its code.

    Attributes:
        text: description of all that follows.
        launch: returns, for a body and its options, a function of arrays.
        body: the kernel.
        options: those of `plgpu.kernel`.
        in_order: whether it was called inside `fixed_order`.
        given: whether it was called inside `argument_weights`.
        changes: positions of the operands that it changes in place.
    """

    text: str
    launch: Callable[..., Callable[..., Any]]
    body: Callable[..., None]
    options: Mapping[str, Any]
    in_order: bool
    given: bool
    changes: tuple[int, ...] = ()

    def run(self, *arrays: Any) -> list[Any]:  # noqa: ANN401 - arrays and tracers of JAX
        """Launches the kernel, in the contexts of its call.

        Returns:
            The leaves of its results, then the operands that it has changed.
        """
        with fixed_order(self.in_order), argument_weights(self.given):
            refs = {at: jax.new_ref(arrays[at]) for at in self.changes}
            operands = [refs.get(at, array) for at, array in enumerate(arrays)]
            found = jax.tree.leaves(self.launch(self.body, self.options)(*operands))
            return [*found, *map(jax.freeze, refs.values())]

    def is_as_described(self) -> bool:
        """Whether `text` describes this kernel, which a copy from another process may lose."""
        return self.text == _text_of(
            self.launch, self.body, self.options, self.in_order, self.given, self.changes
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


def _text_of(*parts: object) -> str:
    return describe(parts)


def deferred(
    launch: Callable[..., Callable[..., Any]], body: Callable[..., None], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Returns a function that does what `launch(body, options)` does, and leaves the trace of `body` to the lowering.

    It calls that at once if `describe` does not know a value. The kernel changes operands that are Refs.

    Args:
        launch: returns a function of arrays that runs the kernel. It runs again in each lowering.
        body: the kernel.
        options: those of `plgpu.kernel`; "out_type" and "kernel_name" among them.
    """
    in_order, given = is_fixed(), are_arguments()
    parts = (launch, body, options, in_order, given)
    try:
        _text_of(*parts)
    except _Unknown:
        return launch(body, options)
    leaves, structure = jax.tree.flatten(options["out_type"])
    types = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)

    def call(*operands: Any) -> Any:  # noqa: ANN401 - as the launch returns it
        is_ref = [not isinstance(jax.typeof(each), ShapedArray) for each in operands]
        changes = tuple(at for at, changed in enumerate(is_ref) if changed)
        if len({id(operands[at]) for at in changes}) < len(changes):
            raise ValueError(f"{options['kernel_name']} was given one Ref as several operands")
        kernel = Kernel(_text_of(*parts, changes), *parts, changes)
        arrays = [
            each[...] if changed else each for each, changed in zip(operands, is_ref, strict=True)
        ]
        changed = tuple(ShapedArray(arrays[at].shape, arrays[at].dtype) for at in changes)
        found = _primitive.bind(
            *arrays, kernel=kernel, name=options["kernel_name"], types=types + changed
        )
        for at, array in zip(changes, found[len(types) :], strict=True):
            operands[at][...] = array
        return structure.unflatten(found[: len(types)])

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
"""Modules of the kernels that were lowered for this process, for the programs that follow."""


@dataclass(frozen=True)
class Instance:
    """A kernel with the types of its operands, as one module holds it.

    Attributes:
        kernel: the kernel.
        name: its name.
        operands: types of its operands.
        platforms: what JAX lowers for: ("cuda",) for an NVIDIA GPU.
    """

    kernel: Kernel
    name: str
    operands: tuple[jax.ShapeDtypeStruct, ...]
    platforms: tuple[str, ...]

    @property
    def is_lowered(self) -> bool:
        """Whether this process has the module."""
        return self._key in _lowered

    def keep(self, module: bytes) -> None:
        """Keeps a module that `lowered` has returned, in this process or another."""
        _lowered[self._key] = module

    def module(self) -> bytes:
        """Returns the module that is kept; lowers the kernel and keeps it first if there is none."""
        if not self.is_lowered:
            self.keep(self.lowered())
        return _lowered[self._key]

    def lowered(self) -> bytes:
        """Returns a module of StableHLO with the kernel as its main function, as MLIR's bytecode."""
        return module_of(self.lower())

    def lower(self) -> jax.stages.Lowered:
        """Returns a program of the kernel alone."""

        def run(*arrays: Any) -> Any:  # noqa: ANN401 - as `Kernel.run` returns it
            return self.kernel.run(*arrays)

        run.__name__ = self.name
        return jax.jit(run).trace(*self.operands).lower(lowering_platforms=self.platforms)

    @property
    def _key(self) -> Hashable:
        # A kernel's code depends on the device that JAX compiles for.
        device = get_default_device().device_kind
        return self.kernel.text, tuple(map(str, self.operands)), self.platforms, device


def module_of(lowered: jax.stages.Lowered) -> bytes:
    """Returns the StableHLO of a program as MLIR's bytecode."""
    module = lowered.compiler_ir()
    assert module is not None, "JAX lowers to StableHLO by default"
    return mlir.module_to_bytecode(module)


def instances(jaxpr: Jaxpr, platforms: tuple[str, ...]) -> dict[Instance, None]:
    """Returns the deferred kernels of a trace, each once, in the order in which they are lowered."""
    found: dict[Instance, None] = {}
    seen: set[int] = set()

    def visit(inner: Jaxpr) -> None:
        if id(inner) in seen:
            return
        seen.add(id(inner))
        for equation in inner.eqns:
            if str(equation.primitive) == DEFERRED:
                types = [variable.aval for variable in equation.invars]
                found[_instance(equation.params, types, platforms)] = None
            for part in jaxprs_in_params(equation.params):
                visit(part)

    visit(jaxpr)
    return found


def _instance(
    params: Mapping[str, Any], types: Sequence[Any], platforms: tuple[str, ...]
) -> Instance:
    operands = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in types)
    return Instance(params["kernel"], params["name"], operands, platforms)


def _lower(
    context: Any,  # noqa: ANN401 - private to JAX
    *operands: Any,  # noqa: ANN401 - values of MLIR
    name: str,
    **params: Any,  # noqa: ANN401 - those of the equation
) -> Sequence[Any]:
    """Takes a kernel over from the module that the first program with it has lowered."""
    program = context.module_context
    platforms = tuple(program.platforms)
    instance = _instance({"name": name, **params}, context.avals_in, platforms)
    module: Any = ir.Module.parse(instance.module(), context=program.context)
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
