"""Hostile model directories end in one line that names the file and the reason."""

import json
import os
import random
import socket

import jax
import numpy as np
import pytest

from jaxkv.errors import BadCheckpoint
from jaxkv.models.registry import load_params
from tests.example_counts import examples

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"
LAST = "model.norm.weight"


def load(directory, kit, config=None):
    return load_params(directory, kit.Toy(config or kit.CONFIG), dtype="float32", progress=False)


def header_case(change):
    """Makes a directory whose header differs from a good one by `change(header, data)`."""

    def build(directory, kit):
        header, data = kit.layout(kit.checkpoint_tensors(kit.CONFIG))
        kit.write_raw(directory / SINGLE, *(change(header, data) or (header, data)))

    return build


def tensor_case(change):
    """Makes a well-formed file whose tensors differ from the good ones by `change(tensors)`."""

    def build(directory, kit):
        tensors = kit.checkpoint_tensors(kit.CONFIG)
        change(tensors)
        kit.save_file(tensors, directory / SINGLE)

    return build


def index_case(change):
    """Makes a sharded directory whose index differs from a good one by `change(index, directory)`."""

    def build(directory, kit):
        kit.write_shards(directory, kit.checkpoint_tensors(kit.CONFIG))
        index = json.loads((directory / INDEX).read_text())
        text = change(index, directory)
        (directory / INDEX).write_text(json.dumps(index) if text is None else text)

    return build


def raw_case(content):
    def build(directory, kit):
        (directory / SINGLE).write_bytes(content)

    return build


def text_header(text, data=b""):
    def build(directory, kit):
        kit.write_raw(directory / SINGLE, text, data)

    return build


def entry(**changes):
    """Changes the header entry of one tensor; a key set to `None` is removed."""

    def change(header, data):
        header[DOWN] |= changes
        header[DOWN] = {key: value for key, value in header[DOWN].items() if value is not None}

    return header_case(change)


def shift_offsets(header, data):
    begin, end = header[DOWN]["data_offsets"]
    header[DOWN]["data_offsets"] = [begin + 4, end + 4]


def huge_length(directory, kit):
    kit.write_raw(directory / SINGLE, "{}", length=2**62)


def long_header(directory, kit):
    kit.write_raw(directory / SINGLE, "{" + " " * (17 * 2**20) + "}")


def truncated(directory, kit):
    header_case(lambda header, data: (header, data[:-3]))(directory, kit)


def fifo(directory, kit):
    os.mkfifo(directory / SINGLE)


def bound_socket(directory, kit):
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(directory)
    try:
        server.bind(SINGLE)
    finally:
        os.chdir(here)
        server.close()


def pickle_only(directory, kit):
    (directory / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n")


def other_name(directory, kit):
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), directory / "weights.safetensors")


def link_outside(directory, kit):
    outside = directory.parent / "outside.safetensors"
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), outside)
    (directory / SINGLE).symlink_to(outside)


def link_to_nothing(directory, kit):
    (directory / SINGLE).symlink_to(directory / "nothing.safetensors")


def link_to_itself(directory, kit):
    (directory / SINGLE).symlink_to(SINGLE)


def link_to_device(directory, kit):
    (directory / SINGLE).symlink_to("/dev/zero")


def shard_link_outside(directory, kit):
    def change(index, directory):
        shard = directory / index["weight_map"][DOWN]
        shard.rename(directory.parent / "moved.safetensors")
        shard.symlink_to(directory.parent / "moved.safetensors")

    index_case(change)(directory, kit)


def blobs_of_another(directory, kit):
    # Only the blobs folder of the very same model counts as inside, and only for a snapshot.
    blobs = directory.parent / "blobs"
    blobs.mkdir()
    kit.save_file(kit.checkpoint_tensors(kit.CONFIG), blobs / "0")
    (directory / SINGLE).symlink_to(blobs / "0")


def rename_shard(name):
    def change(index, directory):
        index["weight_map"][DOWN] = name

    return index_case(change)


def drop_shard(index, directory):
    (directory / index["weight_map"][DOWN]).unlink()


def wrong_shard(index, directory):
    others = sorted(set(index["weight_map"].values()) - {index["weight_map"][DOWN]})
    index["weight_map"][DOWN] = others[0]


