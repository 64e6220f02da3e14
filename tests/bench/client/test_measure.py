"""`measure_server` against a server with known delays: figures are exact, failures are counted, and nothing hangs."""

import numpy as np
import pytest

from jaxkv.bench.figures import Objectives
from jaxkv.bench.workload import Workload, arrivals
from tests.bench.client.scripted_server import (
    DONE,
    ScriptedServer,
    answer,
    event,
    measure,
    usage,
)

# The server's counts of 80 words and of 160, before a run with texts.
COUNTS = [answer(0.1, prompt=84), answer(0.1, prompt=164)]


def workload(requests, **sizes):
    sizes = {"prompt_tokens": (3, 6), "output_tokens": (2, 4), **sizes}
    return Workload(requests=requests, **sizes)


def measured(tmp_path, scripts, **options):
    """Returns the only run of a test that sends one request for each script."""
    told = measure(tmp_path, ScriptedServer(scripts), workload=workload(len(scripts)), **options)
    assert told.whole is True
    [run] = told.runs
    return run


def test_each_latency_is_the_servers_own(tmp_path):
    run = measured(tmp_path, [answer(0.2, 0.1, 0.3), answer(0.4, 0.05)])
    figures = run.figures
    assert (figures.requests, figures.failed, figures.output_tokens) == (2, 0, 5)
    assert figures.ttft_ms.mean == pytest.approx(300)
    assert figures.ttft_ms.p90 == pytest.approx(200 + 0.9 * 200)
    assert figures.tpot_ms.mean == pytest.approx((200 + 50) / 2)
    assert figures.itl_ms.p50 == pytest.approx(100)
    assert figures.itl_ms.p90 == pytest.approx(np.percentile([100, 300, 50], 90))
    assert figures.e2e_ms.p99 == pytest.approx(np.percentile([600, 450], 99))
    assert figures.seconds == pytest.approx(0.6)
    assert figures.output_tokens_per_second == pytest.approx(5 / 0.6)
    assert figures.prompt_tokens == 14
    assert run.late_ms == pytest.approx(0, abs=1e-6)


def test_events_of_several_tokens_count_as_the_server_says(tmp_path):
    figures = measured(tmp_path, [answer(0.1, 0.8, output=9, prompt=20, cached=16)]).figures
    assert (figures.output_tokens, figures.prompt_tokens, figures.cached_tokens) == (9, 20, 16)
    # 8 pairs of tokens in 800 ms, but one gap between events.
    assert figures.tpot_ms.mean == pytest.approx(100)
    assert figures.itl_ms.mean == pytest.approx(800)


def test_the_first_token_of_a_chat_is_not_its_role_and_its_end_is_its_finish(tmp_path):
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    thought = b'data: {"choices": [{"delta": {"reasoning_content": "hm"}}]}\n\n'
    call = b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}\n\n'
    chat = [(0.1, role), (0.1, thought), (0.2, call), (0.3, event("", finish="stop", chat=True))]
    server = ScriptedServer([*COUNTS, [*chat, (0.1, usage(4, 2) + DONE)]])
    told = measure(tmp_path, server, workload=workload(1), endpoint="chat", vocab_size=None)
    figures = told.runs[0].figures
    assert figures.ttft_ms.mean == pytest.approx(200)
    assert figures.itl_ms.mean == pytest.approx(200)
    assert figures.e2e_ms.mean == pytest.approx(700)
    assert [list(request) for request in server.requests] == 3 * [
        ["model", "max_tokens", "temperature", "stream", "stream_options", "messages"]
    ]


def test_answers_without_counts_count_their_events_and_the_user_is_told(tmp_path):
    run = measured(tmp_path, [[(0.1, event()), (0.1, event(finish="stop") + DONE)], answer(1)])
    assert (run.uncounted, run.figures.output_tokens) == (1, 3)
    assert "1 answers had no count of tokens" in str(run)


def test_tokens_without_text_still_make_a_whole_answer(tmp_path):
    script = [(0.3, event("", finish="length") + usage(3, 2) + DONE)]
    figures = measured(tmp_path, [script]).figures
    assert (figures.requests, figures.output_tokens) == (1, 2)
    assert figures.ttft_ms.mean == pytest.approx(300)


