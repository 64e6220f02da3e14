"""Memory of a process that serves for long: neither arrays of JAX nor objects of the host remain of what has ended."""

import gc
import random
import re
from pathlib import Path

import jax
import pytest

from jaxkv.config.engine import EngineConfig
from jaxkv.engine.engine import Engine
from tests.engine.engines import LONGEST, TOKENIZER, VOCAB, request_of, sequence_runner_for

MOST_GROWTH = 4 * 2**20
"""Bytes; an object of 50 bytes that every step left behind would be as many in 80,000 steps."""


def requests_without_end(draw):
    """Yields requests of all kinds; half of them begin with one of a few texts, so that the prefix cache is used."""
    stems = [[draw.randrange(VOCAB) for _ in range(24)] for _ in range(3)]
    ways = ({}, {"temperature": 0.9, "top_p": 0.8}, {"logprobs": 2}, {"repetition_penalty": 1.2})
    for seed in range(10**9):
        prompt = draw.choice(stems)[: draw.choice((0, 0, 8, 24))]
        prompt = prompt + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 16))]
        most = LONGEST - len(prompt)
        yield request_of(
            prompt, seed=seed, max_tokens=draw.randint(1, min(24, most)), **draw.choice(ways)
        )


def run_steps(engine, coming, draw, steps):
    """Runs so many steps; requests arrive at random, and some are cancelled before their end."""
    running = []
    for _ in range(steps):
        if len(running) < 6 and (draw.random() < 0.3 or not engine.has_work):
            running += engine.add([next(coming)])
        if running and draw.random() < 0.02:
            engine.abort(running.pop(draw.randrange(len(running))))
        engine.step()
        running = [one for one in running if one.reason is None]


def resident_bytes():
    gc.collect()
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@pytest.mark.slow
def test_a_hundred_thousand_steps_leave_nothing_behind():
    draw = random.Random(3)
    coming = requests_without_end(draw)
    engine = Engine(sequence_runner_for(), TOKENIZER, EngineConfig(token_budget=16))
    run_steps(engine, coming, draw, 20_000)
    before, arrays = resident_bytes(), len(jax.live_arrays())
    run_steps(engine, coming, draw, 80_000)
    assert resident_bytes() - before < MOST_GROWTH
    assert len(jax.live_arrays()) <= arrays + 2
