"""Bundles of compiled programs: refused with the difference, never loaded if damaged or if others can write to them."""

import json
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxkv.config.cache import CacheConfig
from jaxkv.errors import BadBundle
from jaxkv.links.values import Values
from jaxkv.programs import compile as compilation
from jaxkv.programs.bundle import Bundle, _manifest_digest, facts_of, write_bundle
from jaxkv.programs.fingerprint import environment
from jaxkv.programs.manifest import Lowering, Programs
from jaxkv.runner.program_specs import StepSpec
from jaxkv.sampling.features import Features
from tests.devices import needs_devices
from tests.jax_settings import cache_settings

KEYS = [StepSpec(rows, rows, (1,), decode=True) for rows in (2, 4)]
FACTS = {"device": "H200", "model": {"layers": 2, "heads": 4}, "groups": {"0": "page"}}
DEVICES = jax.devices()[:1]
VALUES = Values((StepSpec, Features))

pytestmark = pytest.mark.usefixtures("compiled_anew")


def run(params, cache, ids):
    cache = cache.at[ids].add(params["scale"], mode="drop", unique_indices=True)
    return cache, cache[ids]


def arguments(rows):
    cache = jnp.ones((8, 4), jnp.float32)
    return {"scale": jnp.full(4, 3.0, jnp.float32)}, cache, np.arange(rows, dtype=np.int32)


def structure(key):
    return jax.tree.structure((arguments(key.rows), {}))


@pytest.fixture
def jax_cache(tmp_path, compiled_anew, monkeypatch):
    """Turns JAX's cache on, for programs of any size, in a folder of its own."""
    monkeypatch.setattr(compilation, "open_store", lambda: None)
    with cache_settings(
        jax_enable_compilation_cache=True,
        jax_compilation_cache_dir=str(tmp_path / "cache"),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=-1,
    ):
        yield


@pytest.fixture
def programs():
    made = Programs()
    made.get_all(
        {
            key: lambda key=key: Lowering(run, jax.eval_shape(lambda: arguments(key.rows)))
            for key in KEYS
        }
    )
    return made


@pytest.fixture
def folder(tmp_path, programs):
    made = tmp_path / "bundle"
    write_bundle(made, FACTS, programs.manifest(), DEVICES, VALUES)
    return made


def test_every_program_comes_back_under_its_spec_and_does_the_same(folder, programs):
    bundle = Bundle(folder)
    bundle.refuse_unless(FACTS)
    built = bundle.load(DEVICES, VALUES, structure)
    assert list(built) == sorted(KEYS)
    again = Programs()
    again.add(built)
    for key in KEYS:
        program = again.get(key, lambda: pytest.fail("a bundled program was built"))
        assert program.loaded
        assert program.report == programs.get(key, lambda: None).report
        ours, theirs = (
            one.get(key, lambda: None)(*arguments(key.rows)) for one in (again, programs)
        )
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_on_a_cpu_a_program_that_came_from_a_cache_is_refused(tmp_path, jax_cache):
    """XLA would leave out some of its functions, and only its first run would tell."""

    def made():
        return Programs().get(KEYS[0], lambda: Lowering(run, jax.eval_shape(lambda: arguments(2))))

    assert not made().loaded
    program = made()
    assert program.loaded
    with pytest.raises(BadBundle, match=r"it was loaded, not compiled.*CACHE=false and compile it"):
        write_bundle(tmp_path / "bundle", FACTS, [program], DEVICES, VALUES)
    assert not (tmp_path / "bundle").exists()


