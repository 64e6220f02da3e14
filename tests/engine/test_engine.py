"""The engine's tokens are those of `jaxkv.generate`, with junk in all free pages and states."""

import random
from contextlib import ExitStack
from dataclasses import replace

import pytest

from jaxkv.engine.engine import Engine
from jaxkv.engine.request_state import FINISHED
from jaxkv.engine.warm_up import declare_served
from jaxkv.errors import OutOfPages, ProgramRefused
from jaxkv.programs.manifest import Programs, compile_count
from tests.engine.engines import (
    LONGEST,
    ROWS,
    TOKENIZER,
    assert_equal,
    assert_idle,
    engine_for,
    fill_free,
    oracle,
    programs_of,
    request_of,
    sequence_runner_for,
)

PLAIN = {}
DRAWS = {"temperature": 0.8, "top_p": 0.9}
RICH = {
    "temperature": 0.7,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "logit_bias": {3: 1.0, 17: -4.0},
    "min_tokens": 3,
    "logprobs": 2,
}


def requests_of(wish, seed=3, count=12):
    """Draws requests whose prompts often begin alike."""
    draw = random.Random(seed)
    stems = [[draw.randrange(61) for _ in range(40)] for _ in range(2)]
    made = []
    for number in range(count):
        stem = draw.choice(stems)[: draw.choice([0, 8, 16, 33])]
        prompt = stem + [draw.randrange(61) for _ in range(draw.randrange(1, 12))]
        stop_ids = (draw.randrange(61), draw.randrange(61))
        most = draw.randrange(3, min(20, LONGEST - len(prompt)))
        made.append(request_of(prompt, seed=number, stop_ids=stop_ids, max_tokens=most, **wish))
    return made


def serve(engine, requests, seed=0, aborts=()):
    """Lets requests arrive at random, and aborts some in the middle. Junk is written to what is free."""
    draw = random.Random(seed)
    sequences, waiting = [], list(requests)
    while waiting or any(one.status != FINISHED for one in sequences):
        for _ in range(draw.choice([0, 0, 1, 2]) if waiting else 0):
            if waiting:
                sequences += engine.add([waiting.pop(0)])
        engine.step()
        for at in aborts:
            if at < len(sequences) and draw.random() < 0.3:
                engine.abort(sequences[at])
        if draw.random() < 0.2:
            fill_free(engine.sequence_runner)
        engine.sequence_runner.allocator.check()
    return sequences


@pytest.mark.parametrize(
    "wish",
    # The richest has all that the others have.
    [*(pytest.param(wish, marks=pytest.mark.slow) for wish in (PLAIN, DRAWS)), RICH],
    ids=["greedy", "draws", "rich"],
)
@pytest.mark.parametrize("free", [None, 9], ids=["roomy", "tight"])
def test_random_arrivals_have_the_tokens_of_the_oracle(wish, free):
    """Prefix hits, chunks of 16 and, in a tight pool, preemptions change no token."""
    requests = requests_of(wish)
    wanted = oracle(requests)
    engine = engine_for(free_pages=free)
    sequences = serve(engine, requests, seed=1)
    assert_equal(sequences, wanted)
    assert any(sequence.cached for sequence in sequences)
    assert (sum(one.preemptions for one in sequences) > 0) == (free is not None)
    assert_idle(engine)


# Chunks of 16 are in the test above.
@pytest.mark.parametrize("budget", [5, pytest.param(32, marks=pytest.mark.slow)])
def test_the_cut_of_prompts_changes_no_token(budget):
    requests = requests_of(PLAIN)[:6]
    engine = engine_for(token_budget=budget, prefix_cache=False, overlap=budget != 5)
    assert_equal(serve(engine, requests), oracle(requests_of(PLAIN))[:6])
    assert_idle(engine)


def test_aborts_leave_the_others_alone():
    """Requests are aborted in any state, twice, and by their number after they have ended."""
    requests = requests_of(PLAIN)
    wanted = oracle(requests)
    for seed in range(4):
        engine = engine_for(free_pages=9)
        gone = [1, 4, 5, 8]
        sequences = serve(engine, requests, seed=seed, aborts=gone)
        for at, (sequence, want) in enumerate(zip(sequences, wanted, strict=True)):
            if at in gone:
                assert sequence.reason in ("abort", want.reason)
                assert tuple(sequence.token_ids) == want.token_ids[: sequence.generated]
            else:
                assert_equal([sequence], [want])
        assert_idle(engine)


