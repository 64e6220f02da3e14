"""A request that ends among its drafts keeps a state of its end that later requests may begin from."""

import random

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.request import Request
from tests.engine.simulated_engines import Setting, engine_of
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_requests import answer

SETTING = Setting(
    "hybrid",
    rows=2,
    page=8,
    budget=16,
    prefix=True,
    drafts=3,
    rightness=1.0,
    drafted_share=1.0,
    checkpoint_bytes=2**20,
)
PROMPT = tuple(range(3, 20))


def ask(stop_ids=()):
    params = SamplingParams(temperature=0.0, max_tokens=24)
    return Request(prompt=PROMPT, params=params, seed=1, stop_ids=stop_ids, grammar=None)


@pytest.mark.parametrize("end", [2, 5, 6, 9])
def test_no_checkpoint_waits_for_a_step_that_is_not_in_flight(monkeypatch, end):
    """The text ends at the last accepted draft, behind the drafts, or between them."""
    put_caches_on_device(monkeypatch)
    engine, _ = engine_of(random.Random(0), SETTING)
    text = answer(ask()).token_ids
    assert text[end - 1] not in text[: end - 1]
    [one] = engine.add([ask((text[end - 1],))])
    while engine.has_work:
        engine.step()
    assert (tuple(one.token_ids), one.reason) == (text[:end], "stop")
    kept = {state.length: state.confirmed for state in engine.prefix._states.kept}
    assert all(kept.values())
    assert max(kept) > len(PROMPT)
