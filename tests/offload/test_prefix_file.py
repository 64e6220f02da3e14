"""The file format of saved prefixes: contents bit for bit, or an error with the reason."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.numpy import save_file as save_tensors

from jaxkv.cache.spec import group_layers
from jaxkv.cache.variants import delta, gqa, mamba2, mla, place, sampling, window
from jaxkv.errors import BadCheckpoint
from jaxkv.offload import prefix_file
from jaxkv.offload.prefix_catalogue import ROOT, Catalogue, CheckpointEntry
from jaxkv.offload.prefix_file import Identity, open_file, save_file
from jaxkv.offload.programs import unit_shapes

PROJECT = Path(__file__).parents[2]
PAGE, VOCAB = 4, 50
HALF = {"dtype": "bfloat16", "page_size": PAGE}
LAYOUT = group_layers(
    place(
        [
            gqa(2, 8, **HALF),
            gqa(2, 8, quantised="fp8", **HALF),
            window(2, 8, window=6, **HALF),
            mla(16, 8, dtype="float32", page_size=PAGE),
            mamba2(heads=2, head_dim=4, d_state=8, d_conv=4, groups=1, dtype="bfloat16"),
            delta(key_heads=1, value_heads=2, key_dim=4, value_dim=4, d_conv=4, dtype="float16"),
            sampling(VOCAB),
        ]
    )
)
PAGED = tuple(group.name for group in LAYOUT.paged_groups)
IDENTITY = Identity("a model", lambda: "some weights", LAYOUT, PAGE, VOCAB)


def encoded(*tokens):
    return np.array(tokens, "<i4").tobytes()


CATALOGUE = Catalogue(
    page_size=PAGE,
    parents=(ROOT, 0, 0, ROOT),
    tokens=(encoded(1, 2, 3, 4), encoded(5, 6, 7, 8), encoded(5, 6, 7, 9), encoded(0, 0, 49, 0)),
    pages={PAGED[0]: (0, 1, 2, 3), PAGED[1]: (0, 1), PAGED[2]: (2,), PAGED[3]: ()},
    checkpoints=(
        CheckpointEntry(1, b""),
        CheckpointEntry(1, encoded(9)),
        CheckpointEntry(ROOT, encoded(1, 2, 3)),
    ),
)


def units_of(name):
    """Yields units in which every bit pattern may occur: NaNs, infinities and denormals too."""
    group, count = LAYOUT.group(name), CATALOGUE.num_units(LAYOUT)[name]
    draw = np.random.default_rng(group.index)
    for _ in range(count):
        yield tuple(
            draw.integers(0, 256, shape.size * shape.dtype.itemsize, np.uint8)
            .view(shape.dtype)
            .reshape(shape.shape)
            for shape in unit_shapes(group)
        )


def save(path):
    return save_file(path, IDENTITY, CATALOGUE, units_of)


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "prefixes")
    return tmp_path / "prefixes"


def load(path, identity=IDENTITY):
    """Reads and checks everything."""
    with open_file(path, identity) as file:
        units = {}
        for name, count in file.catalogue.num_units(LAYOUT).items():
            group = LAYOUT.group(name)
            file.check(group, range(count))
            units[name] = [file.read(group, row) for row in range(count)]
        return file.catalogue, units


def rewrite(path, change):
    """Applies a change to the tensors and metadata of a file, and corrects the CRC of its tables."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    before = metadata["tables_crc32"]
    change(tensors, metadata)
    names = prefix_file._table_names(LAYOUT)
    if all(name in tensors for name in names) and metadata.get("tables_crc32") == before:
        metadata["tables_crc32"] = str(prefix_file.crc32(tensors[name] for name in names))
    save_tensors(tensors, path, metadata=metadata)


def test_tables_and_units_come_back_bit_for_bit(path):
    # bfloat16, float8, float16, float32 and int32.
    catalogue, units = load(path)
    assert catalogue == CATALOGUE
    for name, found in units.items():
        for unit, wanted in zip(found, units_of(name), strict=True):
            for array, other in zip(unit, wanted, strict=True):
                assert (array.dtype, array.shape) == (other.dtype, other.shape)
                assert array.tobytes() == other.tobytes()