def twice_in_shards(directory, kit):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    kit.write_shards(directory, tensors)
    index = json.loads((directory / INDEX).read_text())
    kit.save_file({DOWN: tensors[DOWN]}, directory / "more.safetensors")
    index["weight_map"]["extra"] = "more.safetensors"
    kit.save_file({DOWN: tensors[DOWN], "extra": tensors[LAST]}, directory / "more.safetensors")
    (directory / INDEX).write_text(json.dumps(index))


def poison(value):
    def change(tensors):
        tensors[DOWN][-1, -1] = value

    return tensor_case(change)


def reshape(shape):
    def change(tensors):
        tensors[DOWN] = tensors[DOWN].reshape(shape)

    return tensor_case(change)


def recast(dtype):
    def change(tensors):
        tensors[DOWN] = tensors[DOWN].astype(dtype)

    return tensor_case(change)


def swapped_rows(tensors):
    # Together the two still have the rows of the fused leaf.
    at = "model.layers.0.self_attn."
    tensors[at + "q_proj.weight"], tensors[at + "k_proj.weight"] = (
        tensors[at + "k_proj.weight"],
        tensors[at + "q_proj.weight"],
    )


def duplicate_key(directory, kit):
    header, data = kit.layout(kit.checkpoint_tensors(kit.CONFIG))
    entries = ",".join(f"{json.dumps(name)}:{json.dumps(at)}" for name, at in header.items())
    kit.write_raw(
        directory / SINGLE, f"{{{entries},{json.dumps(LAST)}:{json.dumps(header[LAST])}}}", data
    )


def renamed(old, new):
    def change(tensors):
        tensors[new] = tensors.pop(old)

    return tensor_case(change)


