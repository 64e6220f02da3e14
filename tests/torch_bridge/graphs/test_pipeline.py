"""A pipeline of Transformers with a `JaxkvCache`: the texts of one without, from replayed decode steps."""

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

from jaxkv import default_model
from tests.torch_bridge.graphs.frozen import FrozenRecorder
from tests.torch_bridge.tiny import check
from torch_bridge import JaxkvCache

pytestmark = [pytest.mark.torch, pytest.mark.slow]
PROMPTS = ("class Stack:\n    def ", "import ")


def test_texts_are_those_of_a_pipeline_without_the_cache(monkeypatch):
    monkeypatch.setattr(
        "torch_bridge.transformers_cache.cache.recorder_for", lambda device: FrozenRecorder()
    )
    folder = default_model.path()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), padding_side="left"
    )
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    write = pipeline("text-generation", model=model, tokenizer=tokenizer)
    options = {"max_new_tokens": 12, "do_sample": False}
    wanted = [write(prompt, **options) for prompt in PROMPTS]
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=512)
    for prompt, text in zip(PROMPTS, wanted, strict=True):
        assert write(prompt, **options, past_key_values=cache) == text
        cache.reset()
    together = write(list(PROMPTS), **options, past_key_values=cache, batch_size=2)
    assert together == wanted
    assert cache.stats().why_not_replayed is None
    assert cache.stats().steps_replayed > 20
    check(cache)
