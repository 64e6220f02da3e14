"""The GRPO example: its reward is verified, its log-probabilities are the engine's, and training raises the reward."""

import shutil
from xml.etree import ElementTree

import jax
import numpy as np
import pytest

from jaxkv import default_model
from jaxkv.examples.grpo import Recipe, advantages_of, parses, train, write_curve
from jaxkv.examples.small_llama import SmallLlama, init_params, save_hf

TINY = SmallLlama(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=32
)


@pytest.mark.parametrize(
    ("line", "good"),
    [("x = [1, 2]", True), ("x = [1, 2", False), ('x = "\\d"', True), ("x = \0", False)],
)
def test_a_line_is_good_if_python_reads_it(line, good):
    assert parses(line) == good


def test_advantages_have_no_mean_and_a_group_of_equal_rewards_has_none():
    found = advantages_of(np.asarray([1, 0, 0, 1, 1, 1], np.float32), 3)
    np.testing.assert_allclose(found[:3], [2**0.5, -(0.5**0.5), -(0.5**0.5)], rtol=1e-3)
    assert found[3:].tolist() == [0, 0, 0]


# tests/test_live_weights.py has an engine that follows training, tests/test_rollout.py log-probabilities of samples.
@pytest.mark.slow
def test_the_engine_samples_from_each_steps_weights(tmp_path):
    """The trainer's log-probabilities and the rollout's differ by rounding alone, after a step too."""
    save_hf(TINY, init_params(TINY, jax.random.key(0)), tmp_path, dtype="float32")
    shutil.copy(default_model.path() / "tokenizer.json", tmp_path)
    recipe = Recipe(steps=2, samples=4, max_tokens=4, learning_rate=0.1)
    _, history = train(tmp_path, TINY, recipe, prompts=["x = ", "print("])
    assert [entry["version"] for entry in history] == [0, 1]
    assert max(entry["rms"] for entry in history) < 1e-5


@pytest.mark.slow
def test_training_raises_the_reward(tmp_path):
    recipe = Recipe(steps=20, samples=8)
    _, history = train(default_model.path(), SmallLlama(), recipe)
    rewards = [entry["reward"] for entry in history]
    assert np.mean(rewards[-4:]) > np.mean(rewards[:4]) + 0.15
    assert max(entry["rms"] for entry in history) < 1e-5
    write_curve(history, tmp_path / "curve.svg")
    drawn = ElementTree.parse(tmp_path / "curve.svg").getroot()
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"