def test_an_abort_may_come_at_any_step_and_twice():
    """A request is aborted queued, in the middle of its prompt, with its last token in flight, and after its end."""
    requests = [request_of([at, 5, 9] * 8, max_tokens=4) for at in range(2)]
    engine = engine_for(prefix_cache=False)
    engine.run(truth := [engine.add([one])[0] for one in requests])
    reasons = set()
    for steps in range(12):
        victim, other = [engine.add([one])[0] for one in requests]
        for _ in range(steps):
            engine.step()
        engine.abort(victim)
        engine.abort(victim)
        engine.run([other])
        assert other.token_ids == truth[1].token_ids
        assert victim.token_ids == truth[0].token_ids[: victim.generated]
        reasons.add(victim.reason)
        assert not engine.scheduler.running
        engine.sequence_runner.allocator.check()
    assert reasons == {"abort", "length"}
    assert_idle(engine)


@pytest.mark.slow
def test_whole_prompts_are_resumed_as_they_were():
    """A prompt whose length changes every angle comes back whole, and then token by token."""
    requests = [
        request_of([7 * at % 61] * (3 + at), max_tokens=12, seed=at) for at in range(20, 26)
    ]
    engine = engine_for(free_pages=9, rope="dynamic")
    sequences = serve(engine, requests)
    assert_equal(sequences, oracle(requests, rope="dynamic"))
    assert sum(one.preemptions for one in sequences) > 0
    assert_idle(engine)


def samples_of(prompt, count, **params):
    first = request_of(prompt, **params)
    return [replace(first, seed=first.seed + sample) for sample in range(count)]


def alone(samples):
    """Returns the tokens of independent requests, as the tests above compare with the oracle."""
    engine = engine_for(prefix_cache=False)
    sequences = [engine.add([one])[0] for one in samples]
    engine.run(sequences)
    return [one.token_ids for one in sequences]


@pytest.mark.parametrize(
    "wish", [pytest.param(DRAWS, marks=pytest.mark.slow), RICH], ids=["draws", "rich"]
)
def test_samples_of_one_prompt_are_those_of_as_many_requests(wish):
    """More samples than rows, penalties copied with their entries, and a prompt computed once."""
    samples = samples_of(range(3, 24), 6, max_tokens=9, **wish)
    engine = engine_for()
    sequences = engine.add(samples)
    engine.run(sequences)
    assert [one.token_ids for one in sequences] == alone(samples)
    assert len(set(map(tuple, alone(samples)))) == 6
    # What a sample starts from is the first one's work, and nothing that the prefix cache had.
    assert sum((one.shared, one.cached) == (20, 0) for one in sequences) >= ROWS - 1
    assert not sequences[0].cached
    assert_idle(engine)


def test_samples_survive_that_their_leader_goes():
    samples = samples_of(range(3, 24), 4, **RICH)
    wanted = alone(samples)
    for steps in range(4):
        engine = engine_for()
        sequences = engine.add(samples)
        for _ in range(steps):
            engine.step()
        engine.abort(sequences[0])
        engine.run(sequences[1:])
        assert [one.token_ids for one in sequences[1:]] == wanted[1:]
        assert_idle(engine)


@pytest.mark.parametrize("by_wave", [False, True])
def test_a_biased_row_leaves_no_trace_for_its_successor(by_wave):
    """A later request that meets a program with penalties finds the entries of the sampling group clean."""
    biased = [request_of([at], **RICH | {"logit_bias": {9: 100.0}}) for at in range(4)]
    engine = engine_for()
    if by_wave:
        with ExitStack() as held:
            for one in biased:
                sequence = held.enter_context(engine.sequence_runner.reserved(2))
                engine.sequence_runner.admit([one.row(sequence)])
    else:
        engine.run([engine.add([one])[0] for one in biased])
    assert engine.sequence_runner.is_biased(1)
    requests = [requests_of(RICH)[0], *requests_of(PLAIN)[:5]]
    sequences = [engine.add([one])[0] for one in requests]
    engine.run(sequences)
    assert_equal(sequences[1:], oracle(requests_of(PLAIN))[:5])
    assert_equal(sequences[:1], oracle(requests_of(RICH))[:1])


