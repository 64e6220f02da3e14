"""An engine that verifies drafts gives every request the bits that it gives without them."""

import random
import time
from dataclasses import replace

import pytest

from jaxkv.cache.spec import group_layers
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.engine.speculation.open_speculation import open_speculation
from jaxkv.models.decoder import Decoder
from jaxkv.models.tensor_parallel import over_devices
from jaxkv.runner.step_shapes import StepShapes
from jaxkv.step import verify
from tests.defects import Defects, wrap
from tests.engine.drafters import AnyPace, Guesser, KnownTexts
from tests.engine.engines import VOCAB, assert_idle, engine_for, oracle, request_of
from tests.engine.test_batch_invariance import (
    FAMILIES,
    alone,
    engine_of,
    play,
    recurrent_model,
    requests_of,
    said,
)
from tests.engine.test_processors import KNOWN
from tests.engine.test_processors import alone as alone_by_numpy
from tests.engine.test_processors import requests as requests_with_processors

WIDE = {"rows": 4, "tokens": 24}
SAMPLINGS = (
    {"logprobs": 2},
    {"logprobs": 2, "temperature": 0.9, "top_p": 0.8, "min_tokens": 4},
    {"logprobs": 2, "temperature": 1.1, "min_p": 0.05, "repetition_penalty": 1.2},
)


def speculating(family, dtype="float32", *, drafts=3, **options):
    """Returns an engine of `tests.engine.test_batch_invariance` with drafts."""
    return engine_of(family, dtype, speculation=SpeculationConfig(tokens=drafts), **options)


def guess(engine, requests, answers, rightness, seed=0, *, on_device):
    """Gives an engine a drafter that knows the texts of some requests, and one on the device or none there."""
    known = {one.prompt: text[len(one.prompt) :] for one, text in zip(requests, answers)}  # noqa: B905
    assert engine.shapes.drafter is not None
    engine.shapes.drafter = KnownTexts(answers, rightness, VOCAB) if on_device else None
    engine.speculation.drafter = Guesser(
        random.Random(seed), rightness, lambda request: known[request.prompt], VOCAB
    )
    engine.speculation.pace = AnyPace(random.Random(seed), 1.0)


def served_bits(
    family, samplings, rightness, *, dtype="float32", games=2, on_device=False, **options
):
    """Asserts that requests have the bits that they have alone; returns the accepted drafts and the cached tokens.

    With a drafter on the device, some steps are sent before the drafts of the last one are counted.
    """
    requests = [
        replace(one, stop_ids=(at, 31)) if at % 3 == 2 else one
        for at, one in enumerate(requests_of(6, samplings=samplings))
    ]
    wanted = alone(family, dtype, requests)
    engine = speculating(family, dtype, **options)
    guess(engine, requests, [text for text, _ in wanted], rightness, on_device=on_device)
    served = []
    for game in range(games):
        served += play(engine, requests, random.Random(game))
        assert [said(one) for one in served[-len(requests) :]] == wanted
    assert_idle(engine)
    stats = engine.speculation.stats
    assert (stats.overlapped > 2) == on_device, stats
    return sum(stats.accepted), sum(one.cached for one in served)


@pytest.mark.parametrize(
    "on_device", [pytest.param(False, marks=pytest.mark.slow), True], ids=["host", "device"]
)
def test_tokens_and_log_probabilities_are_the_bits_without_drafts(on_device):
    way = {"rows": 4, "tokens": 16, "pages": 9}
    accepted, cached = served_bits("dense", SAMPLINGS[:1], 0.7, on_device=on_device, **way)
    assert accepted > 30
    assert cached > 0


@pytest.mark.slow
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rightness", [0.0, 0.5, 1.0], ids=["never", "half", "always"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_bits_without_drafts(family, rightness, dtype, on_device):
    drafts, hits = 2 if on_device else 5, 0
    for way in ({"rows": 4, "tokens": 16, "pages": 9}, {"rows": 7, "tokens": 48, "drafts": drafts}):
        way |= {"dtype": dtype, "games": 5, "on_device": on_device}
        accepted, cached = served_bits(family, SAMPLINGS, rightness, **way)
        assert (accepted > 50) == (rightness > 0)
        hits += cached
    assert hits > 0


@pytest.mark.slow
def test_histories_and_counts_hold_the_accepted_tokens_alone():
    """Each token is computed from the whole history of its row, and penalties count it."""
    requests = requests_with_processors()
    engine = engine_for(processors=KNOWN, speculation=SpeculationConfig(tokens=3), token_budget=32)
    engine.speculation.drafter = Guesser(random.Random(0), 0.7, alone_by_numpy, VOCAB)
    engine.speculation.pace = AnyPace(random.Random(0), 0.9)
    sequences = [engine.add([one])[0] for one in requests]
    engine.run(sequences)
    assert [tuple(one.token_ids) for one in sequences] == [alone_by_numpy(one) for one in requests]
    assert sum(engine.speculation.stats.accepted) > 30
    assert_idle(engine)


