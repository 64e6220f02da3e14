"""Prefixes saved by one engine and loaded by another: the tokens are those computed anew, for every kind of cache."""

import random
from functools import cache

import jax
import numpy as np
import pytest

from jaxkv.config.blocks import DeltaConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.saved_prefixes import PrefixCounts, load_prefixes, save_prefixes
from jaxkv.errors import BadCheckpoint, CachePoisoned
from jaxkv.models.decoder import Decoder
from jaxkv.offload.prefix_catalogue import collect
from tests.engine import engines, host_engines, hybrid, latent
from tests.engine.hybrid import VOCAB, ask, assert_same, check, run, texts, uncached

ALL = CheckpointPolicy()


@cache
def delta_network():
    """Returns a model of gated delta and attention layers, and its parameters."""
    made = Decoder(
        ModelConfig(
            family="hybrid",
            vocab_size=VOCAB,
            hidden_size=32,
            num_layers=2,
            heads=2,
            kv_heads=1,
            head_dim=16,
            ffn_size=32,
            max_positions=256,
            rope=RopeConfig(rotary_dim=16),
            windows=(None, None),
            pattern=(("delta", "gated"), ("attention", "gated")),
            delta=DeltaConfig(key_heads=1, value_heads=2, key_dim=8, value_dim=8, d_conv=4),
        )
    )
    return made, made.init_params(jax.random.key(2), "float32")


def hybrid_engine(**options):
    sizes = {"page": 8, "longest": 64, "budget": 32, "tokens": 32, "policy": ALL}
    return hybrid.engine_of(**sizes | {"full_hits": True} | options)


KINDS = {
    "window": engines.engine_for,
    "latent": latent.engine_of,
    "sparse latent": lambda: latent.engine_of(latent.SPARSE),
    "latent and window": lambda: latent.engine_of(window=12),
    "mamba2": lambda: hybrid_engine(full_hits=False),
    "mamba2 in bfloat16": lambda: hybrid_engine(dtype="bfloat16"),
    "full hits": hybrid_engine,
    "states alone": lambda: hybrid_engine(pattern=(("mamba2",), ("mamba2",))),
    "mamba2 and window": lambda: hybrid_engine(
        pattern=(("mamba2", "gated"), ("attention", "gated"), ("attention", "gated")),
        windows=(None, 12, None),
    ),
    "gated delta": lambda: hybrid_engine(network=delta_network()),
}
# States beside pages, and states alone. Pages with index keys are compared bit for bit below.
FAST = "full hits", "states alone"


def told(engine, prompts):
    return [engine.prefix.explain(prompt).num_reused for prompt in prompts]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in FAST)) for kind in KINDS]
)
def test_loaded_prefixes_are_hit_and_change_no_token(kind, tmp_path):
    # Prompts that share a beginning, one that a longer one continues, and one that ends inside a page.
    saving, loading = KINDS[kind](), KINDS[kind]()
    stem, *ends = texts(3, 20, 9, 15, 3)
    prompts = [stem + end for end in ends]
    run(saving, *prompts[:2])
    run(saving, prompts[2])
    more = [*prompts, prompts[0] + texts(4, 5)[0], texts(5, 12)[0]]
    wanted = told(saving, more)
    assert min(wanted[:4]) >= 16
    saved = save_prefixes(saving, tmp_path / "prefixes")
    assert saved.num_bytes == (tmp_path / "prefixes").stat().st_size
    loaded = load_prefixes(loading, tmp_path / "prefixes")
    check(loading)
    names = "tokens", "pages", "checkpoints"
    assert [getattr(loaded, name) for name in names] == [getattr(saved, name) for name in names]
    assert (loaded.present, loaded.left_out) == (0, 0)
    assert told(loading, more) == wanted
    made = [run(loading, prompt)[0] for prompt in more]
    assert made[0].cached == wanted[0]
    # Those that come later may find more, which the ones before have left.
    assert all(one.cached >= least for one, least in zip(made, wanted, strict=True))
    assert_same(made, uncached(saving, *more))
    engines.assert_idle(loading)


