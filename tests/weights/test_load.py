"""A checkpoint becomes the parameter tree: right numbers, right dtype, little memory, everything odd refused."""

import re
import threading
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxkv.config.model import ModelConfig
from jaxkv.errors import BadCheckpoint, UnknownConfig
from jaxkv.models.decoder import Decoder
from jaxkv.models.registry import FAMILIES, load_params, rules_for
from jaxkv.weights.rules import HeadPairs, Recipe, Regrouped, expand
from jaxkv.weights.safetensors import StoredTensor
from jaxkv.weights.stored_leaf import Arrangement, StoredLeaf
from tests.weights.host_memory import fits_in

OPTIONS = [
    {},
    {"tie_embeddings": True},
    {"qkv_bias": True, "family": "qwen2"},
    {"qk_norm": True, "family": "qwen3"},
    {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "family": "mistral"},
]


def expected(tensors, config):
    layers = []
    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."

        def part(*names, join=np.concatenate, at=at):
            return join([tensors[at + name] for name in names])

        leaves = {
            "norms": part(
                "input_layernorm.weight", "post_attention_layernorm.weight", join=np.stack
            ),
            "qkv": part(*(f"self_attn.{name}_proj.weight" for name in "qkv")),
            "o": tensors[at + "self_attn.o_proj.weight"],
            "gate_up": part("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            "down": tensors[at + "mlp.down_proj.weight"],
        }
        if config.qkv_bias:
            leaves["qkv_bias"] = part(*(f"self_attn.{name}_proj.bias" for name in "qkv"))
        if config.o_bias:
            leaves["o_bias"] = tensors[at + "self_attn.o_proj.bias"]
        if config.qk_norm:
            names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
            leaves["qk_norm"] = part(*names, join=np.stack)
        if config.mlp_bias:
            leaves["gate_up_bias"] = part("mlp.gate_proj.bias", "mlp.up_proj.bias")
            leaves["down_bias"] = tensors[at + "mlp.down_proj.bias"]
        layers.append(leaves)
    tree = {
        "embed": tensors["model.embed_tokens.weight"],
        "final_norm": tensors["model.norm.weight"],
        "layers": tuple(layers),
    }
    return tree if config.tie_embeddings else tree | {"lm_head": tensors["lm_head.weight"]}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_every_leaf_is_made_of_its_tensors(tmp_path, kit, options, sharded):
    config = kit.replace(kit.CONFIG, **options)
    tensors = kit.checkpoint_tensors(config)
    if sharded:
        kit.write_shards(tmp_path, tensors)
    else:
        kit.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    params = load_params(tmp_path, kit.Toy(config), dtype="float32", progress=False)
    wanted = expected(tensors, config)
    assert jax.tree.structure(params) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_rules_cover_exactly_the_parameters_of_the_decoder(kit, options):
    config: ModelConfig = kit.replace(kit.CONFIG, **options)
    paths, _ = jax.tree_util.tree_flatten_with_path(Decoder(config).param_shapes("bfloat16"))
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="."): shape for path, shape in paths
    }
    recipes = expand(rules_for(config), config)
    assert recipes.keys() == leaves.keys()
    tensors = kit.checkpoint_tensors(config)
    for target, recipe in recipes.items():
        shapes = recipe.source_shapes(leaves[target].shape)
        assert shapes == tuple(tensors[name].shape for name in recipe.sources)


@pytest.mark.parametrize("stored", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wished", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_to_the_wished_dtype(tmp_path, kit, stored, wished):
    tensors = kit.checkpoint_tensors(kit.CONFIG, stored)
    kit.write_raw(tmp_path / "model.safetensors", *kit.layout(tensors))
    params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype=wished, progress=False)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {wished}
    wanted = tensors["model.layers.1.mlp.down_proj.weight"].astype(params["embed"].dtype)
    np.testing.assert_array_equal(np.asarray(params["layers"][1]["down"]), wanted)


def test_tensors_longer_than_a_chunk_arrive_whole(tmp_path, kit, monkeypatch):
    monkeypatch.setattr("jaxkv.weights.safetensors.CHUNK_BYTES", 40)
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    kit.save_file(tensors, tmp_path / "model.safetensors")
    for dtype in ("float32", "float16"):
        params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype=dtype, progress=False)
        wanted = jax.tree.map(lambda leaf: leaf.astype(dtype), expected(tensors, kit.CONFIG))  # noqa: B023
        jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_a_tied_copy_and_rotary_frequencies_are_accepted(tmp_path, kit):
    config = kit.replace(kit.CONFIG, tie_embeddings=True)
    tensors = kit.checkpoint_tensors(config)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.rotary_emb.inv_freq": np.ones(2, np.float32),
        "model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32),
    }
    kit.save_file(tensors | extra, tmp_path / "model.safetensors")
    params = load_params(tmp_path, kit.Toy(config), dtype="float32", progress=False)
    assert "lm_head" not in params


def test_a_tied_copy_that_differs_is_refused(tmp_path, kit, monkeypatch):
    monkeypatch.setattr("jaxkv.weights.safetensors.CHUNK_BYTES", 64)
    config = kit.replace(kit.CONFIG, tie_embeddings=True)
    tensors = kit.checkpoint_tensors(config)
    other = tensors["model.embed_tokens.weight"].copy()
    other[-1, -1] += 1
    kit.save_file(tensors | {"lm_head.weight": other}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="differs from"):
        load_params(tmp_path, kit.Toy(config), dtype="float32", progress=False)


