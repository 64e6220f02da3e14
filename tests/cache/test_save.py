"""A cache on disk is the cache, bit for bit, or it is refused with the reason."""

import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxkv.cache.saved import load_cache, save_cache
from jaxkv.cache.spec import group_layers
from jaxkv.cache.state import Cache, init_cache
from jaxkv.cache.variants import gqa, place, sampling
from jaxkv.errors import BadCheckpoint
from tests.cache.layouts import HALF, counts_of, every_variant

ROOT = Path(__file__).parents[2]
LAYOUT = every_variant()
COUNTS = counts_of(LAYOUT, 3) | {"dsa": 2}


def random_cache():
    """Every bit pattern may occur: NaNs, infinities and denormals too."""
    cache = init_cache(LAYOUT, COUNTS)
    random = np.random.default_rng(0)

    def fill(array):
        bits = random.integers(0, 256, array.size * array.dtype.itemsize, np.uint8)
        return jnp.array(bits.view(array.dtype).reshape(array.shape))

    return jax.tree.map(fill, cache)


def bits(cache):
    return [np.asarray(array).view(np.uint8) for array in cache.arrays]


@pytest.fixture
def saved(tmp_path):
    cache, path = random_cache(), tmp_path / "cache.safetensors"
    save_cache(cache, LAYOUT, COUNTS, path)
    return cache, path


def rewrite(path, change):
    """Applies a change to the tensors and metadata of a file."""
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata=metadata)


def test_every_variant_and_dtype_comes_back_bit_for_bit(saved):
    """bfloat16, float8, float16, float32, int32 and uint8, NaNs included."""
    cache, path = saved
    loaded, counts = load_cache(path, LAYOUT)
    assert counts == COUNTS
    chex.assert_trees_all_equal_shapes_and_dtypes(loaded, cache)
    assert loaded.keys == cache.keys
    for before, after in zip(bits(cache), bits(loaded), strict=True):
        np.testing.assert_array_equal(before, after)


def test_the_file_names_its_layout_and_its_arrays(saved):
    _, path = saved
    with safe_open(path, framework="numpy") as file:
        metadata, names = file.metadata(), set(file.keys())
    groups = json.loads(metadata["layout"])
    assert [group["name"] for group in groups] == [group.name for group in LAYOUT.groups]
    assert groups[0]["spec"]["arrays"][0] == {"role": "key", "shape": [2, 8], "dtype": "bfloat16"}
    assert names == {array.name for array in LAYOUT.arrays(COUNTS)}


def test_saving_and_loading_leave_caches_that_can_be_donated(saved):
    """A view kept on the host would make the next step copy the cache."""
    cache, path = saved
    step = jax.jit(
        lambda cache: Cache(arrays=tuple(a.at[0].set(a[1]) for a in cache.arrays), keys=cache.keys),
        donate_argnums=0,
    )
    for candidate in (cache, load_cache(path, LAYOUT)[0]):
        pointers = [array.unsafe_buffer_pointer() for array in candidate.arrays]
        after = step(candidate)
        assert all(array.is_deleted() for array in candidate.arrays)
        assert [array.unsafe_buffer_pointer() for array in after.arrays] == pointers


def test_another_layout_is_refused(saved):
    _, path = saved
    other = group_layers(place([gqa(4, 8, **HALF)]))
    with pytest.raises(BadCheckpoint, match=r"another layout: got .*'shape': \[2, 8\].*\[4, 8\]"):
        load_cache(path, other)


def test_a_layout_that_goes_on_is_refused(tmp_path):
    path = tmp_path / "cache.safetensors"
    spec = gqa(2, 8, **HALF)
    shorter, longer = group_layers(place([spec])), group_layers(place([spec, sampling(3)]))
    save_cache(init_cache(shorter, {"gqa": 2}), shorter, {"gqa": 2}, path)
    with pytest.raises(BadCheckpoint, match="got 1 groups, wanted 2 groups"):
        load_cache(path, longer)


def without_an_array(tensors, metadata):
    del tensors["layer0.key"]
    return r"does not hold exactly the arrays of its layout; missing or extra: \['layer0.key'\]"


def with_one_array_more(tensors, metadata):
    tensors["layer99.key"] = tensors["layer0.key"]
    return r"does not hold exactly the arrays of its layout; missing or extra: \['layer99.key'\]"


def with_a_wrong_shape(tensors, metadata):
    tensors["layer0.key"] = tensors["layer0.key"][:2]
    return r"layer0.key .* is bfloat16\[2, 4, 2, 8\], wanted bfloat16\[3, 4, 2, 8\]"


def with_a_wrong_dtype(tensors, metadata):
    tensors["layer0.key"] = tensors["layer0.key"].view(np.float16)
    return r"layer0.key .* is float16\[3, 4, 2, 8\], wanted bfloat16"


