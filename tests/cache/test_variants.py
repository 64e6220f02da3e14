"""Shapes, dtypes and bytes of each cache variant."""

import pytest

from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import delta, dsa, gqa, mamba2, mla, place, sampling, short_conv, window


def arrays_of(specs, counts):
    """(role, shape, dtype) of every array, in order."""
    named = group_layers(place(specs)).arrays(counts)
    return [(array.role, array.shape, array.dtype) for array in named]


def test_gqa_keeps_keys_and_values_per_layer():
    """Two layers have four buffers, in our axis order."""
    spec = gqa(2, 32, dtype="bfloat16", page_size=8)
    shape = (5, 8, 2, 32)
    pair = [("key", shape, "bfloat16"), ("value", shape, "bfloat16")]
    assert arrays_of([spec, spec], {"gqa": 5}) == pair + pair


@pytest.mark.parametrize(("name", "stored"), [("fp8", "float8_e4m3fn"), ("int8", "int8")])
def test_a_byte_per_number_adds_one_float32_scale_per_token_and_head(name, stored):
    """The spec has the dtype of the scales."""
    spec = gqa(2, 16, dtype="bfloat16", page_size=8, quantised=name)
    assert spec.codec == name
    assert arrays_of([spec], {"gqa": 3}) == [
        ("key", (3, 8, 2, 16), stored),
        ("value", (3, 8, 2, 16), stored),
        ("key_scale", (3, 8, 2), "float32"),
        ("value_scale", (3, 8, 2), "float32"),
    ]


def test_an_unknown_quantisation_is_refused():
    with pytest.raises(ValueError, match="None or one of 'fp8', 'int8', got 'int3'"):
        gqa(2, 16, dtype="bfloat16", page_size=8, quantised="int3")


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_cache_dtype_may_name_a_quantised_format(name):
    """Code that passes a dtype on needs no other argument for quantised formats."""
    spec = gqa(2, 16, dtype=name, page_size=8)
    assert spec == gqa(2, 16, dtype="bfloat16", page_size=8, quantised=name)
    assert window(2, 16, window=5, dtype=name, page_size=8).arrays == spec.arrays


def test_window_is_gqa_with_a_window():
    spec = window(2, 16, window=100, dtype="float32", page_size=8)
    assert spec.arrays == gqa(2, 16, dtype="float32", page_size=8).arrays
    assert (spec.kind, spec.window) == ("window", 100)
    assert spec.notes == ()


@pytest.mark.parametrize("quantised", [None, "fp8"])
def test_mla_keeps_one_latent_and_no_value_or_scale(quantised):
    """This holds when fp8 is asked for as well, which a note records."""
    spec = mla(512, 64, dtype="bfloat16", page_size=16, quantised=quantised)
    assert arrays_of([spec], {"mla": 3}) == [("key", (3, 16, 1, 576), "bfloat16")]
    assert len(spec.notes) == (quantised is not None)


def test_dsa_keeps_byte_records_whatever_dtype_is_asked_for():
    """They take 656 and 132 bytes per token. The dtype is ignored, which a note records."""
    spec = dsa(512, 64, 128, page_size=32, dtype="bfloat16")
    assert arrays_of([spec], {"dsa": 7}) == [
        ("key", (7, 32, 1, 656), "uint8"),
        ("indexer", (7, 32, 132), "uint8"),
    ]
    assert spec.notes == ("dtype 'bfloat16' was ignored: the records are uint8",)
    assert dsa(512, 64, 128, page_size=32).notes == ()


def test_dsa_refuses_ranks_that_do_not_divide_into_scale_groups():
    with pytest.raises(ValueError, match="multiples of 128, got 500 and 128"):
        dsa(500, 64, 128, page_size=32)


def test_dsa_names_how_scales_are_rounded():
    assert dsa(512, 64, 128, page_size=32).codec == "dsa_fp8"
    assert dsa(512, 64, 128, page_size=32, power_of_two=True).codec == "dsa_fp8_pow2"


def test_plain_dsa_keeps_unquantised_numbers_of_any_size():
    spec = dsa(24, 8, 12, page_size=4, dtype="float32", plain=True)
    assert arrays_of([spec], {"dsa": 2}) == [
        ("key", (2, 4, 1, 32), "float32"),
        ("indexer", (2, 4, 12), "float32"),
    ]
    assert (spec.codec, spec.notes) == (None, ())
    with pytest.raises(ValueError, match="needs a dtype and has no scales"):
        dsa(512, 64, 128, page_size=32, plain=True)


def test_mamba2_keeps_the_convolution_tail_and_a_float32_state():
    spec = mamba2(heads=4, head_dim=8, d_state=16, d_conv=4, groups=2, dtype="bfloat16")
    assert arrays_of([spec], {"mamba2": 3}) == [
        ("conv", (3, 3, 4 * 8 + 2 * 2 * 16), "bfloat16"),
        ("ssm", (3, 4, 8, 16), "float32"),
    ]


def test_delta_keeps_the_convolution_tail_and_a_matrix_per_value_head():
    sizes = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 16, "d_conv": 4}
    spec = delta(**sizes, dtype="bfloat16", state_dtype="bfloat16")
    assert arrays_of([spec], {"delta": 3}) == [
        ("conv", (3, 3, 2 * 2 * 8 + 4 * 16), "bfloat16"),
        ("delta", (3, 4, 8, 16), "bfloat16"),
    ]


def test_the_sampling_group_keeps_only_what_the_features_need():
    assert arrays_of([sampling(11)], {"sampling": 4}) == [("last_token", (4,), "int32")]
    assert arrays_of([sampling(11, penalties=True, bias_entries=2)], {"sampling": 4}) == [
        ("last_token", (4,), "int32"),
        ("output_counts", (4, 11), "int32"),
        ("prompt_seen", (4, 11), "uint8"),
        ("bias_ids", (4, 2), "int32"),
        ("bias_values", (4, 2), "float32"),
    ]


def test_a_short_convolution_keeps_its_last_inputs():
    spec = short_conv(24, d_conv=3, dtype="bfloat16")
    assert arrays_of([spec], {"short_conv": 5}) == [("conv", (5, 2, 24), "bfloat16")]
    assert (spec.chunk_size, spec.in_place) == (1, False)