@needs_devices(3)
def test_programs_of_several_devices_come_back_for_these_devices_alone(tmp_path):
    devices = jax.devices()[:2]
    places = NamedSharding(Mesh(np.asarray(devices), ("tensor",)), PartitionSpec(None, "tensor"))
    params, cache, ids = jax.eval_shape(lambda: arguments(2))
    cache = jax.ShapeDtypeStruct(cache.shape, cache.dtype, sharding=places)
    programs = Programs()
    made = programs.get(KEYS[0], lambda: Lowering(run, (params, cache, ids)))
    folder = tmp_path / "bundle"
    write_bundle(folder, environment(devices), [made], devices, VALUES)
    for others, place in (([0, 2], 1), ([1, 0], 0)):
        there = [jax.devices()[number] for number in others]
        with pytest.raises(BadBundle, match=rf"devices\.{place}: cpu {others[place]} here, cpu"):
            Bundle(folder).refuse_unless(environment(there))
    bundle = Bundle(folder)
    bundle.refuse_unless(environment(devices))
    [built] = bundle.load(devices, VALUES, structure).values()
    given = jax.device_put(arguments(2)[1], places)
    params, _, ids = jax.device_put(arguments(2), places.update(spec=PartitionSpec()))
    [back, read] = built.compiled(params, given, ids)
    assert back.sharding.is_equivalent_to(places, 2)
    np.testing.assert_array_equal(np.asarray(read), np.full((2, 4), 4.0))
    assert given.is_deleted()


def test_what_differs_is_named_on_both_sides_and_the_rest_is_not(folder):
    here = FACTS | {"device": "H100", "model": {"layers": 2, "heads": 8, "experts": 3}}
    with pytest.raises(BadBundle) as refused:
        Bundle(folder).refuse_unless(here)
    lines = str(refused.value).split("\n")
    assert lines[1:-1] == [
        "  device: H100 here, H200 in the bundle",
        "  model.heads: 8 here, 4 in the bundle",
        "  model.experts: 3 here, nothing in the bundle",
    ]
    assert "jaxkv compile" in lines[-1]


def test_a_fact_that_only_the_bundle_has_counts(folder):
    with pytest.raises(BadBundle, match=r"model\.heads: nothing here, 4 in the bundle"):
        Bundle(folder).refuse_unless({"model": {"layers": 2}})
    Bundle(folder).refuse_unless({"device": "H200"})


def test_of_long_texts_the_words_that_differ_are_shown(tmp_path):
    flags = [f"flag{number}" for number in range(100)]
    write_bundle(tmp_path / "long", {"cpu": " ".join([*flags, "amx"])}, [], DEVICES, VALUES)
    with pytest.raises(BadBundle, match="cpu: avx9 here, amx in the bundle"):
        Bundle(tmp_path / "long").refuse_unless({"cpu": " ".join([*flags, "avx9"])})


def test_many_differences_are_counted(folder):
    with pytest.raises(BadBundle, match="and 12 more differences"):
        Bundle(folder).refuse_unless({f"option{number}": number for number in range(20)})


def change(path, content):
    path.write_bytes(content(path.read_bytes()))


