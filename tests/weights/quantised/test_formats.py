"""Each format's numbers are those of its definition, bit by bit, widened on the host and as `FewBits` on the device."""

import jax
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.weights.quantised.config import read_quantised
from jaxkv.weights.quantised.few_bits_leaf import FewBitsLeaf, few_bits_leaf
from jaxkv.weights.quantised.join_scales import with_scales
from jaxkv.weights.quantised.quantised_tensor import QuantisedTensor
from jaxkv.weights.safetensors import open_checkpoint
from jaxkv.weights.staging import fill_leaves
from jaxkv.weights.stored_leaf import Arrangement, LeafPlan
from tests.weights.quantised import definitions
from tests.weights.quantised.definitions import BF16, FILES, WIDE, File


def opened(directory, kit, file):
    (directory / "model.safetensors").unlink(missing_ok=True)
    kit.write_raw(directory / "model.safetensors", *kit.layout(file.tensors))
    return open_checkpoint(directory)


def weight_of(stored, file):
    """Returns the one weight of a file, of whose tensors none is left beside it."""
    joined = with_scales(stored, read_quantised({"quantization_config": file.config}))
    assert list(joined) == ["a.weight"]
    assert isinstance(joined["a.weight"], QuantisedTensor)
    return joined["a.weight"]


def plan_of(*sources):
    rows, columns = sum(one.shape[0] for one in sources), sources[0].shape[1]
    arrangement = Arrangement((rows, columns), sources[0].shape[0], "concat")
    return LeafPlan("a", np.dtype(np.float32), sources, arrangement)


def in_few_bits(*sources):
    """Returns the parameter made of weights below one another, or why it is widened."""
    leaf = few_bits_leaf(plan_of(*sources))
    return (
        leaf
        if isinstance(leaf, str)
        else leaf.joined(fill_leaves(leaf.leaves, None, lambda _: None))
    )


def meant(weight):
    """Returns the weight in the order of the columns of x."""
    wide = np.asarray(weight.widened())
    if weight.order is None:
        return wide
    plain = np.zeros_like(wide)
    plain[:, np.asarray(weight.order)] = wide
    return plain


@pytest.mark.parametrize("name", FILES)
def test_each_number_is_the_one_that_the_definition_gives(tmp_path, kit, name):
    file = FILES[name]
    with opened(tmp_path, kit, file) as stored:
        weight = weight_of(stored, file)
        assert weight.shape == file.means.shape
        rows, columns = weight.shape
        for first, count in ((0, rows), (3, 2), (rows - 1, 1)):
            got = np.empty(count * columns, np.float32)
            weight.read(got, first * columns)
            np.testing.assert_array_equal(got.reshape(count, -1), file.means[first : first + count])
        few = in_few_bits(weight)
    if name in WIDE:
        assert isinstance(few, str)
        assert WIDE[name] in few
        return
    assert few.shape == file.means.shape
    np.testing.assert_array_equal(meant(few), file.means)
    assert len(jax.tree.leaves(few)) == 2 + (few.zeros is not None) + (few.order is not None)


