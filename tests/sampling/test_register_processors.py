"""Functions that cannot be a part of a step are refused where they are registered, by name and with the reason."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.sampling.register_processors import register_processors

VOCAB, LONGEST = 17, 8
TABLE = jnp.arange(VOCAB, dtype=jnp.float32)
BIG = jnp.zeros((600, 600), jnp.float32)
SEEN = []


def register(function, name="mine"):
    return register_processors({name: function}, vocab_size=VOCAB, max_tokens=LONGEST)


def drawn(logits, history):
    return logits + random.random()


def drawn_array(logits, history):
    return logits + np.random.default_rng().normal(size=VOCAB).astype(np.float32)


def remembers(logits, history):
    SEEN.append(logits)
    return logits + SEEN[0]


def calls_host(logits, history):
    return jax.pure_callback(lambda values: values, logits, logits)


def calls_host_in_a_loop(logits, history):
    def body(carry, value):
        jax.debug.callback(lambda _: None, value)
        return carry, value

    return jax.lax.scan(body, 0, logits)[1]


def prints(logits, history):
    jax.debug.print("{}", logits[0])
    return logits


def branches(logits, history):
    return logits if logits[0] > 0 else -logits


def indexes_by_length(logits, history):
    return logits + history.ids[: history.length].sum()


class Plain:
    __hash__ = None

    def __call__(self, logits, history):
        return logits


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (drawn, "is not pure"),
        (drawn_array, "is not pure"),
        (remembers, "is not pure|cannot be traced"),
        (calls_host, "calls the host or has another effect: pure_callback"),
        (calls_host_in_a_loop, "calls the host"),
        (prints, "calls the host or has another effect: Debug"),
        (branches, "cannot be traced by JAX: TracerBoolConversionError"),
        (indexes_by_length, "cannot be traced by JAX: IndexError"),
        (lambda logits, history: unknown_name, "NameError"),  # noqa: F821
        (lambda logits, history: logits[1:], r"must return float32\[17\].*got float32\[16\]"),
        (lambda logits, history: logits.astype(jnp.bfloat16), r"got bfloat16\[17\]"),
        (lambda logits, history: history.ids, r"got int32\[8\]"),
        (lambda logits, history: (logits, logits), "must return one array"),
        (lambda logits, history: None, "must return one array"),
        (lambda logits: logits, r"must have the signature f\(logits, history"),
        (lambda logits, history, size: logits, "'size' without a default"),
        (lambda logits, history, **others: logits, "without a default"),
        (
            lambda logits, history, size="a": logits,
            "wrong default of 'size'.*bools, ints or floats",
        ),
        (lambda logits, history, size=2**40: logits, "must fit into 32 bits"),
        (Plain, "must be a function of arrays"),
        (Plain(), "must be hashable"),
        (3, "must be a function of arrays"),
        (lambda logits, history: logits + BIG[0, :VOCAB], "1,440,000 bytes of arrays from outside"),
    ],
)
def test_a_function_that_cannot_run_in_a_step_is_refused(function, message):
    with pytest.raises(ValueError, match=message) as refused:
        register(function)
    assert "'mine'" in str(refused.value) or "logits processors use" in str(refused.value)


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ([drawn], "must map names to JAX functions"),
        ({"": drawn}, "must have a text as its name"),
        ({3: drawn}, "must have a text as its name"),
        ({f"p{at}": Plain for at in range(65)}, "at most 64"),
    ],
)
def test_what_is_no_mapping_from_names_to_functions_is_refused(functions, message):
    with pytest.raises(ValueError, match=message):
        register_processors(functions, vocab_size=VOCAB, max_tokens=LONGEST)


def test_a_value_of_a_traced_function_around_it_is_refused():
    def outer(scale):
        register(lambda logits, history: logits * scale)
        return scale

    with pytest.raises(ValueError, match="'mine' uses a value of a function around it"):
        jax.jit(outer)(jnp.float32(2.0))


@jax.jit
def jitted(logits, history, *, scale=2.0):
    return logits * scale


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (lambda logits, history: jax.nn.relu(logits) + TABLE, {}),
        (lambda logits, history: jax.random.normal(jax.random.key(0), logits.shape), {}),
        (jitted, {"scale": ("float32", ())}),
        (functools.partial(jitted, scale=3.0), {"scale": ("float32", ())}),
        (lambda logits, history, on=False: jnp.where(on, logits, 0.0), {"on": ("bool", ())}),
        (
            lambda logits, history, ids=np.zeros((2, 3)), top=np.uint8(3): logits,  # noqa: B008
            {"ids": ("float32", (2, 3)), "top": ("int32", ())},
        ),
    ],
    ids=["activation", "fixed key", "jitted", "partial", "bool", "arrays"],
)
def test_a_default_declares_dtype_and_shape_of_an_argument(function, parameters):
    [made] = register(function).processors
    assert {one.name: (one.dtype, one.shape) for one in made.parameters} == parameters
