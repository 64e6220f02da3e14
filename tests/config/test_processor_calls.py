"""`logits_processors` of a request: immutable, hashable and plain, whatever arrays were given."""

import copy
import pickle

import numpy as np
import pytest

from jaxkv.config.processor_calls import ProcessorCalls
from jaxkv.config.sampling import SamplingParams


def test_arrays_become_tuples_of_plain_numbers():
    given = {
        "a": {
            "x": np.asarray([[1, 2], [3, 4]], np.int64),
            "y": [0.5, np.float64(1)],
            "z": np.float32(2),
        }
    }
    made = SamplingParams(logits_processors=given).logits_processors
    assert made == {"a": {"x": ((1, 2), (3, 4)), "y": (0.5, 1.0), "z": 2.0}}
    assert type(made["a"]["z"]) is float


def test_it_is_a_copy_that_nobody_can_change():
    given = {"a": {"x": 1}}
    params = SamplingParams(logits_processors=given)
    given["a"]["x"] = 2
    params.logits_processors["a"]["x"] = 3
    assert params.logits_processors == {"a": {"x": 1}}


def test_equal_ones_have_equal_hashes_in_any_order():
    one = ProcessorCalls({"a": {"x": 1, "y": [1, 2]}, "b": {}})
    other = ProcessorCalls({"b": {}, "a": {"y": (1, 2), "x": 1}})
    assert one == other
    assert hash(one) == hash(other)
    assert one != ProcessorCalls({"a": {"x": 1, "y": [1, 3]}, "b": {}})
    assert hash(SamplingParams(logits_processors=one)) == hash(
        SamplingParams(logits_processors=other)
    )


def test_it_can_be_copied_and_pickled():
    made = ProcessorCalls({"a": {"x": (1, 2)}})
    assert copy.deepcopy(made) == pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([len], r"must map names.*LLM\(logits_processors"),
        ({1: {}}, "names as keys"),
        ({"": {}}, "names as keys"),
        ({"a": 3}, "must map 'a' to its arguments"),
        ({"a": None}, "must map 'a' to its arguments"),
        ({"a": {2: 3}}, "names as keys"),
        ({"a": {"x": "text"}}, "'x' of 'a'; an argument is a number"),
        ({"a": {"x": None}}, "an argument is a number"),
        ({"a": {"x": 2**63}}, "a number of at most 64 bits"),
        ({"a": {"x": [10**30]}}, "an argument is a number"),
        ({"a": {"x": [[1], [2, 3]]}}, "an argument is a number"),
        ({"a": {"x": np.asarray(["text"])}}, "an argument is a number"),
        ({"a": {"x": [[[[[[[[[1]]]]]]]]]}}, "8 dimensions"),
        ({"a": {"x": [0] * (2**16 + 1)}}, "at most 65536 numbers"),
        ({"a": {"x": np.zeros(2**16 + 1)}}, "at most 65536 numbers"),
        ({str(at): {} for at in range(65)}, "number of logits_processors"),
    ],
)
def test_other_values_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(logits_processors=given)
