"""Models that `JaxkvCache` supports; others are refused before any computation, with the reason."""

import pytest
import torch
import transformers

from pallas_kernels.dispatch import Unsupported
from tests.torch_bridge.tiny import check, greedy, prompts, tiny_model
from tests.torch_bridge.transformers_cache.families import model_of
from torch_bridge import JaxkvCache

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def bert(**options):
    return transformers.BertLMHeadModel(transformers.BertConfig(**SIZES, **options))


def decoder_of(name, **options):
    """Returns a function that makes a BERT-like model as a decoder."""
    config = getattr(transformers, f"{name}Config")
    model = getattr(transformers, f"{name}ForCausalLM")
    return lambda: model(config(**SIZES, is_decoder=True, **options))


def gemma(**options):
    config = transformers.GemmaConfig(**SIZES, num_key_value_heads=2, head_dim=8, **options)
    return transformers.GemmaForCausalLM(config)


def llama_that_sees_both_ways():
    model = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    return model


def llama_with_a_config_that_is_not_causal():
    model = tiny_model("llama")
    model.config.is_causal = False
    return model


def rwkv():
    config = transformers.RwkvConfig(
        vocab_size=96, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2
    )
    return transformers.RwkvForCausalLM(config)


def openai_gpt():
    return transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    )


def cpmant():
    config = transformers.CpmAntConfig(
        vocab_size=96,
        hidden_size=32,
        num_attention_heads=4,
        dim_head=8,
        dim_ff=48,
        num_hidden_layers=2,
    )
    return transformers.CpmAntForCausalLM(config)


def gpt_neox_japanese():
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return transformers.GPTNeoXJapaneseForCausalLM(transformers.GPTNeoXJapaneseConfig(**sizes))


def doge():
    return transformers.DogeForCausalLM(transformers.DogeConfig(**SIZES))


def recurrent_gemma():
    config = transformers.RecurrentGemmaConfig(
        **SIZES, block_types=["recurrent", "attention"], lru_width=32
    )
    return transformers.RecurrentGemmaForCausalLM(config)


def prophetnet():
    config = transformers.ProphetNetConfig(
        vocab_size=96,
        hidden_size=32,
        num_decoder_layers=2,
        num_encoder_layers=1,
        num_decoder_attention_heads=4,
        num_encoder_attention_heads=4,
        is_encoder_decoder=False,
    )
    return transformers.ProphetNetForCausalLM(config)


def xlstm():
    config = transformers.xLSTMConfig(
        vocab_size=96, hidden_size=32, num_heads=4, num_hidden_layers=2
    )
    return transformers.xLSTMForCausalLM(config)


def diffllama():
    config = transformers.DiffLlamaConfig(**SIZES, num_key_value_heads=2, head_dim=8)
    return transformers.DiffLlamaForCausalLM(config)


def jetmoe():
    sizes = {name: size for name, size in SIZES.items() if name != "num_attention_heads"}
    config = transformers.JetMoeConfig(
        **sizes, num_key_value_heads=2, kv_channels=8, num_local_experts=4, num_experts_per_tok=2
    )
    return transformers.JetMoeForCausalLM(config)


def deepseek_v3():
    return model_of("deepseek_v3")


def deepseek_v32():
    config = transformers.DeepseekV32Config(
        **{**SIZES, "bos_token_id": 0}, moe_intermediate_size=16, n_routed_experts=4, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_group=1, topk_group=1,
        num_experts_per_tok=2, index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    return transformers.DeepseekV32ForCausalLM(config)


def hrm_text():
    return transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**SIZES))


@pytest.mark.parametrize(
    ("make", "setting"),
    [
        (bert, "is_decoder=False in BertLayer"),
        (lambda: gemma(use_bidirectional_attention=True), "use_bidirectional_attention=True in"),
        (llama_that_sees_both_ways, "is_causal=False in LlamaAttention"),
        (llama_with_a_config_that_is_not_causal, "is_causal=False in its config"),
    ],
)
def test_models_that_are_not_causal_are_refused(make, setting):
    with pytest.raises(Unsupported, match=rf"is not causal \({setting}.*depend on later tokens"):
        JaxkvCache(make())


