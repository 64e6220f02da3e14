"""Fused kernels on a GPU: the modules' own results, and their use in decode steps, replayed or not."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from tests.torch_bridge.tiny import greedy, prompts
from torch_bridge import JaxkvCache

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


def random(*shape, seed=0):
    torch.manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("rows", [1, 5])
def test_kernels_round_where_the_modules_do(rows):
    from torch_bridge.fused import kernels

    forms = {
        LlamaRMSNorm: kernels.ROUNDED,
        GemmaRMSNorm: kernels.CENTRED,
        Olmo2RMSNorm: kernels.WIDE,
    }
    for width in (64, 128, 3000, 4096):
        for kind, form in forms.items():
            norm = kind(width, 1e-5).to("cuda", torch.bfloat16)
            norm.weight.data.copy_(random(width, seed=1))
            x, residual = random(rows, 1, width, seed=2), random(rows, 1, width, seed=3)
            with torch.no_grad():
                wanted, summed = norm(x), norm(x + residual)
            found = kernels.norm(x, norm.weight.data, 1e-5, form)
            torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
            # Only the order of the sum differs, which moves few results to the next number.
            assert (found != wanted).float().mean() < 0.02
            total, found = kernels.add_and_norm(x, residual, norm.weight.data, 1e-5, form)
            assert torch.equal(total, x + residual)
            torch.testing.assert_close(found, summed, rtol=2**-7, atol=0)
    q, k = random(rows, 1, 8, 128).transpose(1, 2), random(rows, 1, 2, 128).transpose(1, 2)
    for one in {1, rows}:
        cos, sin = random(one, 1, 128, seed=4), random(one, 1, 128, seed=5)
        pairs = zip(
            kernels.rotate(q, k, cos, sin), apply_rotary_pos_emb(q, k, cos, sin), strict=True
        )
        assert all(torch.equal(*pair) for pair in pairs)
    gate, up = 3 * random(rows, 1, 1500, seed=6), random(rows, 1, 1500, seed=7)
    for form, own in (
        (kernels.SILU, torch.nn.SiLU()),
        (kernels.GELU_TANH, torch.nn.GELU(approximate="tanh")),
    ):
        found, wanted = kernels.gate(gate, up, form), own(gate) * up
        torch.testing.assert_close(found, wanted, rtol=2**-6, atol=1e-5)
        assert (found != wanted).float().mean() < 0.02


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_products_are_those_of_torch(rows):
    from torch_bridge.fused import products
    from torch_bridge.fused.linear import _is_product

    for width, sizes in ((4096, (4096, 1024, 1024)), (896, (896, 128)), (14336, (4096,))):
        if not products.is_faster(rows, width, sizes):
            continue
        x = random(rows, width, seed=rows)
        weights = [random(size, width, seed=size) for size in sizes]
        for found, weight in zip(products.products(x, weights), weights, strict=True):
            assert _is_product(found, x, weight)
            torch.testing.assert_close(
                found.float(), x.float() @ weight.float().T, rtol=2**-7, atol=2**-4
            )


def test_every_small_operation_of_a_llama_is_fused_with_and_without_graphs():
    from torch_bridge.fused import checked

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=256,
        intermediate_size=320,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        eos_token_id=None,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    model.set_attn_implementation("jaxkv")
    ids, mask = (one.to("cuda") for one in prompts(1, 30))
    said = []
    for graphs in (False, True):
        cache = JaxkvCache(model, max_tokens=128, graphs=graphs)
        options = {"output_logits": True, "return_dict_in_generate": True}
        said.append(greedy(model, ids, mask, 8, past_key_values=cache, **options))
        assert cache.stats().steps_replayed == (7 if graphs else 0)
        assert cache.stats().why_not_fused is None
    assert torch.equal(said[0].sequences, said[1].sequences)
    assert all(map(torch.equal, said[0].logits, said[1].logits))
    kinds = {kind[0] for kind, why in checked._FOUND.items() if why is None}
    assert kinds == {"norm", "sum and norm", "rotation", "gate", "products"}
