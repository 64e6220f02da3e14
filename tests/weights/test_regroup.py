"""What loading does to rows and axes of a leaf, beside putting tensors together."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.config.blocks import DeltaConfig, MixtureConfig
from jaxkv.weights.load import _plan
from jaxkv.weights.rules import Regroup, Rule, RuleSet, expand
from jaxkv.weights.safetensors import open_checkpoint
from jaxkv.weights.stored_leaf import StoredLeaf
from tests.weights.conftest import CONFIG, HEAD_DIM, HEADS, HIDDEN


@pytest.fixture
def load(tmp_path):
    """Returns what fills the one leaf of a rule from tensors, given the leaf's shape."""
    jax = pytest.importorskip("jax")

    def fill(rule, tensors, shape, config=CONFIG):
        save_file(tensors, tmp_path / "model.safetensors")
        recipes = expand(RuleSet((rule,)), config)
        wanted = jax.ShapeDtypeStruct(shape, np.float32)
        with open_checkpoint(tmp_path) as stored:
            return StoredLeaf.of(_plan(rule.target, wanted, recipes, stored, tmp_path)).read()

    return fill


def numbered(*shape):
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_rows_kept_head_by_head_are_put_section_by_section(load):
    queries = numbered(HEADS * 2 * HEAD_DIM, HIDDEN)
    keys = -numbered(HEAD_DIM, HIDDEN)
    rule = Rule(
        "x",
        ("q", "k"),
        combine="concat",
        rows=(("heads", "query_rows"), ("kv_heads", "head_dim")),
        regroup=Regroup(("heads",), (("head_dim",), ("head_dim",)), order=(1, 0)),
    )
    config = type(CONFIG)(**(vars(CONFIG) | {"attention_gate": True}))
    got = load(rule, {"q": queries, "k": keys}, (len(queries) + len(keys), HIDDEN), config)
    by_head = queries.reshape(HEADS, 2, HEAD_DIM, HIDDEN)
    np.testing.assert_array_equal(got[: HEADS * HEAD_DIM], by_head[:, 1].reshape(-1, HIDDEN))
    np.testing.assert_array_equal(
        got[HEADS * HEAD_DIM : 2 * HEADS * HEAD_DIM], by_head[:, 0].reshape(-1, HIDDEN)
    )
    np.testing.assert_array_equal(got[2 * HEADS * HEAD_DIM :], keys)


def test_sections_may_have_unequal_rows(load):
    delta = DeltaConfig(key_heads=2, value_heads=4, key_dim=1, value_dim=3, d_conv=2)
    config = type(CONFIG)(**(vars(CONFIG) | {"delta": delta}))
    values = ("delta.values_per_key", "delta.value_dim")
    regroup = Regroup(("delta.key_heads",), (("delta.key_dim",), values), order=(0, 1))
    got = load(Rule("x", ("a",), regroup=regroup), {"a": numbered(14, 1)}, (14, 1), config)
    assert got[:, 0].tolist() == [0, 7, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13]


def test_a_convolutions_taps_come_first(load):
    weight = numbered(5, 1, 3)
    got = load(Rule("x", ("a",), combine="taps"), {"a": weight}, (3, 5))
    np.testing.assert_array_equal(got, weight[:, 0].T)


def test_experts_stand_behind_the_outputs_they_make(load):
    mixture = MixtureConfig(experts=3, top_k=1, size=2, gated=True)
    config = type(CONFIG)(**(vars(CONFIG) | {"mixture": mixture}))
    one = numbered(3, HIDDEN, 2)
    got = load(Rule("x", ("a",), combine="transpose"), {"a": one}, (HIDDEN, 3, 2), config)
    np.testing.assert_array_equal(got, one.transpose(1, 0, 2))
    each = {f"e{expert}": one[expert] for expert in range(3)}
    rule = Rule("x", ("e{expert}",), combine="stack_transpose")
    np.testing.assert_array_equal(load(rule, each, (HIDDEN, 3, 2), config), got)


def test_each_experts_gate_stands_above_its_other_half(load):
    mixture = MixtureConfig(experts=2, top_k=1, size=3, gated=True)
    config = type(CONFIG)(**(vars(CONFIG) | {"mixture": mixture}))
    gates, ups = numbered(2, 3, HIDDEN), -numbered(2, 3, HIDDEN)
    tensors = {
        f"{name}{at}": part[at] for name, part in (("g", gates), ("u", ups)) for at in (0, 1)
    }
    rule = Rule("x", ("g{expert}", "u{expert}"), combine="stack")
    got = load(rule, tensors, (2, 6, HIDDEN), config)
    np.testing.assert_array_equal(got, np.concatenate((gates, ups), axis=1))


def test_an_offset_is_added_in_the_leafs_dtype(load):
    got = load(Rule("x", ("a",), offset=1.0), {"a": np.float32([0.0, -1.0, 1e-7])}, (3,))
    np.testing.assert_array_equal(got, np.float32([1.0, 0.0, 1 + 1e-7]))
