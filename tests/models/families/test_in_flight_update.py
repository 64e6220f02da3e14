"""Weights that change while a text is generated: Transformers' cache, kept over the change, gives the same tokens."""

import pytest

import jaxkv

pytest.importorskip("transformers")

import torch
from transformers import DynamicCache

from jaxkv import LLM, CacheConfig, SamplingParams
from tests.few_programs import few_programs
from tests.torch_bridge.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.torch

NEW = 24


def continued(models, versions, prompt):
    """Returns the greedy tokens of one text whose token i is sampled by `models[versions[i]]`, over one cache."""
    cache, ids, tokens = DynamicCache(), torch.tensor([prompt]), []
    for version in versions:
        with torch.no_grad():
            logits = models[version](ids, past_key_values=cache, use_cache=True).logits[0, -1]
        tokens.append(int(logits.argmax()))
        ids = torch.tensor([[tokens[-1]]])
    return tokens


@pytest.mark.parametrize("family", ["gemma3", pytest.param("llama", marks=pytest.mark.slow)])
def test_tokens_after_an_update_see_the_old_keys_and_the_new_weights(family, tmp_path):
    models = [tiny_model(family, seed) for seed in (0, 1)]
    loaded = []
    for version, model in enumerate(models):
        folder = tmp_path / str(version)
        model.save_pretrained(folder)
        loaded.append(jaxkv.load_model(folder, dtype="float32"))
    (first, decoder), (second, _) = loaded
    llm = LLM.from_parts(
        decoder,
        first,
        eos_ids=[],
        cache=CacheConfig(max_sequences=2, page_size=8),
        max_model_len=64,
        progress=False,
    )
    few_programs(llm)
    prompt = torch.randint(3, VOCAB, (13,), generator=torch.Generator().manual_seed(2)).tolist()
    pieces = []
    for piece in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=NEW)):
        pieces.append(piece)
        if len(pieces) == 7:
            llm.update_weights(second)
    versions = [piece.weight_version for piece in pieces]
    tokens = [piece.token_id for piece in pieces]
    assert sorted(set(versions)) == [0, 1]
    assert tokens == continued(models, versions, prompt)
    assert tokens != continued(models, [0] * NEW, prompt)
    assert tokens != continued(models, [1] * NEW, prompt)