CASES = {
    # What is not a checkpoint at all.
    "nothing": (lambda directory, kit: None, "holds neither model.safetensors nor"),
    "pickle only": (pickle_only, r"pytorch_model\.bin is never read.*convert it to safetensors"),
    "another name": (other_name, r"holds weights\.safetensors under another name"),
    "a folder": (lambda directory, kit: (directory / SINGLE).mkdir(), "not a regular file"),
    "a fifo": (fifo, "not a regular file"),
    "a socket": (bound_socket, "not a regular file"),
    "a device": (link_to_device, "link out of the model directory"),
    "a link outside": (link_outside, "link out of the model directory"),
    "a link to nothing": (link_to_nothing, "cannot be read: No such file"),
    "a link to itself": (link_to_itself, "cannot be read"),
    "blobs of no snapshot": (blobs_of_another, "link out of the model directory"),
    # Headers.
    "empty file": (raw_case(b""), r"too short \(0 bytes\)"),
    "seven bytes": (raw_case(b"1234567"), r"too short \(7 bytes\)"),
    "a huge length": (huge_length, "declares a header of 4611686018427387904 bytes"),
    "a length past the end": (raw_case(b"\x40" + b"\0" * 7 + b"{}"), "but declares a header of 64"),
    "a length of zero": (raw_case(b"\0" * 8), "does not begin with a brace"),
    "a header too long": (long_header, "declares a header of"),
    "a header of spaces": (text_header("   {}"), "does not begin with a brace"),
    "no utf-8": (text_header(b'{"\xff\xfe":1}'), "not UTF-8"),
    "no json": (text_header("{nope}"), "is not JSON"),
    "a list": (text_header("[]"), "does not begin with a brace"),
    "json cut short": (text_header('{"a":{"dtype":"F32"'), "is not JSON"),
    "json twice": (text_header("{}{}"), "is not JSON"),
    "deep json": (text_header('{"a":' * 100_000 + "1" + "}" * 100_000), "nested too deeply"),
    "deep lists": (text_header('{"a":' + "[" * 10**6 + "]" * 10**6 + "}"), "nested too deeply"),
    "a long int": (text_header('{"a":' + "9" * 5000 + "}"), "is not JSON"),
    "a key twice": (duplicate_key, r"holds the key 'model\.norm\.weight' twice"),
    "metadata a list": (text_header('{"__metadata__":[]}'), "__metadata__ does not map"),
    "metadata of numbers": (text_header('{"__metadata__":{"a":1}}'), "__metadata__ does not map"),
    "entry no object": (header_case(lambda h, d: h.update({DOWN: 5})), "must have exactly dtype"),
    "entry without dtype": (entry(dtype=None), "must have exactly dtype"),
    "entry with more": (entry(more=1), "must have exactly dtype"),
    "dtype unknown": (entry(dtype="F31"), "unknown dtype 'F31'"),
    "dtype a list": (entry(dtype=["F32"]), "unknown dtype"),
    "shape a string": (entry(shape="6,5"), "malformed shape"),
    "shape negative": (entry(shape=[-6, -5]), r"malformed shape \[-6, -5\]"),
    "shape a bool": (entry(shape=[True, 30]), "malformed shape"),
    "shape a float": (entry(shape=[6.0, 5]), "malformed shape"),
    "shape of many axes": (entry(shape=[1] * 1000), "malformed shape"),
    "shape huge": (entry(shape=[2**62, 2**62, 2**62]), "has 120 bytes, but F32"),
    "shape past int64": (entry(shape=[2**63]), "malformed shape"),
    "offsets missing one": (entry(data_offsets=[0]), "malformed data_offsets"),
    "offsets negative": (entry(data_offsets=[-4, 116]), "malformed data_offsets"),
    "offsets backwards": (entry(data_offsets=[120, 0]), "declared at bytes 120 to 0"),
    "offsets past the end": (entry(data_offsets=[10**9, 10**9 + 120]), "may be cut short"),
    "offsets too long": (entry(data_offsets=[0, 124]), "has 124 bytes, but F32"),
    "offsets overlapping": (header_case(shift_offsets), "overlaps|gap"),
    "a tensor dropped": (header_case(lambda h, d: h.pop(DOWN) and None), "leaves a gap"),
    "bytes at the end": (header_case(lambda h, d: (h, d + b"!")), "1 bytes that no tensor owns"),
    "cut short": (truncated, "may be cut short"),
    "zero tensors": (text_header("{}"), "lacks 'model.embed_tokens.weight'"),
    # Names, shapes, dtypes, numbers.
    "a name missing": (
        tensor_case(lambda t: t.pop(DOWN)),
        r"lacks 'model\.layers\.0\.mlp\.down_proj",
    ),
    "a name too many": (
        tensor_case(lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t[DOWN]})),
        r"holds 'model\.layers\.2\.mlp\.down_proj\.weight', which a llama model",
    ),
    "a bias unasked for": (
        tensor_case(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": t[LAST]})),
        r"holds 'model\.layers\.0\.self_attn\.q_proj\.bias'",
    ),
    "a name like a path": (
        tensor_case(lambda t: t.update({"../../x": t[LAST]})),
        r"holds '\.\./\.\./x'",
    ),
    "a name of two lines": (tensor_case(lambda t: t.update({"a\nb": t[LAST]})), r"holds 'a\\nb'"),
    "a name without end": (tensor_case(lambda t: t.update({"a" * 10**5: t[LAST]})), r"aaa\.\.\."),
    "no prefix": (renamed(LAST, "norm.weight"), r"lacks 'model\.norm\.weight'"),
    "transposed": (reshape((5, 6)), r"has shape \[5, 6\], wanted \[6, 5\]"),
    "flat": (reshape((30,)), r"has shape \[30\], wanted \[6, 5\]"),
    "query and key swapped": (tensor_case(swapped_rows), r"has shape \[4, 6\], wanted \[12, 6\]"),
    "integers": (recast(np.int32), "has dtype I32, wanted F64, F32, F16, BF16"),
    "bools": (recast(np.bool_), "has dtype BOOL"),
    "a NaN": (poison(np.nan), "holds a NaN or an infinity"),
    "an infinity": (poison(-np.inf), "holds a NaN or an infinity"),
    # Indices and shards.
    "index no json": (index_case(lambda i, d: "]"), r"index\.json is not JSON"),
    "index a list": (index_case(lambda i, d: "[]"), r"index\.json holds a JSON list"),
    "index empty": (index_case(lambda i, d: "{}"), "has no weight_map"),
    "index map a list": (index_case(lambda i, d: '{"weight_map": []}'), "has no weight_map"),
    "index key twice": (
        index_case(lambda i, d: '{"weight_map": {"a": "x", "a": "y"}}'),
        "'a' twice",
    ),
    "index deep": (index_case(lambda i, d: '{"a":' * 10**5), r"index\.json is nested too deeply"),
    "shard a number": (rename_shard(5), "in 5, no safetensors file"),
    "shard pickled": (rename_shard("pytorch_model.bin"), "no safetensors file"),
    "shard above": (rename_shard("../x.safetensors"), "not a plain file name"),
    "shard absolute": (rename_shard("/etc/x.safetensors"), "not a plain file name"),
    "shard hidden": (rename_shard(".x.safetensors"), "not a plain file name"),
    "shard with nul": (rename_shard("a\0b.safetensors"), "not a plain file name"),
    "shard of two lines": (rename_shard("a\nb.safetensors"), "not a plain file name"),
    "shard name too long": (rename_shard("a" * 5000 + ".safetensors"), "not a plain file name"),
    "shard missing": (
        index_case(drop_shard),
        r"lacks model-.*, 1 of the 3 files that .*index\.json names",
    ),
    "shard without the name": (
        index_case(wrong_shard),
        r"lacks 'model\.layers\.0\.mlp.*puts there",
    ),
    "shard link outside": (shard_link_outside, "link out of the model directory"),
    "a name in two shards": (twice_in_shards, r"both hold 'model\.layers\.0\.mlp"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_hostile_directory_is_one_line_naming_file_and_reason(tmp_path, kit, case):
    build, reason = CASES[case]
    directory = tmp_path / "model"
    directory.mkdir()
    build(directory, kit)
    with pytest.raises(BadCheckpoint, match=reason) as caught:
        load(directory, kit)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 600 + len(str(directory))
    assert str(directory) in message


def test_a_directory_that_is_none_is_named(tmp_path, kit):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(BadCheckpoint, match="is not a directory"):
            load(path, kit)


def test_numbers_too_large_for_the_wished_dtype_are_refused(tmp_path, kit):
    poison(7e4)(tmp_path, kit)
    with pytest.raises(
        BadCheckpoint, match=r"down_proj.weight' holds a number too large for float16"
    ):
        load_params(tmp_path, kit.Toy(kit.CONFIG), dtype="float16", progress=False)


def test_a_file_that_shrinks_after_its_header_was_read_is_an_error_not_a_signal(
    tmp_path, kit, monkeypatch
):
    # A mapped file would kill the process with SIGBUS here.
    tensor_case(lambda tensors: None)(tmp_path, kit)
    original = jax.tree_util.keystr
    once = []

    def shrink_then(*args, **kwargs):
        if not once:
            once.append(os.truncate(tmp_path / SINGLE, os.path.getsize(tmp_path / SINGLE) - 400))
        return original(*args, **kwargs)

    monkeypatch.setattr(jax.tree_util, "keystr", shrink_then)
    with pytest.raises(BadCheckpoint, match="was cut short while"):
        load(tmp_path, kit)


def mutate(content, rng):
    """Damages the length, the header or the end of a safetensors file in one to three places."""
    length = int.from_bytes(content[:8], "little")
    damaged = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(8 if rng.random() < 0.1 else 8 + length)
        match rng.randrange(5):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.choice(b'"{}[]:,0123456789-.eEtFBI\\ \0')
            case 2:
                del damaged[at : at + rng.randint(1, 9)]
            case 3:
                other = rng.randrange(8, 8 + length)
                damaged[at:at] = content[other : other + rng.randint(1, 60)]
            case 4:
                del damaged[len(damaged) - rng.randint(1, 50) :]
    if rng.random() < 0.7:
        # Keep the declared length in step, or nearly all mutants would die of it.
        grown = len(damaged) - len(content)
        damaged[:8] = max(0, length + grown).to_bytes(8, "little")
    return bytes(damaged)


def outcome_of(directory, kit):
    """Returns the message of a refusal, or the shapes of what was loaded."""
    try:
        return [leaf.shape for leaf in jax.tree.leaves(load(directory, kit))]
    except BadCheckpoint as error:
        return str(error)


def test_a_mutated_header_is_refused_in_one_line_or_harmless(tmp_path, kit):
    tensors = kit.checkpoint_tensors(kit.CONFIG)
    path = tmp_path / SINGLE
    kit.write_raw(path, *kit.layout(tensors))
    shapes = [leaf.shape for leaf in jax.tree.leaves(load(tmp_path, kit))]
    good = path.read_bytes()
    rng = random.Random(20240229)
    refused = 0
    for _ in range(examples(3000)):
        path.write_bytes(mutate(good, rng))
        outcome = outcome_of(tmp_path, kit)
        refused += isinstance(outcome, str)
        assert "\n" not in outcome if isinstance(outcome, str) else outcome == shapes
    assert refused > examples(3000) * 9 // 10
