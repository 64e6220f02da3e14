"""What a request costs says nothing of the prompts that other keys have sent, counted in programs, not in seconds.

An attacker who guesses the beginning of somebody's prompt sends it too: if it is cached, less is computed, and the
first token comes sooner. Two worlds differ in whether the guess is right; the attacker's requests must cost the same.
"""

import random
from collections import Counter

import pytest

from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.drive import usage_of
from jaxkv.engine.request import Request
from jaxkv.serve.http.auth import ApiKeys, prefix_salt
from tests.engine.simulated_engines import KINDS, Setting, engine_of
from tests.engine.simulated_memory import put_caches_on_device
from tests.engine.simulated_text import VOCAB

KEYS = ApiKeys(["key-of-the-victim", "key-of-the-attacker"])
GUESSED = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)


@pytest.fixture(autouse=True)
def simulated(monkeypatch):
    put_caches_on_device(monkeypatch)


def salt_of(key, cache_salt=None):
    """Returns the salt of the requests of a key, as the HTTP process derives it."""
    tenant = KEYS.tenant([(b"authorization", b"Bearer " + key.encode())])
    return prefix_salt(tenant, cache_salt)


def serve(engine, device, prompt, salt):
    """Serves a request alone; returns what it cost: programs, steps, cached tokens, and programs of each size."""
    before, steps = Counter(device.asked), engine.steps
    request = Request(prompt=tuple(prompt), params=GREEDY, seed=1, stop_ids=(), salt=salt)
    [made] = engine.add([request])
    while engine.has_work:
        engine.step()
    cost = sum((device.asked - before).values())
    sizes = tuple(sorted((repr(each), count) for each, count in (device.asked - before).items()))
    return cost, engine.steps - steps, -usage_of([made]).cached_tokens, sizes


def costs(kind, pairs, right, attacker):
    """Returns what each of the attacker's guesses costs, in one world.

    Args:
        kind: of the cache.
        pairs: number of guesses.
        right: whether the guesses are right.
        attacker: salt of the attacker's requests.
    """
    draw = random.Random(f"{kind} {pairs}")
    host_bytes = 0 if kind == "hybrid" else 40_000
    setting = Setting(kind, spare=6, host_bytes=host_bytes, idle_checks=False)
    engine, device = engine_of(draw, setting)
    found = []
    for _ in range(pairs):
        texts = [[draw.randrange(VOCAB) for _ in range(GUESSED)] for _ in range(2)]
        victim = salt_of("key-of-the-victim")
        serve(engine, device, [*texts[not right], 1, 2, 3], victim)
        found.append(serve(engine, device, [*texts[0], 5, 6], attacker))
    return found


def area_under_curve(positives, negatives):
    """Returns the chance that a right guess costs less than a wrong one; half of it if they are equal."""
    pairs = [(right, wrong) for right in positives for wrong in negatives]
    return sum((right < wrong) + (right == wrong) / 2 for right, wrong in pairs) / len(pairs)


def worlds(kind, pairs, attacker):
    return [costs(kind, pairs, right, attacker) for right in (True, False)]


def assert_coin_flips(kind, pairs):
    right, wrong = worlds(kind, pairs, salt_of("key-of-the-attacker"))
    assert right == wrong
    for measure in range(3):
        curve = [[each[measure] for each in world] for world in (right, wrong)]
        assert area_under_curve(*curve) == 0.5
    assert not any(each[2] for each in right)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_guess_of_another_keys_prompt_costs_what_a_wrong_one_costs(kind):
    assert_coin_flips(kind, 10)


@pytest.mark.parametrize("cache_salt", [None, "shared"])
def test_a_right_guess_of_an_own_prompt_is_found_by_its_cost(cache_salt):
    own = salt_of("key-of-the-victim")
    right, wrong = worlds("full", 10, salt_of("key-of-the-victim", cache_salt))
    if cache_salt is None:
        assert salt_of("key-of-the-victim") == own
        for measure in (0, 2):
            curve = [[each[measure] for each in world] for world in (right, wrong)]
            assert area_under_curve(*curve) > 0.95
    else:
        assert right == wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_guesses_of_another_keys_prompts_are_a_coin_flip(kind):
    assert_coin_flips(kind, 250)