def test_pinned_shapes_make_every_result_equal_bit_for_bit():
    """Neighbours, chunks, preemptions and prefix hits change no bit of any log-probability."""
    requests = requests_of(RICH)
    lonely = engine_for(pinned_shapes=True, prefix_cache=False)
    wanted = []
    for one in requests:
        wanted += lonely.add([one])
        lonely.run(wanted[-1:])
    together = engine_for(pinned_shapes=True, free_pages=9)
    sequences = serve(together, requests, seed=2)
    assert sum(one.preemptions for one in sequences) > 0
    assert any(one.cached for one in sequences)
    for sequence, want in zip(sequences, wanted, strict=True):
        assert sequence.tokens == want.tokens
        assert sequence.logprobs == want.logprobs


def test_what_can_never_fit_is_refused_with_the_numbers():
    """A request larger than the pool or the longest sequence is refused by `add`."""
    engine = engine_for()
    with pytest.raises(ValueError, match="needs room for 67 tokens, but one sequence can have 64"):
        engine.add([request_of([1] * 60)])
    small = Engine(sequence_runner_for(gqa=5))
    with pytest.raises(ValueError, match="needs room for 41 tokens, but one sequence can have 40"):
        small.add([request_of([1] * 34)])
    with pytest.raises(ValueError, match="tokenizer"):
        small.add([request_of([1], stop="x")])
    assert not engine.has_work
    assert not small.has_work


def test_pages_that_others_hold_are_reported_and_nothing_is_lost():
    engine = engine_for(free_pages=1)
    sequences = engine.add([request_of([1] * 20)])
    with pytest.raises(OutOfPages, match="asked for"):
        engine.run(sequences)
    assert sequences[0].reason == "abort"
    assert_idle(engine)


def test_a_step_moves_two_arrays_to_the_device_and_one_back(monkeypatch):
    """A step makes at most 2 copies to the device and 1 to the host, not counting its preparation."""
    engine = engine_for()
    sent, read = [], []
    run, take = engine.runner.run, engine.runner.read
    monkeypatch.setattr(
        engine.runner,
        "run",
        lambda spec, arrays: (
            sent.append((spec.kind, sum(bool(a.size) for a in arrays))) or run(spec, arrays)
        ),
    )
    monkeypatch.setattr(engine.runner, "read", lambda out: read.append(1) or take(out))
    requests = requests_of(RICH)[:6]
    serve(engine, requests)
    steps = [arrays for kind, arrays in sent if kind in ("prefill", "decode")]
    assert len(steps) == engine.steps
    assert len(read) <= engine.steps
    assert max(steps) <= 2
    assert {kind for kind, _ in sent} <= {"prefill", "decode", "copy", "admit"}


def test_the_next_step_is_sent_before_the_last_one_is_read(monkeypatch):
    engine = engine_for()
    order = []
    step, read = engine.sequence_runner.step, engine.runner.read
    monkeypatch.setattr(
        engine.sequence_runner, "step", lambda *given: order.append("send") or step(*given)
    )
    monkeypatch.setattr(engine.runner, "read", lambda out: order.append("read") or read(out))
    engine.run(engine.add([request_of([1, 2, 3], max_tokens=6)]))
    assert order[:4] == ["send", "send", "read", "send"]
    assert order.count("send") == order.count("read") == 6