FAILURES = {
    "429 Too Many Requests: the queue is full": (
        429,
        '{"error": {"message": "the queue is full", "type": "overloaded"}}',
    ),
    "503 Service Unavailable": 503,
    "500 Internal Server Error: <h1>oops</h1>": (500, "<h1>oops</h1>"),
    "599": 599,
    "the stream ended without [DONE], after 1 events": [(0.1, event())],
    "the connection broke off": [(0.1, event()), (0.1, None)],
    "the stream ended without a finish_reason": [(0.1, event() + DONE)],
    "the answer has no token": [(0.1, event("", finish="stop") + DONE)],
    "error in the stream: lost": [
        (0.1, event()),
        (0.1, b'data: {"error": {"message": "lost"}}\n\n'),
    ],
    "the answer ended with finish_reason 'abort'": [(0.1, event(finish="abort") + DONE)],
    "an event is not of this API (JSON is malformed: invalid character (byte 0)): %": [
        (0.1, b"data: %\n\n")
    ],
    "timed out after 5 s": [(0.1, event()), (60, event(finish="stop") + DONE)],
    "the answer is no HTTP: Invalid HTTP version": b"HTTP/9.9 200 Fine\r\n\r\n",
}


def test_every_failure_is_counted_with_its_message_and_harms_no_other_request(tmp_path):
    scripts = [*FAILURES.values(), answer(0.2, 0.1), (429, '{"detail": "the queue is full"}')]
    run = measured(tmp_path, scripts, timeout=5.0)
    figures = run.figures
    assert figures.failures == dict.fromkeys(FAILURES, 1) | {next(iter(FAILURES)): 2}
    assert (figures.requests, figures.failed) == (1, len(FAILURES) + 1)
    assert figures.ttft_ms.p99 == pytest.approx(200)
    assert f"2 failed: {next(iter(FAILURES))}" in str(run)


def test_a_server_that_dies_under_way_fails_the_rest(tmp_path):
    """The first connection asks for the models, and nobody listens for the fourth."""
    server = ScriptedServer([answer(0.1), [(0.05, event()), (0.05, None)]])

    told = measure(tmp_path, server, workload=workload(3), rates=(1.0,), refuse_after=3)
    assert told.runs[0].figures.failures == {
        "the connection broke off": 1,
        "cannot connect to server:80: Connection refused": 1,
    }


def test_requests_come_at_the_times_of_their_rate(tmp_path):
    server = ScriptedServer([answer(0.01)] * 40)
    told = measure(tmp_path, server, workload=workload(20), rates=(4.0, 8.0), burstiness=0.5)
    first, second = (arrivals(20, rate, 0, 0.5) for rate in (4.0, 8.0))
    assert server.arrived[:20] == pytest.approx(first)
    assert server.arrived[20:] == pytest.approx(np.asarray(second) + server.arrived[20])
    assert [run.rate for run in told.runs] == [4.0, 8.0]
    # The second rate has prompts of its own.
    prompts = [tuple(request["prompt"]) for request in server.requests]
    assert len(set(prompts)) == 40


def test_ids_are_the_prompts_of_the_throughput_benchmark(tmp_path):
    server = ScriptedServer([answer(0.1)] * 3)
    measure(tmp_path, server, workload=workload(3), ignore_eos=True)
    drawn = workload(3).draw(50)
    for request, body in zip(drawn, server.requests, strict=True):
        assert body == {
            "model": "m",
            "prompt": list(request.prompt),
            "max_tokens": request.max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }


def test_no_more_requests_run_at_once_than_allowed_and_their_wait_is_no_latency(tmp_path):
    server = ScriptedServer([answer(0.2, 0.1)] * 5)
    told = measure(tmp_path, server, workload=workload(5), max_concurrency=2)
    [run] = told.runs
    assert server.most_at_once == 2
    assert run.figures.ttft_ms.p99 == pytest.approx(200)
    assert [one.queued for one in run.timelines[:2]] == [None, None]
    assert run.timelines[-1].queued == pytest.approx((0, 0.6))
    assert run.figures.seconds == pytest.approx(0.9)


def test_goodput_counts_the_requests_that_meet_all_objectives(tmp_path):
    scripts = [answer(0.1, 0.1), answer(0.3, 0.1), answer(0.1, 0.5), answer(0.05), 429]
    run = measured(tmp_path, scripts, objectives=Objectives(ttft=200.0, tpot=200.0, e2el=590.0))
    # The first and the fourth, which has no time per output token; the run lasts as long as the third.
    assert run.figures.goodput_per_second == pytest.approx(2 / 0.6)
    assert "3.33 requests/s met the objectives" in str(run)


def test_warm_up_requests_are_sent_first_and_not_measured(tmp_path):
    server = ScriptedServer([answer(3.0)] * 2 + [answer(0.1)] * 4)
    told = measure(tmp_path, server, workload=workload(4), warm_up=2)
    assert told.runs[0].figures.ttft_ms.p99 == pytest.approx(100)
    assert server.arrived == pytest.approx([0, 0, 3, 3, 3, 3])