def test_the_order_of_tensors_in_the_file_does_not_matter(tmp_path, kit):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    wanted = expected(tensors, kit.CONFIG)
    shuffled = dict(sorted(tensors.items(), key=lambda item: item[1].sum()))
    kit.write_raw(tmp_path / "model.safetensors", *kit.layout(shuffled))
    params = load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)


def test_the_bar_is_on_stderr_and_only_if_wished(tmp_path, kit, capfd):
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), tmp_path / "model.safetensors")
    load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    assert capfd.readouterr() == ("", "")
    load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "loading weights: 100%" in err


def test_parameters_go_to_the_wished_device(tmp_path, kit):
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), tmp_path / "model.safetensors")
    device = jax.devices()[-1]
    params = load_params(
        tmp_path, kit.Toy(kit.CONFIG), dtype="float32", device=device, progress=False
    )
    assert {leaf.device for leaf in jax.tree.leaves(params)} == {device}


def test_reading_holds_one_leaf_beside_the_parameters(tmp_path, kit, monkeypatch):
    layers = 32
    config = kit.replace(
        kit.CONFIG, ffn_size=16384, num_layers=layers, windows=(None,) * layers, pattern=()
    )
    monkeypatch.setitem(kit.Toy.param_shapes.__globals__, "FFN", 16384)
    monkeypatch.setattr("jaxkv.weights.safetensors.CHUNK_BYTES", 2**16)
    # JAX would keep the memory itself as the parameter of a CPU.
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, device: jax.numpy.copy(put(x, device)))
    tensors = kit.checkpoint_tensors(config)
    kit.save_file(tensors, tmp_path / "model.safetensors")
    largest = 2 * 16384 * config.hidden_size * 4
    monkeypatch.setattr("jaxkv.weights.staging.MOST_IN_FLIGHT", largest)
    assert sum(tensor.nbytes for tensor in tensors.values()) > 40 * largest
    del tensors

    def load():
        load_params(tmp_path, kit.Toy(config), dtype="float32", progress=False)

    assert fits_in(8 * largest, load)


class Ones(StoredTensor):
    """A tensor that is read without memory of its own."""

    def read(self, target, first=0):
        target.fill(1.0)


@pytest.mark.parametrize(
    ("shape", "source", "combine", "options"),
    [
        ((256, 512), (256, 512), "copy", {}),
        ((256, 512), (256, 512), "copy", {"pairs": HeadPairs(256, 16, 16)}),
        ((256, 512), (256, 512), "copy", {"regroup": Regrouped(8, (16, 16), (1, 0))}),
        ((8, 16, 512), (256, 512), "select", {"regroup": Regrouped(8, (16, 16), (1,))}),
        ((512, 256), (256, 512), "transpose", {}),
        ((4, 512, 64), (4, 64, 512), "deinterleave_transpose", {}),
    ],
    ids=["copy", "pairs", "regroup", "select", "transpose", "deinterleave"],
)
def test_a_leaf_counts_for_the_memory_that_reading_it_takes(
    tmp_path, shape, source, combine, options
):
    with (tmp_path / "x").open("w+b") as file:
        tensor = Ones("x", "F32", source, 0, 0, file, tmp_path / "x")
    arrangement = Arrangement(shape, source[0], combine, **options)
    leaf = StoredLeaf("x", np.dtype(np.float32), (tensor,), arrangement)
    tracemalloc.start()
    read = leaf.read()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert read.shape == shape
    assert read.nbytes <= most <= leaf.host_bytes + 2**14


def test_the_first_damaged_leaf_is_named_and_ends_the_loading(tmp_path, kit, monkeypatch):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    names = [name for name in tensors if name.endswith("o_proj.weight")]
    for name in names:
        tensors[name] = np.full_like(tensors[name], np.nan)
    kit.save_file(tensors, tmp_path / "model.safetensors")
    before = {thread.name for thread in threading.enumerate()}
    for room in (1, 2**30):
        monkeypatch.setattr("jaxkv.weights.staging.MOST_IN_FLIGHT", room)
        with pytest.raises(BadCheckpoint, match=re.escape(min(names)) + ".*NaN"):
            load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    assert {thread.name for thread in threading.enumerate()} <= before


def test_a_family_without_rules_and_a_dtype_nobody_knows_are_named(tmp_path, kit):
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), tmp_path / "model.safetensors")
    odd = kit.replace(kit.CONFIG, family="gpt2")
    with pytest.raises(UnknownConfig, match="'gpt2'; known are llama"):
        load_params(tmp_path, kit.Toy(odd), dtype="float32", progress=False)
    with pytest.raises(ValueError, match="one of float32, bfloat16, float16, got 'auto'"):
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="auto", progress=False)


def test_all_families_of_issue_2_have_rules():
    assert {"llama", "mistral", "qwen2", "qwen3"} <= FAMILIES.keys()


def test_a_recipe_splits_a_leaf_by_its_rows():
    recipe = Recipe("x", ("a", "b"), "concat", (3, 4))
    assert recipe.source_shapes((7, 2)) == ((3, 2), (4, 2))
    with pytest.raises(AssertionError):
        recipe.source_shapes((8, 2))


def test_a_cache_snapshot_made_of_links_is_read(tmp_path, kit):
    # The layout in which huggingface_hub keeps what it has downloaded.
    blobs, snapshot = (
        tmp_path / "models--a--b" / "blobs",
        tmp_path / "models--a--b/snapshots/c0ffee",
    )
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), blobs / "0123abcd")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123abcd")
    params = load_params(snapshot, kit.Toy(kit.CONFIG), dtype="float32", progress=False)
    assert params["embed"].shape == (11, 6)
