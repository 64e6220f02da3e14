"""vLLM's names of options: accepted where jaxkv has the option, and refused with one sentence where it does not."""

import re
from pathlib import Path

import pytest

from jaxkv import LLM, CacheConfig, EngineConfig, SamplingParams
from jaxkv.config.engine import merge_configs
from jaxkv.config.vllm_names import ALIASES

README = Path(__file__).parents[2] / "README.md"
CONFIGS = {"CacheConfig": CacheConfig, "EngineConfig": EngineConfig}
VALUES = {
    "kv_cache_dtype": "int8",
    "gpu_memory_utilization": 0.5,
    "enable_prefix_caching": False,
    "batch_invariant": True,
}


@pytest.mark.parametrize("alias", [alias for alias in ALIASES if alias.owner in CONFIGS])
def test_a_name_of_vllm_sets_the_field_of_ours(alias):
    kind, value = CONFIGS[alias.owner], VALUES.get(alias.theirs, 32)
    assert kind(**{alias.theirs: value}) == kind(**{alias.ours: value})
    cache, engine = merge_configs(
        CacheConfig(full_hits=False), EngineConfig(overlap=False), {alias.theirs: value}, ()
    )
    assert getattr({"CacheConfig": cache, "EngineConfig": engine}[alias.owner], alias.ours) == value
    assert not cache.full_hits
    assert not engine.overlap


def test_the_table_in_the_readme_is_the_table_in_code():
    [table] = re.findall(r"^\| In vLLM .*?\n\n", README.read_text(), re.DOTALL | re.MULTILINE)
    shown = re.findall(r"^\| `(\w+)` \| `(?:(\w+)\()?(\w+)", table, re.MULTILINE)
    assert shown == [
        (alias.theirs, "" if alias.owner == "call" else alias.owner, alias.ours)
        for alias in ALIASES
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LLM(num_seqs=4), "the closest is max_num_seqs"),
        (lambda: LLM(temperature=0), r"the closest is SamplingParams\(temperature=\.\.\.\)"),
        (lambda: LLM(zzz=0), "its options are model, revision, dtype, .*, speculative_config$"),
        (lambda: LLM(page_size=4), r"the closest is cache=CacheConfig\(page_size=\.\.\.\)"),
        (lambda: LLM(max_length=4), "the closest is max_model_len"),
        (lambda: LLM(trust_remote_code=True), "nothing in a model directory is executed"),
        (lambda: LLM(sampling_params=None), "no option 'sampling_params'"),
        (lambda: LLM(load_format="gguf"), "one of auto, safetensors, dummy, got 'gguf'"),
        (lambda: LLM(seed=2**64), "seed must be an int"),
        (lambda: SamplingParams(max_new_tokens=4), "the closest is max_tokens"),
        (lambda: SamplingParams(best_of=1), "n samples"),
        (lambda: LLM(download_dir="/models"), "HF_HUB_CACHE chooses the folder"),
        (lambda: LLM(hf_token="hf_x"), "set HF_TOKEN"),
        (lambda: LLM(generation_config="vllm"), r"llm\.get_default_sampling_params\(\)"),
        (lambda: SamplingParams(allowed_token_ids=[1]), "a logit_bias of 100"),
        (lambda: SamplingParams(detokenize=False), "outputs have text and token_ids"),
        (lambda: SamplingParams(output_kind="delta"), "stream yields what is new"),
        (lambda: SamplingParams(truncate_prompt_tokens=9), "prompts are never cut"),
        (lambda: SamplingParams(zzz=1), "its options are temperature, top_k"),
        (lambda: SamplingParams(0.5), r"by name, such as temperature=\.\.\.; got 0\.5"),
        (lambda: CacheConfig(blocksize=4), "the closest is block_size"),
        (lambda: CacheConfig(block_size=4, page_size=4), "one option of CacheConfig"),
        (lambda: EngineConfig(max_batched_tokens=4), "the closest is max_num_batched_tokens"),
    ],
)
def test_what_has_no_meaning_here_is_refused_in_a_sentence_that_names_ours(make, message):
    with pytest.raises(ValueError, match=message) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("encode", r"llm\.tokenizer\.encode\(text\)"), ("beam_search", "n=.* returns n samples")],
)
def test_a_method_that_only_vllm_has_is_answered_with_ours(name, hint):
    llm = object.__new__(LLM)
    with pytest.raises(AttributeError, match=f"'LLM' object has no attribute '{name}': .*{hint}"):
        getattr(llm, name)
    assert not hasattr(llm, name)
    with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'zzz'$"):
        _ = llm.zzz