def test_other_programs_can_read_the_file(path):
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    assert metadata["model"] == "a model"
    assert '"page_size": 4' in metadata["layout"]
    assert tensors["tokens"].tolist()[3] == [0, 0, 49, 0]
    assert tensors[f"{PAGED[0]}.key"].shape == (6, 4 * 2 * 8 * 2)
    # Keys and values are one array of a unit, and a tensor each of the file.
    for row, [unit] in enumerate(units_of(PAGED[0])):
        for role, part in zip(("key", "value"), unit, strict=True):
            assert tensors[f"{PAGED[0]}.{role}"][row].tobytes() == part.tobytes()
    assert path.stat().st_size == save(path)


def test_tokens_of_shared_beginnings_count_once():
    count = CATALOGUE.num_tokens
    every = CATALOGUE.checkpoints
    # 1 2 3 of the last checkpoint begin row 0.
    assert count(range(4), every) == 17
    assert count([], every) == 1 + 3
    assert count([0, 1], ()) == 8


def test_empty_tables_make_a_file(tmp_path):
    empty = Catalogue(PAGE, (), (), dict.fromkeys(PAGED, ()), ())
    save_file(tmp_path / "empty", IDENTITY, empty, lambda name: iter(()))
    assert load(tmp_path / "empty")[0] == empty


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (replace(IDENTITY, model="a muddle"), "another model: got 'a model', wanted 'a muddle'"),
        (replace(IDENTITY, weights=lambda: "others"), "other weights: .*'some weights'.*'others'"),
        (replace(IDENTITY, page_size=8), "another page size: got '4', wanted '8'"),
        (
            replace(IDENTITY, layout=group_layers(place([gqa(4, 8, **HALF)]))),
            r"another cache layout: got .*\[2, 8\].*, wanted .*\[4, 8\]",
        ),
    ],
)
def test_another_identity_is_refused_by_name(path, identity, message):
    with pytest.raises(BadCheckpoint, match=message):
        load(path, identity)


def test_weights_are_not_read_where_the_rest_differs(path):
    def weights():
        raise AssertionError("not needed")

    with pytest.raises(BadCheckpoint, match="another model"):
        load(path, replace(IDENTITY, model="other", weights=weights))


def put(name, value):
    def change(tensors, metadata):
        table = tensors[name] = tensors[name].copy()
        table[(-1,) * table.ndim] = value

    return change


def resize(name, count):
    def change(tensors, metadata):
        tensors[name] = tensors[name][:count]

    return change


def metadata_of(**new):
    return lambda tensors, metadata: metadata.update(new)


CONTRADICTIONS = {
    "a parent behind its child": put("parents", 3),
    "a parent that is none": put("parents", -2),
    "a token outside of the vocabulary": put("tokens", VOCAB),
    "a negative token": put("tokens", -1),
    "a checkpoint of no row": put("checkpoint_rows", 4),
    "a tail of a whole page": put("tail_lengths", PAGE),
    "a negative tail": put("tail_lengths", -1),
    "a checkpoint of no tokens": put("tail_lengths", 0),
    "a page of no row": put(f"rows.{PAGED[0]}", 4),
    "a page twice": put(f"rows.{PAGED[1]}", 0),
    "fewer parents": resize("parents", 3),
    "fewer tails": resize("tails", 2),
    "fewer lengths": resize("tail_lengths", 2),
}


