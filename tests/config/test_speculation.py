"""Options of speculation, under our names and vLLM's."""

from pathlib import Path

import pytest

from jaxkv import EngineConfig, SpeculationConfig
from jaxkv.config.engine import merge_configs


def test_the_options_are_the_same_under_the_names_of_vllm():
    wanted = SpeculationConfig(tokens=5, longest_ngram=3, shortest_ngram=1)
    theirs = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    for engine in (
        EngineConfig(speculation=wanted),
        merge_configs(None, None, {}, (), speculation=wanted)[1],
        merge_configs(None, None, {"speculative_config": theirs}, ())[1],
    ):
        assert engine.speculation == wanted
    assert merge_configs(None, None, {}, ())[1].speculation is None


def test_a_model_drafts_unless_another_method_is_named():
    theirs = {"model": "org/small", "num_speculative_tokens": 3}
    wanted = SpeculationConfig(method="draft_model", model="org/small", tokens=3)
    assert EngineConfig(speculation=theirs).speculation == wanted
    assert SpeculationConfig(model=Path("folder")).model == "folder"
    assert SpeculationConfig().method == "ngram"


def test_heads_have_the_names_of_vllm_too():
    theirs = {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 2}
    assert EngineConfig(speculation=theirs).speculation == SpeculationConfig(
        method="eagle3", model="org/head", tokens=2
    )
    for method in ("mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp", "qwen3_5_mtp"):
        assert SpeculationConfig(method=method) == SpeculationConfig(method="mtp")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle"}, "method must be one of ngram, draft_model, eagle3, mtp, got 'eagle'"),
        ({"method": "draft_model"}, "need the model that drafts"),
        ({"method": "eagle3"}, "draft_model and eagle3 need the model that drafts"),
        ({"method": "ngram", "model": "folder"}, "method='ngram' and model='folder'"),
        ({"method": "deepseek_mtp", "model": "folder"}, "method='mtp' and model='folder'"),
        ({"model": 3}, "model must be a directory or a hub id, got 3"),
        ({"tokens": 0}, r"tokens must be an int in \[1, 31\], got 0"),
        ({"shortest_ngram": 5}, "at most longest_ngram, got 5 and 4"),
        ({"token": 3}, "the closest is tokens"),
        ({"adaptive": 1}, "adaptive must be True or False, got 1"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(**options)
    with pytest.raises(ValueError, match=message):
        EngineConfig(speculation=options)


def test_what_excludes_speculation_is_refused():
    with pytest.raises(ValueError, match="pinned_shapes and speculation exclude one another"):
        EngineConfig(pinned_shapes=True, speculation=SpeculationConfig())
    with pytest.raises(ValueError, match="must be a SpeculationConfig, got 4"):
        EngineConfig(speculation=4)
    both = EngineConfig(speculation=SpeculationConfig())
    with pytest.raises(ValueError, match="speculation is given twice"):
        merge_configs(None, both, {}, (), speculation=SpeculationConfig())
    with pytest.raises(ValueError, match="no option 'num_speculative_tokens'"):
        merge_configs(None, None, {"num_speculative_tokens": 3}, ("speculation",))