@pytest.mark.parametrize("pieces", [64, 700])
@pytest.mark.parametrize("name", ["packed-4-zeros", "gptq-4-ordered", "awq", "fp8-block"])
def test_rows_that_arrive_in_pieces_are_those_of_the_whole(
    tmp_path, kit, monkeypatch, name, pieces
):
    file = FILES[name]
    with opened(tmp_path, kit, file) as stored:
        leaf = few_bits_leaf(plan_of(weight_of(stored, file)))
        assert isinstance(leaf, FewBitsLeaf)
        for part in leaf.leaves:
            whole = part.read()
            with monkeypatch.context() as patched:
                patched.setattr("jaxkv.weights.quantised.few_bits_leaf.MOST_AT_ONCE", pieces)
                np.testing.assert_array_equal(part.read().view(np.uint8), whole.view(np.uint8))
            step = max(1, pieces // part.row_elements)
            for first in range(0, part.num_rows, step):
                some = np.empty((min(step, part.num_rows - first), part.row_elements), part.dtype)
                part.read_rows(some.reshape(-1), first)
                np.testing.assert_array_equal(
                    some.view(np.uint8), whole[first : first + step].view(np.uint8)
                )


def joined_file(*files):
    """Returns one checkpoint with several weights, "a.weight", "b.weight" and so on."""
    tensors = {
        f"{letter}{name[1:]}": array
        for letter, file in zip("abc", files, strict=False)
        for name, array in file.tensors.items()
    }
    return File(files[0].config, tensors, np.concatenate([file.means for file in files]))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        # Scales and zero points of their own, and groups of which one divides the other.
        ((definitions.packed(8, 128), definitions.packed(5, 128, zeros=True, seed=1)), None),
        (
            (definitions.packed(8, 128, group=64), definitions.packed(5, 128, group=32, seed=1)),
            None,
        ),
        (
            (
                definitions.packed(8, 64),
                definitions.packed(5, 64, scale=np.dtype(np.float16), seed=1),
            ),
            None,
        ),
        ((definitions.packed(8, 64, group=None), definitions.packed(5, 64, group=32)), None),
        ((definitions.gptq(8, 64, ordered=True),) * 2, None),
        (
            (
                definitions.eight_bit(8, 64, shape=()),
                definitions.eight_bit(8, 64, shape=(), seed=1),
            ),
            None,
        ),
        (
            (definitions.gptq(8, 64, ordered=True), definitions.gptq(8, 64, ordered=True, seed=1)),
            "different orders",
        ),
        ((definitions.packed(8, 64), definitions.packed(5, 64, bits=8)), "int4 and int8"),
        (
            (definitions.packed(8, 64, group=16), definitions.packed(5, 64)),
            "scales are of 16 columns",
        ),
    ],
)
def test_fused_weights_with_scales_of_their_own_keep_their_numbers_or_are_widened(
    tmp_path, kit, files, told
):
    file = joined_file(*files)
    with opened(tmp_path, kit, file) as stored:
        joined = with_scales(stored, read_quantised({"quantization_config": file.config}))
        few = in_few_bits(*joined.values())
    if told is not None:
        assert isinstance(few, str)
        assert told in few
        return
    np.testing.assert_array_equal(meant(few), file.means)


def changed(file, name, change):
    return file._replace(tensors=file.tensors | {name: change(file.tensors[name])})


def with_one(array, value, at):
    array = array.copy()
    array.reshape(-1)[at] = value
    return array


def without(file, name):
    return file._replace(
        tensors={other: array for other, array in file.tensors.items() if other != name}
    )