def bits_of(engine):
    """Returns what an index keeps by its tokens, with the bytes of each unit."""
    collected, found = collect(engine.prefix, None), {}
    catalogue, layout = collected.catalogue, engine.runner.layout
    live = engine.runner.owner.handle().cache

    def note(name, row, tail, unit):
        text = b"".join(catalogue.tokens[row] for row in catalogue.path(row)) + tail
        group = layout.group(name)
        found[name, text] = [
            np.array(live.layer(layer)[array.role][unit]).tobytes()
            for layer in group.layers
            for array in group.spec.arrays
        ]

    for name, rows in catalogue.pages.items():
        for row, source in zip(rows, collected.sources[name], strict=False):
            note(name, row, b"", source.unit)
    for group in layout.state_groups:
        pairs = zip(catalogue.checkpoints, collected.sources[group.name], strict=True)
        for one, source in pairs:
            note(group.name, one.row, one.tail, source.unit)
    return found


@pytest.mark.parametrize(
    "kind", [pytest.param("window", marks=pytest.mark.slow), "sparse latent", "full hits"]
)
def test_every_page_and_state_comes_back_bit_for_bit(kind, tmp_path):
    saving, loading = KINDS[kind](), KINDS[kind]()
    for prompt in texts(7, 40, 21, 8):
        run(saving, prompt)
    before = bits_of(saving)
    assert len(before) > 5
    save_prefixes(saving, tmp_path / "prefixes")
    load_prefixes(loading, tmp_path / "prefixes")
    assert bits_of(loading) == before
    # And from there once more.
    save_prefixes(loading, tmp_path / "again")
    third = KINDS[kind]()
    load_prefixes(third, tmp_path / "again")
    assert bits_of(third) == before


def test_what_is_cached_already_is_not_loaded_again(tmp_path):
    engine = hybrid_engine()
    prompts = texts(8, 30, 26)
    made = [run(engine, prompt)[0] for prompt in prompts]
    saved = save_prefixes(engine, tmp_path / "prefixes")
    again = load_prefixes(engine, tmp_path / "prefixes")
    assert again == PrefixCounts(
        tokens=0, pages=0, checkpoints=0, num_bytes=0, present=saved.pages + saved.checkpoints
    )
    check(engine)
    # Half of it.
    other = hybrid_engine()
    run(other, prompts[0])
    there = other.prefix.num_checkpoints + len(other.prefix.kept_pages.trees["gqa"])
    loaded = load_prefixes(other, tmp_path / "prefixes")
    assert loaded.present == there > 0
    assert loaded.pages + loaded.checkpoints == again.present - there > 0
    check(other)
    assert_same([run(other, prompt)[0] for prompt in prompts], made)


def test_only_beginnings_of_the_prompts_are_saved(tmp_path):
    engine = hybrid_engine()
    stem, one, other, stranger = texts(9, 16, 14, 11, 30)
    for prompt in (stem + one, stem + other, stranger):
        run(engine, prompt)
    save_prefixes(engine, tmp_path / "one", [stem + one])
    fresh = hybrid_engine()
    load_prefixes(fresh, tmp_path / "one")
    wanted = told(engine, [stem + one])
    assert told(fresh, [stem + one, stranger]) == [*wanted, 0]
    assert told(fresh, [stem + other])[0] <= len(stem)
    saved = save_prefixes(engine, tmp_path / "none", [texts(10, 20)[0]])
    assert (saved.tokens, saved.pages, saved.checkpoints) == (0, 0, 0)
    assert load_prefixes(fresh, tmp_path / "none").pages == 0
    saved = save_prefixes(engine, tmp_path / "none", [])
    assert saved.pages == 0


def test_nothing_under_a_salt_reaches_the_file(tmp_path):
    engine = hybrid_engine()
    secret, public = texts(11, 33, 30)
    run(engine, secret, salt="tenant")
    run(engine, public)
    alone = hybrid_engine()
    run(alone, public)
    path = tmp_path / "prefixes"
    assert save_prefixes(engine, path) == save_prefixes(alone, tmp_path / "alone")
    assert np.array(secret[:8], np.int32).tobytes() not in path.read_bytes()
    assert np.array(public[:8], np.int32).tobytes() in path.read_bytes()
    fresh = hybrid_engine()
    load_prefixes(fresh, path)
    assert fresh.prefix.explain(secret, "tenant").num_reused == 0
    assert fresh.prefix.explain(public).num_reused > 0