def with_another_format(tensors, metadata):
    metadata["format"] = "jaxkv-cache-0"
    return "format 'jaxkv-cache-0', wanted 'jaxkv-cache-1'"


def without_a_layout(tensors, metadata):
    del metadata["layout"]
    return "has no readable layout: KeyError"


def with_a_broken_layout(tensors, metadata):
    metadata["layout"] = "[{"
    return "has no readable layout: JSONDecodeError"


def with_other_counts(tensors, metadata):
    metadata["counts"] = '{"gqa": 3}'
    return r"counts \{'gqa': 3\}, wanted one for each of"


def with_impossible_counts(tensors, metadata):
    metadata["counts"] = json.dumps(COUNTS | {"gqa": -3, "mla": "3"})
    return "counts .*, wanted one for each of"


@pytest.mark.parametrize(
    "change",
    [
        without_an_array,
        with_one_array_more,
        with_a_wrong_shape,
        with_a_wrong_dtype,
        with_another_format,
        without_a_layout,
        with_a_broken_layout,
        with_other_counts,
        with_impossible_counts,
    ],
)
def test_a_file_that_is_not_its_layouts_cache_is_refused_with_the_reason(saved, change):
    _, path = saved
    message = []
    rewrite(path, lambda tensors, metadata: message.append(change(tensors, metadata)))
    with pytest.raises(BadCheckpoint, match=message[0]):
        load_cache(path, LAYOUT)


def test_what_a_file_holds_comes_back_clipped_in_an_error(saved):
    _, path = saved
    others = {f"other{at}": np.zeros(1, np.uint8) for at in range(5000)}
    for change in (
        lambda tensors, metadata: tensors.update(others),
        lambda tensors, metadata: metadata.update(counts=json.dumps(dict.fromkeys(others, 1))),
        lambda tensors, metadata: metadata.update(layout=json.dumps([list(others)])),
        lambda tensors, metadata: metadata.update(format="x" * 10**6),
    ):
        rewrite(path, change)
        with pytest.raises(BadCheckpoint) as caught:
            load_cache(path, LAYOUT)
        assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(saved, length):
    _, path = saved
    whole = path.read_bytes()
    path.write_bytes(whole[:length])
    with pytest.raises(BadCheckpoint, match="is damaged or no safetensors file"):
        load_cache(path, LAYOUT)


def test_a_failed_save_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    cache, path = saved
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk on fire")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk on fire"):
        save_cache(cache, LAYOUT, COUNTS, path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


SPEC = group_layers(place([gqa(2, 8, **HALF)]))


def save_small(path):
    save_cache(init_cache(SPEC, {"gqa": 2}), SPEC, {"gqa": 2}, path)


def test_a_symbolic_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "cache", tmp_path / "link"
    link.symlink_to(target)
    for _ in range(2):
        save_small(link)
        assert link.is_symlink()
        assert not target.is_symlink()
        load_cache(target, SPEC)
    assert list(target.parent.iterdir()) == [target]


def test_a_missing_folder_is_named_as_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "cache")
    for path, folder in (("no/such/cache", "no/such"), ("link", str(tmp_path / "elsewhere"))):
        with pytest.raises(FileNotFoundError) as refused:
            save_small(Path(path))
        assert f"there is no folder {folder} to save" in str(refused.value)
        assert ".jaxkv-draft" not in str(refused.value)


def test_only_a_regular_file_is_replaced(tmp_path):
    """A device node that was replaced by a file is gone for every program of the machine."""
    pipe, folder, device = tmp_path / "pipe", tmp_path / "folder", tmp_path / "device"
    os.mkfifo(pipe)
    folder.mkdir()
    device.symlink_to("/dev/null")
    for path, kind in ((pipe, "a pipe"), (folder, "a directory"), (device, "a device")):
        with pytest.raises(ValueError, match=f"{path.name} is {kind}.*, not a regular file"):
            save_small(path)
    assert pipe.is_fifo()
    assert os.path.samefile(device, "/dev/null")
    assert sorted(tmp_path.iterdir()) == [device, folder, pipe]


def test_what_a_killed_process_left_of_a_save_is_removed_by_the_next(tmp_path):
    script = f"""
import os
from safetensors import numpy
from jaxkv.cache import saved

def killed(tensors, path, metadata):
    path.write_bytes(bytes(1000))
    os.kill(os.getpid(), 9)

saved.save_file = killed
from tests.cache.test_save import save_small
from pathlib import Path
save_small(Path({str(tmp_path)!r}) / "cache")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True)
    assert done.returncode == -9, done.stderr
    [left] = tmp_path.iterdir()
    os.utime(left, (0, 0))
    save_small(tmp_path / "other")
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


def test_a_cache_of_other_counts_is_not_saved(saved):
    cache, path = saved
    with pytest.raises(ValueError, match="are not those of this layout with the counts"):
        save_cache(cache, LAYOUT, COUNTS | {"gqa": 9}, path)
