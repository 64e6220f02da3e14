"""Engines with a host tier, and their requests.

The device's pool is so small that nearly every prefix that comes back does so from the host.
"""

import numpy as np

from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from jaxkv.offload.transfers import HostTransfers
from tests.engine.engines import (
    LONGEST,
    OTHER_HOLDER,
    PAGE,
    ROWS,
    TOKENIZER,
    VOCAB,
    assert_equal,
    keep_junk,
    oracle,
    request_of,
    sequence_runner_for,
)
from tests.few_programs import few_programs

MUCH = 2**22


def engine_for(*, free_pages=8, host_bytes=MUCH, **config):
    """Returns an engine with a tier on the host; of each group all but `free_pages` pages are taken."""
    sequence_runner = sequence_runner_for()
    sequence_runner.allocator.open(OTHER_HOLDER)
    sequence_runner.allocator.reserve(OTHER_HOLDER, (ROWS * LONGEST // PAGE - free_pages) * PAGE)
    settings = EngineConfig(**{"token_budget": 16} | config)
    engine = few_programs(Engine(sequence_runner, TOKENIZER, settings, host_bytes=host_bytes))
    # Two programs serve every test here.
    shapes = engine.shapes
    shapes.decode_rows, shapes.token_buckets, shapes.lengths = (ROWS,), (16,), (LONGEST,)
    engine.scheduler._fill = lambda least, most: most
    keep_junk(engine)
    return engine


def prompts_of(seed, *, beginnings=4, rounds=2, shared=40):
    """Returns prompts that begin alike in turns, so that each beginning is pushed out before it is asked for again."""
    draw = np.random.default_rng(seed)
    heads = [draw.integers(0, VOCAB, shared).tolist() for _ in range(beginnings)]
    return [head + draw.integers(0, VOCAB, 5).tolist() for _ in range(rounds) for head in heads]


def serve(engine, prompts, **params):
    """Serves prompts one after the other, checks the books after each, and then the answers."""
    params = {"max_tokens": 4} | params
    requests = [request_of(prompt, **params) for prompt in prompts]
    made = []
    for request in requests:
        made += engine.add([request])
        engine.run(made[-1:])
        check(engine)
    assert_equal(made, oracle(requests))
    return made


def check(engine):
    engine.sequence_runner.allocator.check()
    engine.prefix.check()
    if engine.host is not None:
        engine.host.tier.check()


def cached(made):
    return [one.cached for one in made]


def held_up(engine, monkeypatch):
    """Makes nothing come back until the list that is returned is emptied."""
    advance, held = HostTransfers.advance, [True]
    monkeypatch.setattr(
        HostTransfers, "advance", lambda *a, **k: False if held else advance(*a, **k)
    )
    return held


def waits_for_host(engine, monkeypatch, *, output=12):
    """Returns one that generates and one that waits for its prefix, which comes when the list is emptied."""
    prompts = prompts_of(5, beginnings=3, rounds=1, shared=24)
    serve(engine, prompts)
    held = held_up(engine, monkeypatch)
    [other] = engine.add([request_of(prompts[2][:5], max_tokens=output)])
    engine.step()
    [one] = engine.add([request_of(prompts[0])])
    engine.step()
    assert engine.host.prefetch.num_in_progress == 1
    return other, one, held