def test_no_request_of_a_run_waits_for_a_connection_that_was_opened_before(tmp_path):
    # One connection lists the models, and three are open when the first request is sent.
    run = measured(tmp_path, [answer(0.1)] * 3, open_connections=3, refuse_after=4)
    assert (run.figures.requests, run.figures.failed) == (3, 0)
    with pytest.raises(ValueError, match="http://server takes no 3 connections: cannot connect"):
        measured(tmp_path, [answer(0.1)] * 3, open_connections=3, refuse_after=1)


def test_an_interrupted_run_reports_what_has_ended_and_says_so(tmp_path):
    server = ScriptedServer([answer(0.1), answer(0.2), answer(9.0), answer(9.0)])
    told = measure(tmp_path, server, workload=workload(4), cancel_at=1.0, rates=(None, 2.0))
    assert told.whole is False
    [run] = told.runs
    assert (run.interrupted, run.asked, run.figures.requests, run.figures.failed) == (True, 4, 2, 0)
    assert "PARTIAL: interrupted after 2 of 4 requests had ended" in str(run)
    assert run.as_dict()["interrupted"] is True


@pytest.mark.parametrize("warm_up", [0, 1])
def test_an_early_interruption_reports_no_figures(tmp_path, warm_up):
    server = ScriptedServer([answer(9.0)] * 3)
    told = measure(tmp_path, server, workload=workload(2), cancel_at=1.0, warm_up=warm_up)
    assert (told.whole, told.runs) == (False, [])
    assert told.notes == ["jaxkv: interrupted before a request had ended; there are no figures"]


def test_texts_have_about_the_wanted_tokens_and_lengths_fit_the_server(tmp_path):
    models = [{"id": "m", "max_model_len": 200}]
    server = ScriptedServer([*COUNTS, *[answer(0.1)] * 30], models)
    told = measure(tmp_path, server, workload=Workload(requests=30), vocab_size=None)
    assert told.notes == [
        "jaxkv: prompts have up to 90 tokens and outputs up to 90, because the server's max_model_len is 200; "
        "--prompt-tokens and --output-tokens change them"
    ]
    # The stand-in for a tokenizer: 4 tokens for the frame and one for each word, so all have 86 words.
    lengths = [len(request["prompt"].split()) for request in server.requests[2:]]
    assert np.mean(lengths) == pytest.approx(86, abs=3)
    assert {request["max_tokens"] for request in server.requests[2:]} == {90}


def test_a_file_gives_prompts_and_lengths_of_answers(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text(
        '{"prompt": "one two", "output_tokens": 2}\n{"prompt": "three", "output_tokens": 3}\n'
    )
    server = ScriptedServer([answer(0.1)] * 2)
    told = measure(tmp_path, server, data_file=file, vocab_size=None)
    assert told.runs[0].figures.requests == 2
    sent = {(request["prompt"], request["max_tokens"]) for request in server.requests}
    assert sent == {("one two", 2), ("three", 3)}


@pytest.mark.parametrize(
    ("options", "models", "message"),
    [
        ({"base_url": "server:80"}, [], "base URL must be like http://127.0.0.1:8000"),
        ({"endpoint": "embeddings"}, [], "endpoint must be one of completions, chat"),
        ({"timeout": 0.0}, [], "time-out must be above 0"),
        ({"api_key": "a\nb"}, [], "API key must be printable"),
        (
            {"refuse_after": 0},
            [],
            "does not answer: cannot connect to server:80: Connection refused",
        ),
        ({}, [{"id": "a"}, {"id": "b"}], "serves 2 models: a, b; choose with --model"),
        ({}, [{"name": "a"}], "is no list of models"),
        ({"endpoint": "chat"}, [{"id": "a"}], "token ids need the endpoint completions"),
        ({"burstiness": 0.0, "rates": (1.0,)}, [{"id": "a"}], "burstiness must be above 0"),
        ({"vocab_size": None}, [{"id": "a"}], "failed the first request: 429 Too Many Requests"),
        ({"workload": workload(2)}, [{"id": "a"}], r"none of 2 requests .* 429 .* \(2 times\)"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(tmp_path, options, models, message):
    with pytest.raises(ValueError, match=message):
        measure(tmp_path, ScriptedServer([429] * 2, models), **options)


@pytest.mark.parametrize("same", [True, False])
def test_a_server_that_cannot_count_is_refused_unless_ids_are_sent(tmp_path, same):
    uncounted = [(0.1, event(finish="length") + DONE)]
    scripts = [answer(0.1), answer(0.1)] if same else [uncounted]
    with pytest.raises(ValueError, match="send token ids with --vocab-size"):
        measure(tmp_path, ScriptedServer(scripts), vocab_size=None)
