"""Usage, timing, progress and order of the requests of an `LLM`."""

import asyncio
import sys
import threading
from types import SimpleNamespace

import pytest

from jaxkv import LLM, CacheConfig, SamplingParams
from jaxkv.async_llm import AsyncLLM
from jaxkv.engine.progress import Progress
from jaxkv.engine.request import Request, SampleOutput, Timing, Usage
from jaxkv.engine.request_state import FINISHED, new_request_state
from tests.few_programs import few_programs
from tests.one_layer import one_layer_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[place + 2 * at for at in range(40)] for place in (100, 200, 300, 400)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return few_programs(
        LLM(
            one_layer_model(tmp_path_factory.mktemp("model")),
            dtype="float32",
            max_model_len=128,
            cache=CacheConfig(max_sequences=3, page_size=16),
            progress=False,
        )
    )


@pytest.fixture(scope="module")
def wanted(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture(autouse=True)
def empty_cache(llm, wanted):
    """Each test starts without cached pages, and ends without open requests."""
    llm.engine.prefix.clear()
    yield
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)


def test_usage_counts_the_prompt_once_and_what_was_cached(llm):
    cold = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=7))[0]
    generated = sum(len(sample.token_ids) for sample in cold.outputs)
    assert cold.usage == Usage(
        prompt_tokens=40, cached_tokens=0, output_tokens=generated, preemptions=0
    )
    # Two full pages are kept of the prompt's tokens alone.
    [warm, other] = llm.generate([[*PROMPTS[0][:36], 5], PROMPTS[1]], GREEDY)
    assert (warm.usage.cached_tokens, warm.usage.computed_tokens) == (32, 5)
    assert (other.usage.cached_tokens, other.usage.computed_tokens) == (0, 40)
    assert warm.usage.output_tokens == 12


def test_times_are_in_order_and_whoever_waits_for_a_place_shows_it(llm):
    outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        times = output.timing
        assert times.arrived <= times.admitted < times.first_token < times.finished
        assert times.output_tokens == len(output.token_ids)
        assert 0 < times.ttft < times.total_seconds
        assert times.queue_seconds < times.ttft
    # Three run at once, so the fourth is admitted when one of them has ended.
    assert outputs[3].timing.admitted >= min(output.timing.finished for output in outputs[:3])
    assert outputs[3].timing.queue_seconds > outputs[0].timing.queue_seconds


def test_samples_of_one_prompt_are_admitted_together(llm):
    made = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=3))[0]
    assert len({sample.timing.admitted for sample in made.outputs}) == 1


def test_timing_divides_by_the_tokens_after_the_first():
    times = Timing(arrived=1.0, admitted=1.5, first_token=3.0, finished=7.0, output_tokens=5)
    assert (times.queue_seconds, times.ttft, times.tpot, times.total_seconds) == (0.5, 2, 1, 6)
    one = Timing(arrived=1.0, admitted=1.5, first_token=3.0, finished=3.0, output_tokens=1)
    assert (one.ttft, one.tpot) == (2, None)
    never = Timing(arrived=1.0, admitted=None, first_token=None, finished=4.0, output_tokens=0)
    assert (never.queue_seconds, never.ttft, never.tpot) == (3, None, None)


def test_outputs_show_durations_and_no_times_of_a_clock_without_a_meaning():
    times = Timing(
        arrived=1e6, admitted=1e6 + 0.5, first_token=1e6 + 2, finished=1e6 + 6, output_tokens=5
    )
    wanted = "Timing(queue_seconds=0.5, ttft=2, tpot=1, total_seconds=6, output_tokens=5)"
    assert repr(times) == wanted
    sample = SampleOutput(
        text="ab", token_ids=[1, 2], finish_reason="length", weight_versions=[0, 0], timing=times
    )
    assert str(sample).endswith(f"timing={wanted})")
    never = Timing(arrived=1e6, admitted=None, first_token=None, finished=1e6 + 3, output_tokens=0)
    assert repr(never).startswith("Timing(queue_seconds=3, ttft=None, tpot=None, total_seconds=3,")


def test_the_last_piece_of_a_stream_says_what_it_took(llm):
    pieces = list(llm.stream(PROMPTS[0], GREEDY))
    assert {(piece.usage, piece.timing) for piece in pieces[:-1]} == {(None, None)}
    assert pieces[-1].usage == Usage(
        prompt_tokens=40, cached_tokens=0, output_tokens=12, preemptions=0
    )
    assert pieces[-1].timing.output_tokens == 12
    assert pieces[-1].timing.ttft > 0
    again = list(llm.stream(PROMPTS[0], GREEDY))[-1]
    assert again.usage.cached_tokens == 32


def test_the_first_bad_prompt_is_named_and_nothing_begins(llm):
    before = llm.stats().steps
    with pytest.raises(ValueError, match=r"^prompt 2: .*max_model_len is 128"):
        llm.generate([PROMPTS[0], "x", [7] * 128, [7] * 200], GREEDY)
    with pytest.raises(ValueError, match=r"^a prompt of 128 tokens"):
        llm.generate([7] * 128, GREEDY)
    assert llm.stats().steps == before


