"""Engines over a tiny model of Mamba-2 and attention layers, with room for checkpoints, and records of their steps."""

from dataclasses import replace

import jax
import numpy as np

from jaxkv.config.blocks import MambaConfig
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checkpoint_policy import CheckpointPolicy
from jaxkv.config.engine import EngineConfig
from jaxkv.config.model import ModelConfig, RopeConfig
from jaxkv.engine.engine import Engine
from jaxkv.models.decoder import Decoder
from jaxkv.plan import plan_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.sequence_runner import SequenceRunner
from tests.engine.engines import OTHER_HOLDER, TOKENIZER, VOCAB, fill_free, keep_junk, request_of

CHUNK, ROWS, STATES = 16, 5, 12
ISSUE = CheckpointPolicy(end_of_prompt=False, end_of_generation=False)
"""Divergence, last aligned and penultimate, as in the issue's traces; a test sets the grid to its page size."""
_MODELS, _PROGRAMS = {}, {}


def model(
    pattern=(("mamba2", "gated"), ("attention", "gated")), windows=(None, None), dtype="float32"
):
    """Returns a model with random weights that make some tokens clearly more likely than others."""
    key = pattern, windows, dtype
    if key not in _MODELS:
        made = Decoder(
            ModelConfig(
                family="hybrid",
                vocab_size=VOCAB,
                hidden_size=64,
                num_layers=len(pattern),
                heads=4,
                kv_heads=2,
                head_dim=16,
                ffn_size=64,
                max_positions=2048,
                rope=RopeConfig(rotary_dim=16),
                windows=windows,
                pattern=pattern,
                mamba=MambaConfig(
                    heads=4, head_dim=16, d_state=16, d_conv=4, groups=2, chunk_size=CHUNK
                ),
            )
        )
        params = made.init_params(jax.random.key(11), dtype)
        params = jax.tree.map(
            lambda leaf: leaf * 6 if leaf.ndim > 1 and len(leaf) > 4 else leaf, params
        )
        _MODELS[key] = made, params
    return _MODELS[key]


def engine_of(
    *,
    page,
    longest,
    budget,
    tokens,
    policy=ISSUE,
    checkpoints=STATES,
    pages=None,
    free_pages=None,
    full_hits=False,
    host_bytes=0,
    dtype="float32",
    network=None,
    **options,
):
    """Returns an engine of two programs: prompts of up to `tokens` tokens in a step, and one token for each row.

    Args:
        page: tokens per page.
        longest: tokens of a sequence.
        budget: tokens of a step.
        tokens: that the prefill program is padded to.
        policy: where checkpoints are left.
        checkpoints: how many may be kept; there are states for `STATES`.
        pages: how many pages there are, if not enough for all; other numbers are other programs.
        free_pages: how many of them are free; `None` for all.
        full_hits: checkpoints keep what the next token is chosen from.
        host_bytes: for what is evicted.
        dtype: of the model and of what it remembers.
        network: a model and its parameters, if not one of `model`.
        options: of `EngineConfig`, and `pattern` and `windows`, those of the model.
    """
    shape = {name: options.pop(name) for name in ("pattern", "windows") if name in options}
    network, params = network or model(**shape, dtype=dtype)
    wish = CacheConfig(
        max_sequences=ROWS, page_size=page, checkpoint_bytes=2**24, full_hits=full_hits
    )
    layout, plan = plan_cache(network, wish, dtype=dtype, max_model_len=longest, free_bytes=None)
    counts = dict(plan.counts) | {g.name: ROWS + 1 + STATES for g in layout.state_groups}
    counts |= {g.name: pages or counts[g.name] + 8 for g in layout.paged_groups}
    key = repr(network), repr(counts), page, longest, dtype
    programs = _PROGRAMS.setdefault(key, Programs())
    sequence_runner = SequenceRunner(
        ModelRunner(network, params, layout, counts, programs), max_tokens=longest, max_rows=ROWS
    )
    if free_pages is not None:
        allocator, [paged] = sequence_runner.allocator, layout.paged_groups
        allocator.open(OTHER_HOLDER)
        allocator.reserve(OTHER_HOLDER, (allocator.num_free(paged.name) - free_pages) * page)
    fill_free(sequence_runner)
    config = EngineConfig(token_budget=budget, checkpoints=policy, **options)
    engine = Engine(sequence_runner, TOKENIZER, config, host_bytes=host_bytes)
    shapes = engine.shapes
    shapes.decode_rows, shapes.token_buckets, shapes.lengths = (ROWS,), (tokens,), (longest,)
    engine.scheduler._fill = lambda least, most: most
    if engine.prefix is not None:
        engine.prefix._states.capacity = min(engine.prefix._states.capacity, checkpoints)
    keep_junk(engine)
    return engine


def watch(engine):
    """Returns a list that grows by one number for each step that computes prompts: how many tokens they are."""
    steps, plan = [], engine.scheduler.plan

    def noting():
        made = plan()
        count = sum(part.count for part in made.parts if part.start < part.sequence.prompt_tokens)
        if count:
            steps.append(count)
        return made

    engine.scheduler.plan = noting
    return steps


def texts(seed, *lengths):
    """Returns random token ids, one list for each length."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, VOCAB, length).tolist() for length in lengths]


def ask(prompt, *, salt=None, max_tokens=4, **params):
    """Returns a greedy request that reports how likely its tokens were."""
    request = request_of(prompt, max_tokens=max_tokens, **({"logprobs": 0} | params))
    return replace(request, salt=salt)


def run(engine, *prompts, **wishes):
    """Serves some prompts at once, to their end, and checks all books."""
    made = [engine.add([ask(prompt, **wishes)])[0] for prompt in prompts]
    engine.run(made)
    check(engine)
    return made


def check(engine):
    """The books of the cache and of the index agree."""
    engine.sequence_runner.allocator.check()
    engine.prefix.check()


def places(engine, prompt, salt=None):
    """Returns after how many tokens of a prompt there are checkpoints."""
    return engine.prefix.explain(prompt, salt).checkpoints


def assert_same(made, truth):
    """Tokens are equal, and their log-probabilities within 1e-5."""
    for one, other in zip(made, truth, strict=True):
        assert one.token_ids == other.token_ids
        for got, want in zip(one.logprobs, other.logprobs, strict=True):
            assert got.keys() == want.keys()
            np.testing.assert_allclose(list(got.values()), list(want.values()), atol=1e-5)


def uncached(engine, *prompts, **wishes):
    """Returns what the prompts give alone, each in a cache of its own; through the same programs."""
    answers = []
    for number, prompt in enumerate(prompts):
        engine.prefix.clear()
        answers += run(engine, prompt, salt=f"alone {number}", **wishes)
    return answers
