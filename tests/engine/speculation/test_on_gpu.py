"""On a GPU: with a fixed order of sums, requests have the same bits with drafts as alone and without them."""

import random

import pytest

from jaxkv.config.speculation import SpeculationConfig
from tests.engine.drafters import Guesser
from tests.engine.engines import request_of
from tests.engine.test_batch_invariance import play, said
from tests.engine.test_batch_invariance_on_gpu import engine_of

pytestmark = pytest.mark.gpu


def test_requests_have_the_same_bits_with_drafts():
    """On our kernels, in bfloat16, with greedy and random rows, chunks, hits and preemptions."""
    draw = random.Random(3)
    stem = [draw.randrange(512) for _ in range(160)]
    requests = [
        request_of(
            [at, *stem[: draw.choice((0, 40, 130))]],
            seed=at,
            max_tokens=32,
            logprobs=2,
            temperature=0.8 * (at % 2),
            top_p=0.9,
        )
        for at in range(12)
    ]
    lonely = engine_of(rows=1, tokens=256, prefix_cache=False)
    assert lonely.runner.implementation.name == "mosaic_gpu"
    wanted = [said(play(lonely, [one], draw)[0]) for one in requests]
    answers = {
        one.prompt: tokens[len(one.prompt) :]
        for one, (tokens, _) in zip(requests, wanted, strict=True)
    }
    for way in ({"rows": 4, "tokens": 24, "pages": 16}, {"rows": 12, "tokens": 512}):
        config = SpeculationConfig(tokens=4, adaptive=False)
        engine = engine_of(speculation=config, **way)
        engine.speculation.drafter = Guesser(
            draw, 0.7, lambda request: answers[request.prompt], 512
        )
        served = play(engine, requests, draw)
        assert [said(one) for one in served] == wanted, way
        assert sum(engine.speculation.stats.accepted) > 50