def repeating(count=4, most=40):
    return [request_of([3, 5, 8, 3 + at, 5, 8], max_tokens=most) for at in range(count)]


@pytest.mark.slow
def test_prompt_lookup_finds_the_repetitions_of_greedy_texts():
    requests = repeating()
    config = SpeculationConfig(tokens=4, shortest_ngram=1, adaptive=False)
    engine = engine_for(speculation=config, token_budget=32)
    sequences = [engine.add([one])[0] for one in requests]
    engine.run(sequences)
    assert [tuple(one.token_ids) for one in sequences] == [
        one.token_ids for one in oracle(requests)
    ]
    stats = engine.speculation.stats
    assert stats.accepted[0] > 10
    assert all(map(int.__le__, stats.accepted, stats.drafted))
    # Each accepted draft is a token without a step of its own.
    assert engine.steps < 4 + 4 * 40
    assert_idle(engine)


def test_recurrent_layers_on_several_devices_are_refused():
    whole, _ = recurrent_model()
    delta = replace(whole.config.delta, key_heads=2)
    whole = replace(whole, config=replace(whole.config, delta=delta))
    divided = over_devices(whole, 2, whole.param_shapes("float32"), planned=True)
    layout = group_layers(divided.cache_specs(page_size=8, dtype="float32"))
    sizes = {"max_tokens": 64, "max_rows": 2, "token_budget": 16, "whole_prompts": False}
    shapes, config = StepShapes(layout, **sizes, drafts=2), SpeculationConfig(tokens=2)
    with pytest.raises(ValueError, match="of a TensorParallel needs a cache without recurrent"):
        open_speculation(divided, layout, shapes, config, time.monotonic)


def test_models_with_whole_prompts_are_refused():
    with pytest.raises(ValueError, match="whose prompts can be computed in chunks"):
        engine_for(rope="dynamic", speculation=SpeculationConfig())


DEFECTS = Defects()


@DEFECTS(AssertionError, scene=lambda: served_bits("dense", SAMPLINGS[2:], 0.9, **WIDE))
def penalties_do_not_count_drafts(patch):
    wrap(patch, verify, "_with_drafts", lambda _: lambda state, drafted, first: state)


@DEFECTS(AssertionError, scene=lambda: served_bits("dense", SAMPLINGS[2:], 0.5, **WIDE))
def penalties_count_rejected_drafts(patch):
    def make(write):
        def all_of_them(choices, sampling, tokens, first, accepted):
            return write(choices, sampling, tokens, first, accepted + 1)

        return all_of_them

    wrap(patch, verify, "_write_accepted", make)


@DEFECTS(AssertionError, scene=lambda: served_bits("dense", SAMPLINGS[1:2], 0.9, **WIDE))
def random_numbers_are_those_of_the_first_position(patch):
    def make(sample):
        def frozen(*arguments):
            *others, positions = arguments
            return sample(*others, positions // 4 * 4)

        return frozen

    wrap(patch, verify, "sample_next", make)


@DEFECTS(AssertionError, scene=lambda: served_bits("recurrent", SAMPLINGS[:1], 0.5, **WIDE))
def states_hold_rejected_drafts(patch):
    def make(settled):
        return lambda *given: settled(*given[:-1], given[-1] * 0)

    wrap(patch, Decoder, "settled", make)


FOLLOWED = WIDE | {"on_device": True}


@DEFECTS(AssertionError, scene=lambda: served_bits("dense", SAMPLINGS[:1], 0.6, **FOLLOWED))
def rows_in_flight_are_written_where_the_host_thinks(patch):
    wrap(patch, verify, "_with_own_slots", lambda _: lambda tables, *others: tables)


@DEFECTS(AssertionError, scene=lambda: served_bits("dense", SAMPLINGS[:1], 0.6, **FOLLOWED))
def texts_have_the_accepted_tokens_without_the_one_behind_them(patch):
    def make(write):
        def short(choices, sampling, drafter):
            lengths = choices["text_length"].at[sampling.state_ids].add(-1, mode="drop")
            return write(choices | {"text_length": lengths}, sampling, drafter)

        return short

    wrap(patch, verify, "_write_drafts", make)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_is_found(name, monkeypatch):
    DEFECTS[name].assert_found(monkeypatch, lambda: None)