def test_a_small_cache_takes_what_more_prompts_share(tmp_path):
    # 12 pages and a stem of 3: the stem, and then whole texts one by one.
    saving = engines.engine_for()
    stem, *ends = texts(12, 24, 17, 17, 17, 17)
    lone = texts(13, 40)[0]
    run(saving, lone, max_tokens=1)
    for end in ends:
        run(saving, stem + end, max_tokens=1)
    saved = save_prefixes(saving, tmp_path / "prefixes")
    small = engines.engine_for(free_pages=7)
    loaded = load_prefixes(small, tmp_path / "prefixes")
    check(small)
    assert loaded.left_out == saved.pages - loaded.pages > 0
    found = told(small, [stem + end for end in ends])
    assert sorted(found) == [24, 24, 40, 40]
    assert told(small, [lone]) == [0]
    made = [run(small, stem + end, max_tokens=1)[0] for end in ends]
    assert made[0].cached == found[0]
    assert_same(made, uncached(saving, *(stem + end for end in ends), max_tokens=1))


def test_no_room_at_all_loads_nothing(tmp_path):
    saving = engines.engine_for()
    run(saving, texts(12, 24)[0])
    saved = save_prefixes(saving, tmp_path / "prefixes")
    full = engines.engine_for(free_pages=0)
    loaded = load_prefixes(full, tmp_path / "prefixes")
    assert (loaded.tokens, loaded.pages, loaded.left_out) == (0, 0, saved.pages)
    check(full)


def test_loading_evicts_what_is_out_of_use_and_harms_no_request(tmp_path):
    saving, busy = engines.engine_for(), engines.engine_for(free_pages=10)
    prompts = texts(14, 40, 40)
    for prompt in prompts:
        run(saving, prompt)
    save_prefixes(saving, tmp_path / "prefixes")
    old, running = texts(15, 24, 20)
    run(busy, old)
    assert told(busy, [old]) == [23]
    [request] = busy.add([ask(running, max_tokens=12)])
    for _ in range(3):
        busy.step()
    loaded = load_prefixes(busy, tmp_path / "prefixes")
    check(busy)
    assert loaded.pages > 0
    assert loaded.left_out > 0
    assert told(busy, [old]) == [0]
    busy.run([request])
    check(busy)
    assert_same([request], uncached(saving, running, max_tokens=12))


def test_checkpoints_are_left_out_where_states_are_short(tmp_path):
    saving, small = hybrid_engine(), hybrid_engine(checkpoints=2)
    prompts = texts(16, 33, 41, 26)
    for prompt in prompts:
        run(saving, prompt)
    saved = save_prefixes(saving, tmp_path / "prefixes")
    loaded = load_prefixes(small, tmp_path / "prefixes")
    check(small)
    assert (loaded.checkpoints, loaded.left_out) == (2, saved.checkpoints - 2)
    assert small.prefix.num_checkpoints == 2
    assert max(told(small, prompts)) > 0
    assert_same([run(small, prompt)[0] for prompt in prompts], uncached(saving, *prompts))


def test_what_lies_on_the_host_is_saved_too(tmp_path):
    # The device's pages hold one or two of four prompts.
    saving = host_engines.engine_for()
    prompts = host_engines.prompts_of(5, rounds=1)
    host_engines.serve(saving, prompts)
    assert len(saving.host.tier) > 0
    on_device = told(saving, prompts)
    save_prefixes(saving, tmp_path / "prefixes")
    assert told(saving, prompts) == on_device
    loading = host_engines.engine_for(free_pages=32)
    loaded = load_prefixes(loading, tmp_path / "prefixes")
    assert loaded.left_out == 0
    found = told(loading, prompts)
    assert min(on_device) < min(found)
    assert host_engines.cached(host_engines.serve(loading, prompts))[0] == found[0] >= 40
    # Into a small device with a host tier: what is evicted by the load goes there, and comes back.
    small = host_engines.engine_for()
    [other] = host_engines.prompts_of(6, beginnings=1, rounds=1)
    host_engines.serve(small, [other])
    load_prefixes(small, tmp_path / "prefixes")
    host_engines.check(small)
    made = host_engines.serve(small, [other])
    assert made[0].cached > 0
    assert small.host.stats.hits == 1