@pytest.mark.parametrize("name", ["specs.json", "000-decode_2x2x1.program"])
def test_a_damaged_or_missing_file_is_an_error_and_stays(folder, name):
    change(folder / name, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(BadBundle, match=f"damaged, make it again with jaxkv compile.*{name}"):
        Bundle(folder).load(DEVICES, VALUES, structure)
    (folder / name).unlink()
    with pytest.raises(BadBundle, match=name):
        Bundle(folder).load(DEVICES, VALUES, structure)


def test_whole_files_that_have_changed_places_are_damage(folder):
    first, second = sorted(folder.glob("*.program"))
    before = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(before)
    with pytest.raises(BadBundle, match="damaged"):
        Bundle(folder).load(DEVICES, VALUES, structure)


def test_a_folder_that_this_user_cannot_read_is_named(folder, monkeypatch):
    def refused(_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(type(folder), "iterdir", refused)
    with pytest.raises(
        BadBundle, match=r"this user cannot read all of the folder .*change its owner"
    ):
        Bundle(folder)


def test_a_folder_without_a_whole_manifest_is_no_bundle(folder, tmp_path):
    with pytest.raises(BadBundle, match="no such folder; make one with jaxkv compile"):
        Bundle(tmp_path / "none")
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(BadBundle, match="has format 99, and this jaxkv reads 2"):
        Bundle(folder)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(BadBundle, match="damaged"):
        Bundle(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(BadBundle, match="holds no bundle"):
        Bundle(folder)


MISSING = object()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("facts", []),
        ("facts", None),
        ("facts", MISSING),
        ("facts.model", ["layers"]),
        ("facts.groups.0", None),
        ("facts.groups.0", MISSING),
        ("facts.device", "H100"),
        ("specs_sha256", 5),
        ("specs_sha256", MISSING),
        ("sha256", {}),
        ("sha256", MISSING),
    ],
)
def test_a_manifest_with_an_edited_entry_is_refused(folder, place, value):
    path = folder / "manifest.json"
    inner = manifest = json.loads(path.read_text())
    *outer, name = place.split(".")
    for key in outer:
        inner = inner[key]
    inner[name] = value
    if value is MISSING:
        del inner[name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(BadBundle, match=r"make it again with jaxkv compile .*: it was edited"):
        Bundle(folder)


@pytest.mark.parametrize(
    "text",
    ["null", "[1]", "5", "{}", '"format"', pytest.param("[" * 100_000, id="deep"), "\x00"],
)
def test_a_manifest_without_a_format_is_refused(folder, text):
    (folder / "manifest.json").write_text(text)
    with pytest.raises(BadBundle, match=r"damaged, make it again with jaxkv compile.*Error\("):
        Bundle(folder)


def test_a_manifest_in_other_white_space_or_order_is_the_same(folder):
    path = folder / "manifest.json"
    for options in ({}, {"sort_keys": True, "indent": 4}):
        path.write_text(json.dumps(json.loads(path.read_text()), **options))
        Bundle(folder).refuse_unless(FACTS)


def test_a_manifest_that_never_had_facts_is_refused(folder):
    path = folder / "manifest.json"
    manifest = {"format": json.loads(path.read_text())["format"]}
    path.write_text(json.dumps(manifest | {"sha256": _manifest_digest(manifest)}))
    with pytest.raises(BadBundle, match=r"damaged, make it again .*: it lacks 'facts'"):
        Bundle(folder)


def test_a_link_to_nothing_is_told(folder):
    (folder / "more").symlink_to(folder / "nothing")
    with pytest.raises(BadBundle, match=r"cannot read all of the folder .*more"):
        Bundle(folder)


@pytest.mark.parametrize("name", [".", "specs.json", "000-decode_2x2x1.program"])
def test_what_others_can_write_to_is_not_loaded(folder, name):
    path = folder / name
    os.chmod(path, path.stat().st_mode | stat.S_IWGRP)
    with pytest.raises(BadBundle, match=r"others can write to .*chmod -R go-w"):
        Bundle(folder)
    os.chmod(path, path.stat().st_mode & ~stat.S_IWGRP)
    Bundle(folder)


def test_what_the_device_cannot_serialise_is_named_and_nothing_is_left(
    tmp_path, programs, monkeypatch
):
    """XLA's CPU backend cannot serialise some programs that sort."""

    def refuse(compiled):
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: `LessThan` is not serializable.")

    monkeypatch.setattr(serialize_executable, "serialize", refuse)
    refused = r"decode\(tokens=2.* cannot be put into a bundle on cpu: .*`LessThan`"
    with pytest.raises(BadBundle, match=refused):
        write_bundle(tmp_path / "bundle", FACTS, programs.manifest(), DEVICES, VALUES)
    assert not (tmp_path / "bundle").exists()


def test_no_folder_is_overwritten(folder, programs):
    with pytest.raises(FileExistsError):
        write_bundle(folder, FACTS, programs.manifest(), DEVICES, VALUES)


def test_facts_are_what_json_holds():
    found = facts_of({"cache": CacheConfig(), "shape": (2, None), 3: jnp.float32})
    assert json.loads(json.dumps(found)) == found
    assert found["cache"]["page_size"] == CacheConfig().page_size
    assert found["shape"] == {"0": 2, "1": None}
