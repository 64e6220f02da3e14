"""Engines over a tiny random model, with small pools full of junk, and the oracle that they are compared with."""

from functools import cache
from itertools import count

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import default_model
from jaxkv.cache.state import Cache
from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.engine import Engine
from jaxkv.engine.request import Request
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.sampling.processors import NO_PROCESSORS
from jaxkv.text.tokenizer import load_tokenizer
from tests.engine.oracle import generated
from tests.few_programs import few_programs

VOCAB, LONGEST, ROWS, PAGE = 61, 64, 4, 8
OTHER_HOLDER = 10**9
ROPES = {
    "plain": RopeConfig(rotary_dim=8),
    # The angles of every token depend on how long its prompt is, so prompts stay whole.
    "dynamic": RopeConfig(rotary_dim=8, kind="dynamic", factor=4.0, original_max_positions=16),
}
TOKENIZER = load_tokenizer(default_model.path())
_MODELS, _PROGRAMS = {}, {}


def model_of(rope):
    """Returns a tiny model whose weights make some tokens clearly more likely than others."""
    if rope not in _MODELS:
        model = Decoder(
            ModelConfig(
                family="llama",
                vocab_size=VOCAB,
                hidden_size=32,
                num_layers=2,
                heads=4,
                kv_heads=2,
                head_dim=8,
                ffn_size=48,
                max_positions=LONGEST,
                rope=ROPES[rope],
                windows=(None, 5),
            )
        )
        params = model.init_params(jax.random.key(5), jnp.float32)
        params = jax.tree.map(
            lambda leaf: leaf * 6 if leaf.ndim == 2 and len(leaf) > 2 else leaf, params
        )
        _MODELS[rope] = model, params
    return _MODELS[rope]


def programs_of(rope, processors=NO_PROCESSORS):
    """Returns the programs that all runners of a model and of some processors share."""
    return _PROGRAMS.setdefault((rope, processors), Programs())


def sequence_runner_for(*, rope="plain", programs=None, processors=NO_PROCESSORS, **counts):
    """Returns an sequence_runner with a new cache; those of equal pools share their compiled programs."""
    model, params = model_of(rope)
    wish = CacheConfig(max_sequences=ROWS, page_size=PAGE, checkpoint_bytes=None)
    limits = {"dtype": "float32", "max_model_len": LONGEST, "free_bytes": None}
    layout, budget = plan_cache(model, wish, **limits, processor_words=processors.num_words)
    programs = programs or programs_of(rope, processors)
    sequence_runner = SequenceRunner(
        ModelRunner(model, params, layout, dict(budget.counts) | counts, programs, processors),
        max_tokens=LONGEST,
        max_rows=ROWS,
    )
    fill_free(sequence_runner)
    return sequence_runner


def fill_free(sequence_runner):
    """Writes junk into pages and states that are free: NaN, or all bits set.

    Biases of the sampling group stay clean, as the engine promises to keep them.
    """
    owner, allocator = sequence_runner.runner.owner, sequence_runner.allocator
    live = owner.take()
    arrays = list(live.arrays)
    for group in sequence_runner.runner.layout.groups:
        first = 0 if group.unit == "page" else 1
        pool = allocator.pool(group.name)
        ids = [at for at in range(first, owner.counts[group.name]) if not pool.references(at)]
        for spec in group.spec.arrays:
            if not ids or spec.role.startswith("bias"):
                continue
            dtype = np.dtype(spec.dtype)
            junk = np.nan if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).max
            for layer in group.layers:
                place = live.keys.index((layer, spec.role))
                # On the host, where no number of ids compiles anything.
                values = np.array(arrays[place])
                values[ids] = junk
                arrays[place] = jnp.array(values)
    owner.put(Cache(arrays=tuple(arrays), keys=live.keys))


