"""A torch model's weights as jaxkv parameters: shared memory, equal tokens, and refusals that name the copies."""

import jax
import numpy as np
import pytest
import torch
import transformers

import jaxkv
from jaxkv.models.registry import build_model, read_config
from tests.torch_bridge.tiny import greedy, prompts, tiny_model
from torch_bridge import NotZeroCopy
from torch_bridge.weights import share_params

pytestmark = pytest.mark.torch


def ours(model):
    raw = model.config.to_dict() | {"architectures": [type(model).__name__]}
    raw.pop("dtype", None)
    return build_model(read_config(raw))


def spans(params):
    return {
        (a.unsafe_buffer_pointer(), a.unsafe_buffer_pointer() + a.nbytes)
        for a in jax.tree.leaves(params)
    }


@pytest.fixture
def llama():
    return tiny_model("llama")


def test_what_lies_apart_in_torch_is_refused_by_name(llama):
    with pytest.raises(
        NotZeroCopy,
        match=r"6 of 13 parameters cannot be shared.*layers\.0\.qkv: .*q_proj.*copy=True",
    ):
        share_params(llama, ours(llama))


def test_with_a_copy_of_the_joint_ones_both_see_one_memory(llama):
    ids, mask = prompts(1, 9)
    wanted = greedy(llama, ids, mask, 8)
    params = share_params(llama, ours(llama), copy=True)
    held = spans(params)
    for name, weight in llama.named_parameters():
        start, end = weight.data_ptr(), weight.data_ptr() + weight.numel() * 4
        assert any(low <= start and end <= high for low, high in held), name
    assert torch.equal(greedy(llama, ids, mask, 8), wanted)
    sampling = jaxkv.SamplingParams(temperature=0.0, max_tokens=8)
    out = jaxkv.generate(params, ours(llama), [ids[0].tolist()], sampling=sampling)
    assert np.asarray(out.tokens)[0].tolist() == wanted[0, 9:].tolist()
    # Once joined, nothing is left to copy.
    assert spans(share_params(llama, ours(llama))) == held


def test_a_state_dict_is_left_as_it_is(llama):
    state = llama.state_dict()
    before = {name: tensor.data_ptr() for name, tensor in state.items()}
    params = share_params(state, ours(llama), copy=True)
    assert {name: tensor.data_ptr() for name, tensor in llama.state_dict().items()} == before
    assert params["embed"].unsafe_buffer_pointer() == before["model.embed_tokens.weight"]


def test_missing_mixed_and_misshapen_weights_are_refused(llama):
    state = dict(llama.state_dict())
    model = ours(llama)
    for change, message in (
        ({"lm_head.weight": None}, "lack 'lm_head.weight'"),
        ({"lm_head.weight": state["lm_head.weight"].half()}, "must share one dtype"),
        (
            {"lm_head.weight": state["lm_head.weight"][:, :8]},
            r"has shape \[96, 8\], wanted \[96, 32\]",
        ),
    ):
        changed = {name: tensor for name, tensor in (state | change).items() if tensor is not None}
        with pytest.raises(ValueError, match=message):
            share_params(changed, model, copy=True)


def test_a_family_whose_weights_are_changed_on_the_way_is_refused():
    # Norms of Gemma hold one less than what they multiply by.
    gemma = tiny_model("gemma3")
    with pytest.raises(ValueError, match=r"final_norm is made of .*cannot be shared.*load_params"):
        share_params(gemma, ours(gemma), copy=True)


def test_rotary_pairs_that_are_interleaved_in_torch_are_refused():
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    glm = transformers.GlmForCausalLM(transformers.GlmConfig(**sizes, pad_token_id=None))
    with pytest.raises(ValueError, match=r"layers.0.qkv.* is made of .*cannot be shared"):
        share_params(glm, ours(glm), copy=True)


def test_quantised_weights_are_refused_by_name():
    llama = tiny_model("llama")
    state = llama.state_dict() | {"model.layers.0.mlp.up_proj.qweight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"are quantised \(model.*qweight\).*jaxkv\.load_model"):
        share_params(state, ours(llama), copy=True)