def test_a_bar_shows_when_it_is_wanted(llm, capsys, monkeypatch):
    llm.generate(PROMPTS, GREEDY)
    assert capsys.readouterr().err == ""
    llm.generate(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "4/4" in shown
    assert "prefill" in shown
    assert "decode" in shown
    # On a terminal it need not be asked for, but can be declined.
    monkeypatch.setattr(llm, "_progress", True)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(PROMPTS[0], GREEDY)
    assert "1/1" in capsys.readouterr().err
    llm.generate(PROMPTS[0], GREEDY, progress=False)
    assert capsys.readouterr().err == ""


def test_the_bar_says_that_a_program_is_compiled(llm, capsys):
    drawn = SamplingParams(temperature=1.0, min_p=0.5, max_tokens=2, seed=1)
    llm.generate(PROMPTS[0], drawn, progress=True)
    shown = capsys.readouterr().err
    assert "compiling prefill" in shown
    assert shown.rindex("generating") > shown.rindex("compiling")


def sample_of(prompt, *, generated=0, computed=0, **progress):
    request = Request(prompt=(1,) * prompt, params=GREEDY, seed=0, stop_ids=())
    made = new_request_state(request, number=0, tokenizer=None, streamed=False, now=0.0)
    made.tokens += [1] * generated
    made.pages = SimpleNamespace(computed=computed)
    for name, value in progress.items():
        setattr(made, name, value)
    return made


def test_the_bar_counts_computed_prompts_and_tokens_per_second(capsys):
    now = [0.0]
    samples = [
        sample_of(100, computed=60, cached=20),
        sample_of(100, computed=104, generated=5, cached=99, status=FINISHED),
        # Its prompt is one that another sample computed.
        sample_of(100, computed=102, generated=3, cached=0, shared=99),
        sample_of(50),
    ]
    bar = Progress(samples, lambda: now[0])
    bar()
    assert "prefill" not in capsys.readouterr().err
    now[0] = 2.0
    bar()
    assert "prefill 21 tok/s, decode 4 tok/s" in capsys.readouterr().err
    # Who gives way loses what was computed, and rates are not negative.
    samples[0].pages.computed = 20
    now[0] = 4.0
    bar.close()
    shown = capsys.readouterr().err
    assert "1/4" in shown
    assert "prefill 0 tok/s, decode 2 tok/s" in shown


def test_looking_at_many_samples_takes_a_small_share_of_the_time(capsys):
    """A look of 30 ms is followed by 3 s without one, however often the bar is called."""
    now, looks = [0.0], []

    class Slow(list):
        def __iter__(self):
            looks.append(now[0])
            now[0] += 0.03
            return super().__iter__()

    bar = Progress(Slow([sample_of(1)]), lambda: now[0])
    while now[0] < 9.0:
        now[0] += 0.01
        bar()
    assert 3 <= len(looks) <= 4


def test_threads_take_turns_and_get_their_own_answers(llm, wanted):
    got = {}

    def ask(place):
        got[place] = llm.generate(PROMPTS[place], GREEDY)[0].token_ids

    def read(place):
        got[place] = [piece.token_id for piece in llm.stream(PROMPTS[place], GREEDY)]

    threads = [
        threading.Thread(target=work, args=(place,), daemon=True)
        for place, work in enumerate((ask, read, ask, read))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[place] for place in range(4)] == wanted


def test_streams_and_calls_may_alternate(llm, wanted):
    """One step serves all requests, and no tokens are lost or exchanged."""
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    tokens = [[next(first).token_id], [next(second).token_id]]
    assert [output.token_ids for output in llm.generate(PROMPTS[2:], GREEDY)] == wanted[2:]
    assert len(llm.score([[1, 2, 3]])[0]) == 2
    for left, pieces in zip(tokens, (first, second), strict=True):
        left += [piece.token_id for piece in pieces]
    assert tokens == wanted[:2]


def test_a_stream_that_is_dropped_while_the_llm_is_served_is_aborted_there(llm):
    """Only the thread that serves may touch the engine; until it gets to it, nothing has changed."""
    pieces = llm.stream(PROMPTS[0], GREEDY)
    next(pieces)

    async def serve():
        async with AsyncLLM(llm) as served:
            with pytest.raises(RuntimeError, match="an AsyncLLM serves this LLM"):
                list(pieces)
            output = await served.generate(PROMPTS[1], GREEDY)
            last = [piece async for piece in served.stream(PROMPTS[1], GREEDY)][-1]
            return output, last

    output, last = asyncio.run(serve())
    assert output.usage.output_tokens == last.usage.output_tokens == 12
    assert last.usage.cached_tokens == 32
    assert last.timing.output_tokens == 12