def engine_for(
    *,
    rope="plain",
    programs=None,
    processors=NO_PROCESSORS,
    free_pages=None,
    clock=None,
    all_sizes=False,
    **config,
):
    """Returns an engine; of each group all but `free_pages` pages are taken.

    Steps that generate have one size, unless `all_sizes`.
    """
    sequence_runner = sequence_runner_for(rope=rope, programs=programs, processors=processors)
    if free_pages is not None:
        sequence_runner.allocator.open(OTHER_HOLDER)
        sequence_runner.allocator.reserve(
            OTHER_HOLDER, (ROWS * LONGEST // PAGE - free_pages) * PAGE
        )
    options = {"token_budget": 16} | config
    clocks = {} if clock is None else {"clock": clock}
    engine = Engine(sequence_runner, TOKENIZER, EngineConfig(**options), **clocks)
    if not all_sizes:
        few_programs(engine)
    keep_junk(engine)
    return engine


def keep_junk(engine):
    """Writes junk into freed pages and states, and into a rebuilt cache, before every plan."""
    sequence_runner, plan = engine.sequence_runner, engine.scheduler.plan
    release, given_back, filled = sequence_runner.allocator.release, count(), [None]
    free_out_of_window = sequence_runner.allocator.free_out_of_window

    def counted(number):
        release(number)
        next(given_back)

    def counted_part(number, num_tokens):
        held = [
            sequence_runner.allocator.num_free(group.name)
            for group in sequence_runner.runner.layout.groups
        ]
        free_out_of_window(number, num_tokens)
        if held != [
            sequence_runner.allocator.num_free(group.name)
            for group in sequence_runner.runner.layout.groups
        ]:
            next(given_back)

    def plan_over_junk():
        marks = sequence_runner.runner.owner.rebuilds, repr(given_back)
        if marks != filled[0]:
            fill_free(sequence_runner)
            filled[0] = marks
        return plan()

    sequence_runner.allocator.release = counted
    sequence_runner.allocator.free_out_of_window = counted_part
    engine.scheduler.plan = plan_over_junk


def request_of(prompt, *, seed=0, priority=0, stop_ids=(), **params):
    params = {"temperature": 0.0, "max_tokens": 8} | params
    return Request(
        prompt=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        stop_ids=stop_ids,
        priority=priority,
    )


def oracle(requests, rope="plain"):
    """Returns what `jaxkv.generate` makes of these requests."""
    return list(_answers(tuple(requests), rope))


@cache
def _answers(requests, rope):
    return generated(*model_of(rope), requests, rows=ROWS)


def assert_equal(sequences, finished):
    """Tokens and reasons are equal, and the log-probabilities within what float32 leaves."""
    for sequence, wanted in zip(sequences, finished, strict=True):
        assert tuple(sequence.token_ids) == wanted.token_ids
        assert sequence.reason == wanted.reason
        if wanted.logprobs is not None:
            for got, want in zip(sequence.logprobs, wanted.logprobs, strict=True):
                values = [got[token] for token in want]
                np.testing.assert_allclose(values, list(want.values()), atol=1e-4)


def too_large(caplog):
    """Returns the shapes that are not run any more, as the log names them."""
    records = [one for one in caplog.records if one.name == "jaxkv.engine.steps.oom_backoff"]
    return [one.args[0] for one in records if one.msg.startswith("out of memory again")]


def assert_idle(engine):
    """Asserts that only the index holds pages and states, the records agree, and reserved states were not written."""
    owner = engine.runner.owner
    states = [group for group in engine.runner.layout.groups if group.unit == "state"]
    for group in [] if owner.poisoned else states:
        live = owner.handle().cache
        places = {(layer, array.role) for layer in group.layers for array in group.spec.arrays}
        for place, array in zip(live.keys, live.arrays, strict=True):
            assert place not in places or not np.asarray(array[0]).any(), (group.name, place)
    allocator = engine.sequence_runner.allocator
    if allocator.is_open(OTHER_HOLDER):
        allocator.release(OTHER_HOLDER)
    allocator.check()
    if engine.prefix is not None:
        engine.prefix.check()
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    for group in engine.runner.layout.groups:
        free = allocator.num_free(group.name) + allocator.num_reclaimable(group.name)
        assert free == engine.runner.owner.counts[group.name] - (group.unit == "state")