GPTQ, PACKED, AWQ = FILES["gptq-4"], FILES["packed-4-zeros"], FILES["awq"]
NF4, BNB_INT8 = FILES["nf4-nested"], FILES["bnb-int8"]
NF4_STATE = "a.weight.quant_state.bitsandbytes__nf4"
MODELOPT, NVFP4, MXFP4 = FILES["nvfp4-modelopt"], FILES["nvfp4"], FILES["mxfp4"]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (changed(PACKED, "a.weight_packed", lambda a: a[:, :-1]), "not that of 4 or 8 bits"),
        (changed(PACKED, "a.weight_scale", lambda a: a[:-1]), r"'a.weight_scale' is F16 \[12, 3\]"),
        (changed(PACKED, "a.weight_scale", lambda a: with_one(a, np.nan, 5)), "holds a NaN"),
        (changed(PACKED, "a.weight_zero_point", lambda a: a[:1]), r"wanted I32 \[2, 3\]"),
        (changed(PACKED, "a.weight_shape", lambda a: a[:1]), r"wanted I64 or I32 \[2\]"),
        (
            changed(FILES["packed-4-ordered"], "a.weight_g_idx", lambda a: with_one(a, 4, 0)),
            "groups from 0 to 4, wanted 0 to 3",
        ),
        (changed(GPTQ, "a.scales", lambda a: a[:, :-1]), r"'a.scales' is F16 \[3, 15\]"),
        (changed(GPTQ, "a.qzeros", lambda a: a + 1), "not in the middle, although .* says sym"),
        (changed(GPTQ, "a.g_idx", lambda a: with_one(a, 3, 0)), "groups from 0 to 3"),
        (changed(GPTQ, "a.qweight", lambda a: a.astype(np.float32)), "is F32"),
        (changed(AWQ, "a.qzeros", lambda a: a[:-1]), r"'a.qzeros' is I32 \[2, 2\]"),
        (changed(AWQ, "a.scales", lambda a: a[:2]), "'a.(scales|qzeros)'"),
        (changed(FILES["fp8-row"], "a.weight_scale", lambda a: a[:-1]), r"F32 \[8, 1\]"),
        (changed(MODELOPT, "a.weight", lambda a: a[None]), "of 4 bits has shape .* two axes"),
        (changed(MODELOPT, "a.weight", lambda a: a[:, 8:]), r"wanted F8_E4M3 \[9, 5\]"),
        (changed(MODELOPT, "a.weight_scale", lambda a: a[:, :3]), r"wanted F8_E4M3 \[9, 6\]"),
        (changed(MODELOPT, "a.weight_scale", lambda a: a.view(np.uint8)), "is U8"),
        (without(MODELOPT, "a.weight_scale_2"), "there is no 'a.weight_scale_2'"),
        (changed(MODELOPT, "a.weight_scale_2", lambda a: a * np.inf), "is inf, wanted a finite"),
        (changed(MODELOPT, "a.weight_scale_2", lambda a: np.ones(9, np.float32)), r"F32 \[9\]"),
        (without(NVFP4, "a.weight_global_scale"), "there is no 'a.weight_global_scale'"),
        (changed(NVFP4, "a.weight_global_scale", lambda a: 0 * a), "is 0.0, .* other than 0"),
        (changed(NVFP4, "a.weight_global_scale", lambda a: a.astype(BF16)), "is BF16"),
        (changed(MXFP4, "a.weight_scale", lambda a: a[:, :2]), r"wanted U8 or F8_E8M0 \[9, 3\]"),
        (changed(MXFP4, "a.weight_scale", lambda a: with_one(a, 255, 5)), "holds a NaN"),
        (changed(NF4, "a.weight", lambda a: a[1:]), r"'a.weight' is U8 \[863, 1\], wanted"),
        (changed(NF4, "a.weight.absmax", lambda a: a[1:]), r"wanted F32 or U8 \[27\]"),
        (changed(NF4, "a.weight.absmax", lambda a: a.view(np.int8)), "is I8"),
        (changed(NF4, "a.weight.quant_map", lambda a: a[1:]), r"F32 \[15\], wanted F32 \[16\]"),
        (changed(NF4, "a.weight.nested_quant_map", lambda a: a[1:]), r"F32 \[255\]"),
        (changed(NF4, "a.weight.nested_absmax", lambda a: a[1:]), r"F32 \[5\]"),
        (without(NF4, "a.weight.nested_absmax"), "there is no 'a.weight.nested_absmax'"),
        (without(NF4, NF4_STATE), "there is no 'a.weight.quant_state.bitsandbytes__'nf4 or fp4"),
        *(
            (changed(NF4, NF4_STATE, lambda _, text=text: np.frombuffer(text, np.uint8)), told)
            for text, told in {
                b"{": "does not describe a matrix",
                b"[]": "does not describe a matrix",
                b'{"shape": [9, 192]}': "'blocksize'",
                b'{"shape": [9, 192, 1], "blocksize": 64}': "does not describe a matrix",
                b'{"shape": [9, 0], "blocksize": 64}': "0 is no size",
                b'{"shape": [9, 192], "blocksize": 65537}': "out of range",
                b'{"shape": [9, 192], "blocksize": 64, "nested_offset": NaN}': "out of range",
                b'{"shape": [9, 192], "blocksize": 64}' + b" " * 5000: "it has 5036 bytes",
            }.items()
        ),
        (changed(BNB_INT8, "a.SCB", lambda a: a[1:]), r"'a.SCB' is F32 \[8\]"),
        (changed(BNB_INT8, "a.SCB", lambda a: with_one(a, np.inf, 3)), "holds a NaN"),
        (changed(BNB_INT8, "a.weight", lambda a: a.view(np.uint8)), "is U8"),
        (changed(BNB_INT8, "a.weight", lambda a: a[0]), "of 8 bits has shape .* two axes"),
        (
            changed(BNB_INT8, "a.weight_format", lambda a: np.zeros(9, np.uint8)),
            r"U8 \[9\], wanted",
        ),
        (changed(BNB_INT8, "a.weight_format", lambda a: a + 1), "'a.weight_format' is not 0"),
    ],
)
def test_malformed_tensors_are_refused_by_name(tmp_path, kit, file, told):
    with opened(tmp_path, kit, file) as stored, pytest.raises(BadCheckpoint, match=told):
        in_few_bits(weight_of(stored, file))