def test_random_prompts_survive_a_chain_of_files(tmp_path):
    # Each engine loads what the one before has saved, in caches of other sizes.
    draw = random.Random(1)
    stems, path = texts(17, 12, 24, 33), tmp_path / "prefixes"
    truth = hybrid_engine()
    for turn in range(6):
        engine = hybrid_engine(checkpoints=draw.choice([2, 5, 12]), idle_checks=False)
        if draw.random() < 0.5:
            # All but 14 pages are taken.
            engine.sequence_runner.allocator.open(engines.OTHER_HOLDER)
            engine.sequence_runner.allocator.reserve(engines.OTHER_HOLDER, 34 * 8)
        if turn:
            load_prefixes(engine, path)
            check(engine)
        prompts = [
            draw.choice(stems) + texts(turn * 10 + at, draw.randrange(1, 14))[0] for at in range(3)
        ]
        made = [run(engine, prompt, max_tokens=2)[0] for prompt in prompts]
        assert_same(made, uncached(truth, *prompts, max_tokens=2))
        save_prefixes(engine, path)
    assert list(tmp_path.iterdir()) == [path]


def test_another_cache_layout_is_refused_by_name(tmp_path):
    engine = hybrid_engine()
    run(engine, texts(18, 30)[0])
    save_prefixes(engine, tmp_path / "prefixes")
    for other, message in (
        (hybrid_engine(page=16), "another cache layout: got .*page_size.* 8.*, wanted .* 16"),
        (hybrid_engine(full_hits=False), "another cache layout"),
        (engines.engine_for(), "another model"),
    ):
        with pytest.raises(BadCheckpoint, match=message):
            load_prefixes(other, tmp_path / "prefixes")
        assert told(other, [texts(18, 30)[0]]) == [0]
        engines.assert_idle(other)


def test_other_weights_are_refused(tmp_path):
    # One bit of one number.
    engine = hybrid_engine()
    run(engine, texts(18, 30)[0])
    save_prefixes(engine, tmp_path / "prefixes")
    other = hybrid_engine()
    leaves, structure = jax.tree.flatten(other.runner.params)
    values = np.array(leaves[-1])
    values.view(np.uint32).reshape(-1)[3] ^= 1
    other.runner.params = jax.tree.unflatten(structure, [*leaves[:-1], jax.numpy.array(values)])
    with pytest.raises(BadCheckpoint, match="other weights: got the checksum"):
        load_prefixes(other, tmp_path / "prefixes")
    engines.assert_idle(other)


def test_a_write_that_costs_the_cache_leaves_nothing_behind(tmp_path, monkeypatch):
    engine = hybrid_engine()
    (prompt,) = texts(19, 30)
    run(engine, prompt)
    save_prefixes(engine, tmp_path / "prefixes")
    other = hybrid_engine()
    update, calls = other.runner.update, []

    def failing(spec, *arguments):
        calls.append(spec)
        if len(calls) == 2:
            other.runner.owner.poison("the test says so")
            raise CachePoisoned("the test says so")
        return update(spec, *arguments)

    monkeypatch.setattr(other.runner, "update", failing)
    with pytest.raises(CachePoisoned):
        load_prefixes(other, tmp_path / "prefixes")
    check(other)
    made = run(other, prompt)
    assert made[0].cached == 0
    assert other.recoveries == 1
    load_prefixes(other, tmp_path / "prefixes")
    assert_same([run(other, prompt)[0], *made], 2 * uncached(engine, prompt))
    engines.assert_idle(other)


def test_without_a_prefix_cache_there_is_nothing_to_save(tmp_path):
    engine = engines.engine_for(prefix_cache=False)
    for act in (save_prefixes, load_prefixes):
        with pytest.raises(ValueError, match="the prefix cache is off"):
            act(engine, tmp_path / "prefixes")
    assert list(tmp_path.iterdir()) == []
