"""Errors and sampling parameters keep their classes and values between the processes."""

import pytest

from jaxkv import ReasoningTokens, SamplingParams, StructuredOutputs
from jaxkv.config.engine import EngineConfig
from jaxkv.config.plain_sampling import pack_sampling, unpack_sampling
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.errors import BadCheckpoint, OutOfMemory, ProgramRefused
from jaxkv.replicas.messages import VALUES, as_error, as_value
from pallas_kernels.dispatch import Unsupported


class Odd(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a"),
        FileNotFoundError(2, "No such file", "x"),
        BadCheckpoint("b"),
        OutOfMemory("c"),
        ProgramRefused("d"),
        Unsupported("e"),
    ],
)
def test_an_error_that_both_know_keeps_its_class_and_message(error):
    found = as_error(VALUES.read(VALUES.write(as_value(error))))
    assert type(found) is type(error)
    assert str(found) == str(error)


@pytest.mark.parametrize("error", [Odd("why"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")])
def test_any_other_error_names_its_class(error):
    found = as_error(as_value(error))
    assert type(found) is RuntimeError
    assert str(found) == f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, stop=("a",), logit_bias={3: 1.5}, seed=2**64 - 1),
        SamplingParams(logits_processors={"p": {"x": 1.0}}),
        SamplingParams(
            structured_outputs=StructuredOutputs(
                json={"type": "object"}, reasoning=ReasoningTokens(ends=(5,))
            )
        ),
    ],
)
def test_sampling_parameters_come_back(params):
    packed = VALUES.read(VALUES.write(pack_sampling(params)))
    assert unpack_sampling(packed) == params


def test_a_configuration_comes_back():
    engine = EngineConfig(token_budget=64, speculation=SpeculationConfig(method="ngram"))
    assert VALUES.read(VALUES.write(engine)) == engine