def test_a_warm_engine_compiles_nothing():
    """Random traffic needs only the programs that were declared for it."""
    programs = Programs(strict=True)
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs, all_sizes=True)
    sequence_runner = engine.sequence_runner
    for declared in declare_served(engine, request_of([1] * 44, max_tokens=20), 4):
        sequence_runner.runner.program(declared)
    sequence_runner.runner.programs.seal()
    requests = requests_of(PLAIN)
    wanted = oracle(requests)
    fill_free(sequence_runner)
    before = compile_count()
    sequences = [engine.add([one])[0] for one in requests]
    engine.run(sequences)
    assert compile_count() == before
    assert_equal(sequences, wanted)
    # A request that needs more fails alone, with the reason; the others are not affected.
    [drawn] = engine.add([request_of([1, 2], temperature=1.0)])
    [plain] = engine.add([requests[0]])
    engine.run([drawn, plain])
    assert isinstance(drawn.error, ProgramRefused)
    # The error names what was not declared.
    [told] = engine.add([request_of([1, 2], logprobs=3)])
    engine.run([told])
    assert isinstance(told.error, ProgramRefused)
    assert "logprobs is None, not 5" in str(told.error)
    assert_equal([plain], wanted[:1])


def test_stop_strings_end_the_text_and_the_request():
    """The text ends before the string, the tokens after it; streamed pieces never show a part of it."""
    [whole] = oracle(requests_of(PLAIN)[:1])
    text = TOKENIZER.decode(whole.token_ids)
    stop = text[len(text) // 2 :][:2]
    request = requests_of(PLAIN)[0]
    stopped = replace(request, params=replace(request.params, stop=(stop, "never met")))
    engine = engine_for()
    [sequence] = engine.add([stopped], streamed=True)
    [plain] = engine.add([request], streamed=True)
    engine.run([sequence, plain])
    assert sequence.reason == "stop"
    assert sequence.text == text.split(stop)[0]
    assert "".join(piece.text for piece in sequence.pieces) == sequence.text
    assert [piece.token_id for piece in sequence.pieces] == sequence.token_ids
    assert sequence.token_ids == list(whole.token_ids)[: sequence.generated]
    assert stop in TOKENIZER.decode(sequence.token_ids)
    assert [piece.finish_reason for piece in sequence.pieces][-2:] == [None, "stop"]
    assert plain.text == text
    assert "".join(piece.text for piece in plain.pieces) == text
    assert_idle(engine)


# The two tests around this one declare what they serve too: plain requests, and rich ones whose cache is lost.
@pytest.mark.slow
def test_what_is_declared_for_a_request_serves_it_alone_or_with_its_like():
    """A strict engine compiles nothing for penalties, samples, chunks, preemptions and prefix hits."""
    programs = Programs(strict=True)
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs, free_pages=9)
    for count in (1, 4):
        for declared in declare_served(engine, request_of([1] * 44, max_tokens=20, **RICH), count):
            engine.runner.program(declared)
        programs.seal()
        sequences = serve(engine, requests_of(RICH)[: 12 if count > 1 else 1], seed=1)
        assert [one.error for one in sequences] == [None] * len(sequences)
        programs.unseal()
    assert_equal(sequences, oracle(requests_of(RICH)))
    assert sum(one.preemptions for one in sequences) > 0


def test_a_strict_engine_survives_a_lost_cache():
    """There are pages for all, but what they have generated must be given back to the penalties."""
    programs = Programs(strict=True)
    programs._programs |= programs_of("plain")._programs
    engine = engine_for(programs=programs)
    for declared in declare_served(engine, request_of([1] * 44, max_tokens=20, **RICH), 4):
        engine.runner.program(declared)
    programs.seal()
    sequences = [engine.add([one])[0] for one in requests_of(RICH)[:4]]
    while not all(one.generated for one in sequences):
        engine.step()
    engine.runner.owner.poison("injected")
    engine.run(sequences)
    assert engine.recoveries == 1
    assert_equal(sequences, oracle(requests_of(RICH))[:4])


def test_short_requests_are_hits_or_misses_too():
    """What never fills a page is counted when its first step is read."""
    engine = engine_for()
    engine.run(engine.add([request_of([1, 2, 3], max_tokens=2)]))
    assert (engine.prefix.stats.hits, engine.prefix.stats.misses) == (0, 1)
    engine.run(engine.add([request_of(range(10), max_tokens=1)]))
    engine.run(engine.add([request_of(range(10), max_tokens=1)]))
    assert (engine.prefix.stats.hits, engine.prefix.stats.misses) == (1, 2)
