"""`register_processors`: turns a user's functions into logits processors, after checks that they can run in a step."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxkv.config.processor_calls import MAX_PROCESSORS
from jaxkv.errors import STEP_FAILURES
from jaxkv.sampling.processors import (
    LogitsProcessors,
    Parameter,
    Processor,
    TokenHistory,
    encode,
)
from jaxkv.wording import clip, shown

MAX_CONSTANT_BYTES = 2**20 - 2**16
"""Most bytes of arrays from outside that all functions use together; they are a part of every program's code."""

_FAILURES = (*STEP_FAILURES, AttributeError, NameError, AssertionError)
_OWN = 2
"""Parameters that every function has: logits and history."""


def register_processors(functions: object, *, vocab_size: int, max_tokens: int) -> LogitsProcessors:
    """Returns the processors of some functions.

    Each function is traced, alone and for several rows. Nothing is compiled.

    Args:
        functions: name -> a `LogitsProcessor`; `None` for none.
        vocab_size: number of the model's logits.
        max_tokens: length of the token histories.

    Raises:
        ValueError: a function cannot be traced or is not pure, returns another shape or dtype than the logits have,
            calls the host, or has a parameter whose default declares no shape; the message names it.
    """
    if not isinstance(functions, Mapping | None):
        raise ValueError(
            f"logits_processors must map names to JAX functions, such as {{'name': function}}, got {shown(functions)}"
        )
    functions = functions or {}
    if len(functions) > MAX_PROCESSORS:
        raise ValueError(
            f"at most {MAX_PROCESSORS} logits processors can be registered, got {len(functions)}"
        )
    made, num_bytes = [], 0
    for name, function in functions.items():
        try:
            one = _processor(name, function)
            num_bytes += _check(one, vocab_size, max_tokens)
        except ValueError as error:
            raise ValueError(f"the logits processor {shown(name)} {error}") from error.__cause__
        made.append(one)
    if num_bytes > MAX_CONSTANT_BYTES:
        raise ValueError(
            f"the logits processors use {num_bytes:,} bytes of arrays from outside the functions, at most "
            f"{MAX_CONSTANT_BYTES:,} can be a part of the programs; use narrower dtypes or smaller tables"
        )
    return LogitsProcessors(tuple(made))


def _processor(name: object, function: object) -> Processor:
    """Returns a processor with the parameters that the function's signature declares."""
    if not isinstance(name, str) or not name:
        raise ValueError("must have a text as its name")
    if not callable(function) or isinstance(function, type):
        raise ValueError(f"must be a function of arrays, got {shown(function)}")
    try:
        hash(function)
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"must be hashable and have a signature: {clip(error)}; give a function"
        ) from error
    own, further = parameters[:_OWN], parameters[_OWN:]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(own) < _OWN or any(one.kind not in positional for one in own):
        raise ValueError(
            f"must have the signature f(logits, history, *, argument=default), got "
            f"{clip(inspect.signature(function))}"
        )
    return Processor(name, function, tuple(map(_parameter, further)))


def _parameter(given: inspect.Parameter) -> Parameter:
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if given.kind not in by_name or given.default is inspect.Parameter.empty:
        raise ValueError(
            f"has the parameter {str(given)!r} without a default, which declares the shape and dtype of the argument; "
            f"write {given.name}=0, {given.name}=1.0, {given.name}=False or an array of these"
        )
    try:
        dtype, shape, words = encode(given.default)
    except ValueError as error:
        raise ValueError(f"has a wrong default of {given.name!r}: {error}") from None
    return Parameter(given.name, dtype, shape, tuple(words.tolist()))


def _check(one: Processor, vocab_size: int, max_tokens: int) -> int:
    """Returns the bytes of the arrays from outside that a function uses.

    Raises:
        ValueError: it cannot run in a step.
    """
    logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    history = jax.eval_shape(
        lambda: TokenHistory(
            jnp.zeros(max_tokens, jnp.int32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
        )
    )
    arguments = {
        parameter.name: jax.ShapeDtypeStruct(parameter.shape, jnp.dtype(parameter.dtype))
        for parameter in one.parameters
    }
    several = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype),
        (logits, history, arguments),
    )

    try:
        first, out = _trace(one, logits, history, arguments)
        _check_result(out, vocab_size)
        _check_calls(first)
        _check_constants(first)
        second, _ = _trace(one, logits, history, arguments)
        _trace(replace(one, function=jax.vmap(one.function)), *several)
    except _FAILURES as error:
        if isinstance(error, _Refused):
            raise
        raise ValueError(
            f"cannot be traced by JAX: {type(error).__name__}: {clip(error, 600)}"
        ) from error
    if _text(first) != _text(second) or not _are_equal(first.consts, second.consts):
        raise ValueError(
            "is not pure: it computes something else each time it is traced; compute from its arguments alone"
        )
    return sum(getattr(constant, "nbytes", 0) for constant in first.consts)


def _trace(
    one: Processor, logits: object, history: object, arguments: Mapping[str, Any]
) -> tuple[ClosedJaxpr, object]:
    """Returns the trace of a function and the type of its result. JAX caches traces, but not of a new function."""
    run = lambda logits, history, arguments: one.function(logits, history, **arguments)  # noqa: E731
    return jax.make_jaxpr(run, return_shape=True)(logits, history, arguments)


class _Refused(ValueError):
    """A function was traced, but cannot run in a step."""


def _check_result(out: object, vocab_size: int) -> None:
    wanted = f"float32[{vocab_size}], the shape and dtype of its logits"
    if not isinstance(out, jax.ShapeDtypeStruct):
        raise _Refused(f"must return one array, {wanted}, got {clip(out)}")
    if (out.shape, out.dtype) != ((vocab_size,), jnp.float32):
        raise _Refused(f"must return {wanted}, got {out.dtype}{list(out.shape)}")


def _check_calls(traced: ClosedJaxpr) -> None:
    """Raises `_Refused` if a function calls the host, prints, or has another effect."""
    called = [name for name in _primitives(traced.jaxpr) if "callback" in name]
    effects = [*called, *map(str, traced.effects)]
    if effects:
        raise _Refused(
            f"must be computed on the device alone, but it calls the host or has another effect: {clip(effects[0])}; "
            f"remove callbacks and jax.debug.print"
        )


def _check_constants(traced: ClosedJaxpr) -> None:
    if any(isinstance(constant, Tracer) for constant in traced.consts):
        raise _Refused(
            "uses a value of a function around it that is being traced; make it an argument with a default"
        )


def _primitives(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the names of all operations of a trace, those of inner functions too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda node: isinstance(node, ClosedJaxpr | Jaxpr),
        ):
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            if isinstance(inner, Jaxpr):
                yield from _primitives(inner)


def _text(traced: ClosedJaxpr) -> str:
    """Returns a trace as text, without addresses of Python's objects."""
    return re.sub(r"\b0x[0-9a-f]+\b", "", str(traced))


def _are_equal(first: list[Any], second: list[Any]) -> bool:
    """Returns whether the arrays from outside are the same in two traces."""
    return len(first) == len(second) and all(
        np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False)
        for one, other in zip(first, second, strict=True)
    )