def test_a_bert_made_as_a_decoder_reuses_prefixes():
    model = bert(is_decoder=True).eval()
    ids, mask = prompts(1, 40)
    cache = JaxkvCache(model, max_tokens=256)
    other, _ = prompts(1, 40, seed=2)
    other[:, :34] = ids[:, :34]
    greedy(model, ids, mask, 4, past_key_values=cache)
    cache.reset()
    wanted = greedy(model, other, mask, 4)
    assert torch.equal(greedy(model, other, mask, 4, past_key_values=cache), wanted)
    assert cache.stats().tokens_reused == 32


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (decoder_of("BigBird", attention_type="original_full"), "attends to later tokens"),
        (decoder_of("MegatronBert"), "attends to later tokens"),
        (decoder_of("RemBert"), "attends to later tokens"),
        (decoder_of("RoFormer"), "attends to later tokens"),
        (rwkv, "takes no cache: its forward has none of the arguments past_key_values"),
        (openai_gpt, "takes no cache"),
        (cpmant, "puts a prompt of its own before the tokens"),
        (gpt_neox_japanese, "takes keys as one contiguous array"),
        (doge, "attends to later tokens where no mask is made"),
        (recurrent_gemma, "keeps the states of its recurrent layers in its modules"),
        (prophetnet, "keeps the keys of several streams of tokens"),
        (xlstm, "has no num_attention_heads"),
        (deepseek_v32, "layer 0 is deepseek_sparse_attention of DeepseekV32Config"),
    ],
)
def test_models_that_pages_cannot_serve_are_refused_when_the_cache_is_made(make, why):
    with pytest.raises(Unsupported, match=why):
        JaxkvCache(make())


@pytest.mark.parametrize("make", [deepseek_v3, diffllama, hrm_text, jetmoe])
def test_models_that_change_their_keys_are_refused_attention_over_pages_and_nothing_else(make):
    torch.manual_seed(0)
    model = make().eval()
    ids, mask = prompts(2, 20, (3, 0))
    cache = JaxkvCache(model, max_tokens=256)
    wanted = greedy(model, ids, mask, 4)
    model.set_attn_implementation("jaxkv")
    for refused in (lambda: JaxkvCache(model), lambda: model(ids, past_key_values=cache)):
        with pytest.raises(Unsupported, match=r'than it gave the cache.*implementation\("sdpa"\)'):
            refused()
    model.set_attn_implementation("sdpa")
    assert torch.equal(greedy(model, ids, mask, 4, past_key_values=cache), wanted)
    check(cache)


@pytest.mark.parametrize("changed", [0, 1])
def test_attention_over_pages_refuses_other_keys_or_values_than_were_kept(changed, monkeypatch):
    model = tiny_model("llama")
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=256)
    update = type(cache.layers[0]).update

    def double_one(self, *given):
        kept = list(update(self, *given))
        kept[changed] = kept[changed] * 2
        return tuple(kept)

    monkeypatch.setattr(type(cache.layers[0]), "update", double_one)
    ids, mask = prompts(1, 12)
    with pytest.raises(ValueError, match="LlamaAttention attends to other keys or values than"):
        greedy(model, ids, mask, 2, past_key_values=cache)


@pytest.mark.parametrize("alibi", [False, True])
def test_falcon_with_one_head_of_keys_gives_the_tokens_of_transformers(alibi):
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    config = transformers.FalconConfig(**sizes, multi_query=True, alibi=alibi)
    model = transformers.FalconForCausalLM(config).eval()
    ids, mask = prompts(2, 40, (3, 0))
    cache = JaxkvCache(model, max_tokens=256)
    wanted = greedy(model, ids, mask, 6)
    for _ in range(2):
        assert torch.equal(greedy(model, ids, mask, 6, past_key_values=cache), wanted)
        cache.reset()
    assert cache.stats().tokens_reused > 0


def test_a_model_that_denies_caches_is_told_of_use_cache():
    config = transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=96, max_seq_len=64
    )
    torch.manual_seed(0)
    model = transformers.MptForCausalLM(config).eval()
    ids, mask = prompts(2, 20, (3, 0))
    cache = JaxkvCache(model, max_tokens=256)
    with pytest.raises(ValueError, match=r"pass use_cache=True to generate\(\)"):
        greedy(model, ids, mask, 4, past_key_values=cache)
    wanted = greedy(model, ids, mask, 4)
    got = greedy(model, ids, mask, 4, past_key_values=cache, use_cache=True)
    assert torch.equal(got, wanted)