@pytest.mark.parametrize("form", ["modelopt", "nvfp4"])
def test_a_scale_of_nvfp4_that_is_nan_is_refused(tmp_path, kit, form):
    file = definitions.packed_floats(4, 32, form=form)
    scales = file.tensors["a.weight_scale"].view(np.uint8).copy()
    scales[2, 1] = 0x7F
    file = file._replace(tensors=file.tensors | {"a.weight_scale": scales.view(definitions.E4M3)})
    with opened(tmp_path, kit, file) as stored, pytest.raises(BadCheckpoint, match="holds a NaN"):
        weight_of(stored, file).read(np.empty(4 * 32, np.float32))


INT4, FP8_ROWS, FP8_BLOCKS = (
    {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    {"num_bits": 8, "type": "float", "strategy": "channel"},
    {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 128]},
)


def in_groups(*weights):
    """Returns a config of compressed-tensors whose groups have formats of their own."""
    forms = {4: "pack-quantized", 8: "float-quantized"}
    groups = {
        str(number): {"format": forms[one["num_bits"]], "weights": one}
        for number, one in enumerate(weights)
    }
    said = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    return said | {"config_groups": groups}


@pytest.mark.parametrize(
    "file",
    [
        # 160 columns in groups of 128 and 32, and not twice 80.
        definitions.packed(5, 160, group=128),
        definitions.packed(5, 160, group=64, seed=1),
        definitions.eight_bit(9, 40, shape=(9, 1)),
        definitions.eight_bit(9, 40, shape=()),
        definitions.eight_bit(70, 160, block=(32, 128)),
        definitions.eight_bit(20, 100, block=(32, 128)),
    ],
)
def test_a_weight_means_the_same_whatever_groups_the_config_has_beside_its_own(tmp_path, kit, file):
    several = (INT4, INT4 | {"group_size": 64}, FP8_ROWS, FP8_BLOCKS)
    for said in (several, several[::-1]):
        with opened(tmp_path, kit, file._replace(config=in_groups(*said))) as stored:
            got = np.empty(file.means.size, np.float32)
            weight_of(stored, file._replace(config=in_groups(*said))).read(got)
        np.testing.assert_array_equal(got.reshape(file.means.shape), file.means)


def test_groups_of_two_sizes_that_a_weight_may_have_are_refused(tmp_path, kit):
    file = definitions.packed(5, 160, group=128)
    file = file._replace(config=in_groups(INT4, INT4 | {"group_size": 96}))
    with opened(tmp_path, kit, file) as stored, pytest.raises(BadCheckpoint, match="96 or 128"):
        weight_of(stored, file)


def test_a_matrix_of_zeros_has_a_scale_of_zero(tmp_path, kit):
    file = changed(MODELOPT, "a.weight_scale_2", lambda scale: 0 * scale)
    got = np.ones(file.means.size, np.float32)
    with opened(tmp_path, kit, file) as stored:
        weight_of(stored, file).read(got)
    assert not got.any()


def test_scales_of_activations_and_of_keys_and_values_are_left_out(tmp_path, kit):
    file = FILES["fp8-row"]
    one = np.ones((), np.float32)
    extra = {"a.input_scale": one, "a.input_global_scale": one, "b.k_scale": one}
    with opened(tmp_path, kit, file._replace(tensors=file.tensors | extra)) as stored:
        weight_of(stored, file)