@pytest.mark.parametrize("change", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_tables_that_contradict_each_other_are_refused(path, change):
    rewrite(path, change)
    with pytest.raises(BadCheckpoint, match="has tables that contradict each other or the model"):
        load(path)


def same_page_twice(tensors, metadata):
    tensors["tokens"] = tensors["tokens"].copy()
    tensors["tokens"][2] = tensors["tokens"][1]


def same_checkpoint_twice(tensors, metadata):
    tensors["checkpoint_rows"] = np.array([1, 1, 1], "<i4")
    tensors["tail_lengths"] = np.array([0, 1, 0], "<i4")


def without(name):
    def change(tensors, metadata):
        del tensors[name]

    return change


def more(tensors, metadata):
    tensors["stranger"] = np.zeros(3, np.float32)


def flipped(tensors, metadata):
    tensors["mla.key"] = tensors["mla.key"].copy()
    tensors["mla.key"][1, 5] ^= 8


def floats(tensors, metadata):
    tensors["parents"] = tensors["parents"].astype(np.float32)


PAGES = f"{PAGED[0]}.key"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (same_page_twice, "the same page or checkpoint twice"),
        (same_checkpoint_twice, "the same page or checkpoint twice"),
        (without("tokens"), "lacks the table 'tokens'"),
        (without(PAGES), r"missing, extra or misshaped: \['?gqa.key"),
        (more, "missing, extra or misshaped: .*stranger"),
        (resize(PAGES, 5), "missing, extra or misshaped: .*gqa.key"),
        (resize(f"{PAGED[0]}.crc32", 5), "missing, extra or misshaped: .*gqa.crc32"),
        (floats, r"table 'parents' as F32\[4\], wanted I32"),
        (flipped, "is damaged: page 1 of 'mla' has a wrong CRC"),
        (metadata_of(tables_crc32="0"), "its tables have a wrong CRC"),
        (metadata_of(format="jaxkv-cache-1"), "has format 'jaxkv-cache-1', wanted"),
        (metadata_of(layout="[{"), "another cache layout: got "),
        (metadata_of(page_size="4.0"), "another page size"),
        (metadata_of(model=""), "another model: got '', wanted 'a model'"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_refused(path, change, message):
    rewrite(path, change)
    with pytest.raises(BadCheckpoint, match=message):
        load(path)


def test_what_a_file_holds_comes_back_clipped_in_an_error(path):
    for change in (
        lambda tensors, metadata: metadata.update(format="x" * 10**6),
        lambda tensors, metadata: metadata.update(format=prefix_file.FORMAT, model="x" * 10**6),
    ):
        rewrite(path, change)
        with pytest.raises(BadCheckpoint) as caught:
            load(path)
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("length", [0, 4, 100, 3000, -1])
def test_a_truncated_file_is_refused(path, length):
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(BadCheckpoint, match="is damaged or no safetensors file"):
        load(path)


def test_a_header_of_impossible_sizes_is_refused(path):
    whole = path.read_bytes()
    for old, new in (
        (b'"shape": [4, 4]', b'"shape": [9, 9]'),
        (b'"data_offsets": [0, 16]', b'"data_offsets": [0, 99]'),
    ):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(BadCheckpoint, match="is damaged or no safetensors file"):
            load(path)
    path.write_bytes((2**62).to_bytes(8, "little") + whole[8:])
    with pytest.raises(BadCheckpoint, match="is damaged or no safetensors file"):
        load(path)


def test_no_single_bit_can_change_unnoticed(path):
    whole = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(whole[:8], "little")
    draw = np.random.default_rng(0)
    for at in draw.integers(first, len(whole), 60).tolist():
        whole[at] ^= 16
        path.write_bytes(whole)
        with pytest.raises(BadCheckpoint):
            load(path)
        whole[at] ^= 16


def test_a_file_that_is_not_there_is_not_found(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


@pytest.mark.parametrize("fault", ["replace", "units"])
def test_a_failed_save_leaves_the_old_file_and_nothing_else(path, monkeypatch, fault):
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk on fire")

    if fault == "replace":
        monkeypatch.setattr(os, "replace", fail)
    units = units_of if fault == "replace" else fail
    with pytest.raises(OSError, match="disk on fire"):
        save_file(path, IDENTITY, CATALOGUE, units)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "prefixes", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):
        save(link)
        assert link.is_symlink()
        load(target)
    assert list(target.parent.iterdir()) == [target]


def test_only_a_regular_file_is_replaced_or_read(tmp_path):
    pipe, folder, device = tmp_path / "pipe", tmp_path / "folder", tmp_path / "device"
    os.mkfifo(pipe)
    folder.mkdir()
    device.symlink_to("/dev/null")
    for path, kind in ((folder, "a directory"), (device, "a device"), (pipe, "a pipe")):
        for use in (save, load):
            with pytest.raises(ValueError, match=f"{path.name} is {kind}.*, not a regular file"):
                use(path)
    assert sorted(tmp_path.iterdir()) == [device, folder, pipe]


def test_what_a_killed_process_left_of_a_save_is_removed_by_the_next(tmp_path):
    script = f"""
import os
from tests.offload import test_prefix_file as tests

def killed(name):
    yield from list(tests.units_of(name))[:1]
    os.kill(os.getpid(), 9)

tests.save_file({str(tmp_path / "prefixes")!r}, tests.IDENTITY, tests.CATALOGUE, killed)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=PROJECT, capture_output=True)
    assert done.returncode == -9, done.stderr
    [left] = tmp_path.iterdir()
    assert left.name != "prefixes"
    os.utime(left, (0, 0))
    save(tmp_path / "other")
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]
