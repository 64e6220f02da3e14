"""Tiny random Transformers models and prompts for them, in float32 on the CPU by default."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from torch_bridge import lease

VOCAB = 96
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    # Large enough that logits differ by whole units, so that the best token leads by more than rounding.
    "initializer_range": 0.15,
}
_KINDS = ["sliding_attention", "full_attention"]
_MODELS = {
    "llama": lambda **more: LlamaForCausalLM(LlamaConfig(**{**_SIZES, **more})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=7)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_SIZES, sliding_window=9, layer_types=_KINDS)
    ),
}
FAMILIES = tuple(_MODELS)


def tiny_model(family="llama", seed=0, **more):
    """Returns a model whose greedy tokens differ from one another; a Llama takes more settings."""
    torch.manual_seed(seed)
    return _MODELS[family](**more).eval()


def prompts(rows, columns, pads=(), seed=1):
    """Returns ids and mask; row r begins with `pads[r]` columns of padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, columns), generator=generator)
    mask = torch.ones_like(ids)
    for row, pad in enumerate(pads):
        ids[row, :pad] = 0
        mask[row, :pad] = 0
    return ids, mask


def greedy(model, ids, mask, count, **options):
    """Returns the ids and `count` more."""
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
    )


def check(cache):
    """Asserts that allocator, index and pool of a `JaxkvCache` agree, and that no lease is open."""
    cache._store.allocator.check()
    cache._store.index.check()
    assert not cache.owner.poisoned
    assert not cache.owner.borrower


MARK = 7.0


def mark_last_page(cache, tokens):
    """Overwrites the last slot of a kept page which a prompt that is found whole shares; returns the page's id."""
    index = cache._store.index
    match = index.match(tokens, index.keys())
    assert match.num_tokens == len(tokens) - 1
    [pages] = match.pages.values()
    with lease(cache) as views:
        for name in views:
            views[name][pages[-1], -1] = MARK
        views.commit()
    return pages[-1]


def is_marked(cache, page):
    """Whether the last slot of a page is as `mark_last_page` left it, in all layers."""
    with lease(cache, write=False) as views:
        return all(bool((views[name][page, -1] == MARK).all()) for name in views)
