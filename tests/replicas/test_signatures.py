"""Replicas take the options of one engine, with the same defaults, and name what only one engine has."""

import inspect

import pytest

from jaxkv import LLM, AsyncLLM
from jaxkv.llm import _replicas_of
from jaxkv.replicas.async_front import AsyncReplicatedLLM
from jaxkv.replicas.front import _ELSEWHERE, ReplicatedLLM


def options_of(function, *left_out):
    """Returns name -> default of the parameters."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in left_out
    }


def public(kind):
    functions = inspect.getmembers(kind, inspect.isfunction)
    return {name: function for name, function in functions if not name.startswith("_")}


def test_replicas_are_made_with_the_options_of_one_llm():
    one = options_of(LLM.__init__, "self", "model", "data_parallel_size")
    assert options_of(_replicas_of, "count", "model") == one


@pytest.mark.parametrize(("one", "several"), [(LLM, ReplicatedLLM), (AsyncLLM, AsyncReplicatedLLM)])
def test_methods_of_replicas_have_the_parameters_of_those_of_one_engine(one, several):
    shared = public(one).keys() & public(several).keys()
    assert len(shared) >= 10
    for name in shared:
        assert options_of(public(several)[name]) == options_of(public(one)[name]), name


def test_every_other_method_of_one_llm_is_refused_by_name():
    assert public(LLM).keys() - public(ReplicatedLLM).keys() <= _ELSEWHERE.keys()
