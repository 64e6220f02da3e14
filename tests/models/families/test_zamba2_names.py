"""Zamba2 in the layout of Zyphra's own code, in which most of its models were published first, loads too."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import build_model, load_params, read_config, rules_for
from jaxkv.weights.rules import expand

# Kinds of layers, and other keys, are named as in Zyphra's first files.
RAW = {
    "add_bias_linear": False,
    "architectures": ["Zamba2ForCausalLM"],
    "conv_dimension": 4,
    "expansion_factor": 2,
    "ffn_hidden_size": 64,
    "ft_lora": False,
    "gated_linear_unit": True,
    "hidden_size": 16,
    "kv_channels": 4,
    "layers_block_type": ["m", "g", "m", "g", "g"],
    "lora_rank": 3,
    "mamba_headdim": 8,
    "mamba_ngroups": 1,
    "max_position_embeddings": 64,
    "model_type": "zamba2",
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_mem_blocks": 2,
    "num_query_groups": 4,
    "state_size": 8,
    "use_mem_rope": True,
    "use_shared_attention_lora": True,
    "use_shared_block_lora": True,
    "vocab_size": 32,
}
USES = (1, 3, 4)
"""Layers with a transformer block; the first and the last have the first block."""


def older(name):
    """Returns the name that a tensor of the newer layout has in the older one."""
    start, _, rest = name.partition("model.layers.")
    if start or not rest:
        return name
    layer, _, rest = rest.partition(".")
    if rest == "linear.weight":
        return f"model.linear_layers.{USES.index(int(layer))}.weight"
    if not rest.startswith("shared_transformer."):
        return f"model.mamba_layers.{layer}.{rest}"
    part = rest.removeprefix("shared_transformer.")
    for new, old in (("gate_up_proj", "linear_fc1"), ("down_proj", "linear_fc2")):
        part = part.replace(new, old)
    if "_adapter_list." in part:
        what, _, numbers = part.removesuffix(".weight").partition("_adapter_list.")
        use, half = numbers.split(".")
        part = f"{what}_lora_{'AB'[int(half)]}_list.{use}.weight"
    return f"model.blocks.{USES.index(int(layer))}.{part}"


@pytest.fixture
def checkpoint():
    """Returns the config and the tensors by their newer names."""
    config = read_config(RAW)
    rng = np.random.default_rng(3)
    recipes = expand(rules_for(config), config)
    leaves, _ = jax.tree_util.tree_flatten_with_path(build_model(config).param_shapes("float32"))
    tensors = {}
    for path, leaf in leaves:
        recipe = recipes[jax.tree_util.keystr(path, simple=True, separator=".")]
        for name, shape in zip(recipe.sources, recipe.source_shapes(leaf.shape), strict=True):
            tensors[name] = rng.standard_normal(shape).astype(np.float32)
    return config, tensors


def load(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RAW))
    save_file(tensors, folder / "model.safetensors")
    return load_params(folder, build_model(config), dtype="float32", progress=False)


def test_zyphras_first_keys_are_the_model_of_the_newer_ones():
    newer = {
        "m": "mamba",
        "g": "hybrid",
        "conv_dimension": "mamba_d_conv",
        "expansion_factor": "mamba_expand",
        "ffn_hidden_size": "intermediate_size",
        "lora_rank": "adapter_rank",
        "state_size": "mamba_d_state",
        "use_shared_attention_lora": "use_shared_attention_adapter",
        "use_shared_block_lora": "use_shared_mlp_adapter",
    }
    raw = {newer.get(key, key): value for key, value in RAW.items()}
    raw["layers_block_type"] = [newer[kind] for kind in RAW["layers_block_type"]]
    assert read_config(raw) == read_config(RAW)
    assert read_config(RAW).owners == (0, 1, 2, 3, 1)


def test_the_older_layout_has_the_same_parameters(tmp_path, checkpoint):
    config, tensors = checkpoint
    names = {name: older(name) for name in tensors}
    assert len(set(names.values())) == len(names)
    assert "model.blocks.1.self_attn.linear_q_lora_A_list.1.weight" in names.values()
    assert "model.blocks.0.feed_forward.linear_fc1_lora_B_list.2.weight" in names.values()
    stored = {names[name]: tensor for name, tensor in tensors.items()}
    # Zyphra's blocks have adapters for all layers with a block, and its code does not use these.
    for part in ("self_attn.linear_v", "feed_forward.linear_fc1"):
        stored[f"model.blocks.0.{part}_lora_A_list.1.weight"] = np.ones((3, 16), np.float32)
    wanted = load(tmp_path / "newer", config, tensors)
    got = load(tmp_path / "older", config, stored)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.parametrize(
    "name",
    [
        "model.blocks.2.input_layernorm.weight",
        "model.blocks.0.feed_forward.linear_fc3.weight",
        "model.linear_layers.3.weight",
        "model.mamba_layers.5.input_layernorm.weight",
        "model.mamba_layers.0.mamba.in_proj.1.weight",
    ],
)
def test_a_tensor_that_the_older_layout_has_not_is_refused(tmp_path, checkpoint, name):
    config, tensors = checkpoint
    stored = {older(known): tensor for known, tensor in tensors.items()}
    with pytest.raises(BadCheckpoint, match="no use for"):
        load(tmp_path / "model", config, stored | {name: np.ones((4, 4), np.float32)})


def test_a_checkpoint_in_both_layouts_is_refused(tmp_path, checkpoint):
    config, tensors = checkpoint
    stored = tensors | {older("model.layers.0.mamba.D"): tensors["model.layers.0.mamba.D"]}
    with pytest.raises(BadCheckpoint, match="two names of one tensor"):
        load(tmp_path / "model", config, stored)
