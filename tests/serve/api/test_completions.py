import asyncio
import json

import msgspec
import pytest

from jaxkv.text.token_bytes import token_bytes
from tests.serve.fake_engine import FACTS
from tests.serve.http.serving import TOKENIZER, events_of, serving

HELLO = TOKENIZER.encode("hello world, all of you")


def body(**fields):
    return {"model": "tiny", "prompt": "hello world", "max_tokens": 64, **fields}


def test_a_request_s_own_sampling_goes_before_the_model_s():
    facts = msgspec.structs.replace(FACTS, sampling_defaults={"temperature": 0.5, "top_k": 20})

    async def run():
        async with serving(facts=facts) as server:
            given = {"model": "tiny", "prompt": [5], "max_tokens": 1}
            for more in ({}, {"temperature": 1.0, "top_k": 0, "top_p": 0.5}):
                reply = await server.http.post("/v1/completions", json=given | more)
                assert reply.status_code == 200
            sent = [call.sampling for call in server.engine.calls.values()]
            assert sent[0] == {"max_tokens": 1, "temperature": 0.5, "top_k": 20}
            assert sent[1] == {"max_tokens": 1, "top_p": 0.5}
            [model] = (await server.http.get("/v1/models")).json()["data"]
            assert model["default_sampling_params"] == facts.sampling_defaults

    asyncio.run(run())


def test_a_completion_has_text_finish_reason_and_usage():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            reply = await server.http.post("/v1/completions", json=body())
            assert reply.status_code == 200, reply.text
            found = reply.json()
            [choice] = found["choices"]
            assert choice["text"] == "hello world, all of you"
            assert choice["finish_reason"] == "stop"
            prompt = len(TOKENIZER.encode("hello world"))
            assert found["usage"] == {
                "prompt_tokens": prompt,
                "completion_tokens": len(HELLO),
                "total_tokens": prompt + len(HELLO),
                "prompt_tokens_details": {"cached_tokens": 0},
            }

    asyncio.run(run())


def test_a_stream_joins_to_the_same_text_and_ends_with_usage_and_done():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            given = body(stream=True, stream_options={"include_usage": True})
            reply = await server.http.post("/v1/completions", json=given)
            assert reply.headers["content-type"] == "text/event-stream"
            *chunks, usage = events_of(reply.text)
            assert "".join(each["choices"][0]["text"] for each in chunks) == (
                "hello world, all of you"
            )
            assert [each["choices"][0]["finish_reason"] for each in chunks][-1] == "stop"
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == len(HELLO)
            assert reply.text.endswith("data: [DONE]\n\n")

    asyncio.run(run())


def test_several_prompts_and_samples_are_choices_in_order_with_their_echo():
    async def run():
        async with serving() as server:
            prompts = ["one", "two three", "four"]
            for stream in (False, True):
                given = body(prompt=prompts, n=2, echo=True, stream=stream)
                reply = await server.http.post("/v1/completions", json=given)
                assert reply.status_code == 200, reply.text
                texts = dict.fromkeys(range(6), "")
                replies = events_of(reply.text) if stream else [reply.json()]
                for each in replies:
                    for choice in each["choices"]:
                        texts[choice["index"]] += choice["text"]
                # The engine echoes prompts too.
                assert list(texts.values()) == [text * 2 for text in prompts for _ in range(2)]

    asyncio.run(run())


def test_prompts_of_token_ids_are_sent_as_they_are():
    async def run():
        async with serving() as server:
            for prompt in ([5, 6, 7], [[5, 6, 7]]):
                await server.http.post("/v1/completions", json=body(prompt=prompt))
            assert [each.ids for each in server.engine.calls.values()] == [[5, 6, 7]] * 2

    asyncio.run(run())


def test_logprobs_have_the_older_form_with_text_offsets():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            given = body(logprobs=2, echo=False)
            plain = (await server.http.post("/v1/completions", json=given)).json()["choices"][0]
            reply = await server.http.post("/v1/completions", json=given | {"stream": True})
            for found in (plain["logprobs"], _joined(events_of(reply.text))):
                assert "".join(found["tokens"]) == "hello world, all of you"
                assert found["token_logprobs"] == [-0.5] * len(HELLO)
                assert all(len(top) == 2 for top in found["top_logprobs"])
                assert found["text_offset"] == [
                    len("".join(found["tokens"][:at])) for at in range(len(HELLO))
                ]

    asyncio.run(run())


def _joined(chunks):
    parts = [each["choices"][0]["logprobs"] for each in chunks if each["choices"][0]["logprobs"]]
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


def test_every_sampling_field_reaches_the_engine():
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"5": 2.0},
        "logits_processors": {"name": {"numbers": [[1, 2], [3, 4]], "flag": True}},
        "seed": 11,
        "n": 2,
        "max_tokens": 9,
        "min_tokens": 1,
        "stop_token_ids": [4],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "ignore_eos": True,
        "logprobs": 3,
    }

    async def run():
        async with serving() as server:
            given = body(**fields, priority=3, stop="never")
            reply = await server.http.post("/v1/completions", json=given)
            assert reply.status_code == 200, reply.text
            [call] = server.engine.calls.values()
            assert json.loads(json.dumps(call.sampling)) == fields
            assert call.priority == 3

    asyncio.run(run())


def test_a_stop_string_ends_the_text_and_frees_the_engine():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            reply = await server.http.post("/v1/completions", json=body(stop=["world"]))
            [choice] = reply.json()["choices"]
            assert (choice["text"], choice["finish_reason"]) == ("hello ", "stop")
            assert choice["stop_reason"] == "world"

    asyncio.run(run())


def test_a_request_that_the_engine_refuses_is_400_streaming_or_not():
    async def run():
        async with serving(lambda submit: "the prompt is odd") as server:
            for stream in (False, True):
                reply = await server.http.post("/v1/completions", json=body(stream=stream))
                assert reply.status_code == 400
                assert reply.json()["error"]["message"] == "the prompt is odd"

    asyncio.run(run())


@pytest.mark.parametrize("code", ["generation_failed", "numerical_error"])
def test_a_sample_that_fails_in_the_engine_fails_its_request_alone(code, caplog):
    secret = "the detail that is for the log"

    async def run():
        async with serving(lambda submit: HELLO, held=True) as server:
            for stream in (False, True):
                first = len(server.engine.calls)
                asked = [
                    asyncio.create_task(server.http.post("/v1/completions", json=given))
                    for given in (body(stream=stream, seed=1), body())
                ]
                while len(server.engine.calls) < first + 2:
                    await asyncio.sleep(0)
                new = [each for each in server.engine.calls.values() if each.call >= first]
                [bad] = [each.call for each in new if "seed" in each.sampling]
                await server.engine.step()
                await asyncio.sleep(0.01)
                await server.engine.fail(bad, secret, code)
                while server.engine.running:
                    await server.engine.step()
                wrong, right = [await each for each in asked]
                assert right.json()["choices"][0]["text"] == "hello world, all of you"
                assert wrong.status_code == (200 if stream else 500)
                event = wrong.text.strip().split("\n\n")[-1]
                error = json.loads(event.removeprefix("event: error\ndata: "))["error"]
                assert (error["type"], error["code"]) == ("server_error", code)
                assert secret not in wrong.text
                assert secret in caplog.text
                assert wrong.headers["x-request-id"] in error["message"]
                assert wrong.headers["x-request-id"] in caplog.text

    asyncio.run(run())


def test_token_ids_are_returned_if_asked_for():
    async def run():
        async with serving(lambda submit: [5, 6]) as server:
            given = body(prompt=[7, 8], return_token_ids=True)
            [choice] = (await server.http.post("/v1/completions", json=given)).json()["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [5, 6])

    asyncio.run(run())


def test_a_stream_has_the_ids_of_tokens_without_text_too():
    text = "🦀 goes on, and on"
    ids = TOKENIZER.encode(text, add_special=False)

    async def run():
        async with serving(lambda submit: ids, held=True) as server:
            given = body(
                prompt=[7, 8], return_token_ids=True, prompt_logprobs=0, stop="on, and off"
            )
            given["stream"] = True
            asked = asyncio.create_task(server.http.post("/v1/completions", json=given))
            while not server.engine.running:
                await asyncio.sleep(0)
            while server.engine.running:
                await server.engine.step()
                await asyncio.sleep(0.005)
            choices = [each["choices"][0] for each in events_of((await asked).text)]
            # Parts of a character, and of what may be the stop string.
            assert not choices[0]["text"]
            assert not all(each["text"] for each in choices[4:])
            assert "".join(each["text"] for each in choices) == text
            assert [token for each in choices for token in each["token_ids"]] == ids
            assert [each["prompt_token_ids"] for each in choices] == [
                [7, 8],
                *[None] * (len(choices) - 1),
            ]
            assert choices[0]["prompt_logprobs"][0] is None
            assert choices[0]["prompt_logprobs"][1]["8"]["logprob"] == -0.25

    asyncio.run(run())


def test_an_echo_with_logprobs_has_those_of_the_prompt_first():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            prompt = TOKENIZER.encode("hello world")
            for given in (body(echo=True, logprobs=1), body(echo=True, logprobs=1, stream=True)):
                reply = await server.http.post("/v1/completions", json=given)
                assert reply.status_code == 200, reply.text
                streamed = "stream" in given
                found = _joined(events_of(reply.text) if streamed else [reply.json()])
                assert found["token_logprobs"] == (
                    [None] + [-0.25] * (len(prompt) - 1) + [-0.5] * len(HELLO)
                )
                assert "".join(found["tokens"]) == "hello worldhello world, all of you"
                assert found["text_offset"] == [
                    len("".join(found["tokens"][:at])) for at in range(len(found["tokens"]))
                ]

    asyncio.run(run())


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stop", [None, "and off"])
def test_offsets_count_the_characters_of_the_text_where_one_is_several_tokens(echo, stop):
    prompt, answer = "ééédef f(", "漢x 😀 and on"
    ids = TOKENIZER.encode(answer, add_special=False)

    async def run():
        async with serving(lambda submit: ids) as server:
            for stream in (False, True):
                given = body(prompt=prompt, echo=echo, logprobs=0, stream=stream, stop=stop)
                reply = await server.http.post("/v1/completions", json=given)
                assert reply.status_code == 200, reply.text
                chunks = events_of(reply.text) if stream else [reply.json()]
                text = "".join(each["choices"][0]["text"] for each in chunks)
                assert text == (prompt + answer if echo else answer)
                found = _joined(chunks)
                assert found["text_offset"] == _starts(TOKENIZER.encode(text, add_special=False))
                for token, at in zip(found["tokens"], found["text_offset"], strict=True):
                    assert text.startswith(token, at) or token == "\ufffd"

    asyncio.run(run())


def _starts(ids):
    """Returns the index of the character that the first byte of each token belongs to."""
    data, starts = b"", []
    for token in ids:
        new = token_bytes(TOKENIZER, token)
        is_part = new[0] & 0xC0 == 0x80
        starts.append(len(data.decode(errors="replace")) - is_part)
        data += new
    return starts


CRAB = TOKENIZER.encode("🦀", add_special=False)


@pytest.mark.parametrize("cut", range(1, len(CRAB)))
@pytest.mark.parametrize(
    ("answer", "wanted", "offsets"),
    [
        ("🦀 def", "x🦀 def", lambda cut: [0, *[1] * len(CRAB), 2, 3]),
        (" def", "x\ufffd def", lambda cut: [0, *[1] * cut, 2, 3]),
    ],
    ids=["completed", "broken"],
)
def test_an_echo_that_ends_inside_a_character_goes_on_with_the_character(
    cut, answer, wanted, offsets
):
    prompt = [*TOKENIZER.encode("x", add_special=False), *CRAB[:cut]]
    ids = TOKENIZER.encode(answer, add_special=False)
    ids = ids[cut:] if ids[0] == CRAB[0] else ids

    async def run():
        async with serving(lambda submit: ids, held=True) as server:
            for stream in (False, True):
                for logprobs in (None, 0):
                    given = body(prompt=prompt, echo=True, logprobs=logprobs, stream=stream, n=2)
                    asked = asyncio.create_task(server.http.post("/v1/completions", json=given))
                    while not server.engine.running:
                        await asyncio.sleep(0)
                    while server.engine.running:
                        await server.engine.step()
                        await asyncio.sleep(0.002)
                    reply = await asked
                    chunks = events_of(reply.text) if stream else [reply.json()]
                    for sample in range(2):
                        own = [
                            choice
                            for each in chunks
                            for choice in each["choices"]
                            if choice["index"] == sample
                        ]
                        assert "".join(each["text"] for each in own) == wanted
                        if logprobs is not None:
                            found = _joined([{"choices": [each]} for each in own])
                            assert found["text_offset"] == offsets(cut)

    asyncio.run(run())


def test_an_echo_whose_completion_ends_inside_its_last_character_is_broken_once():
    async def run():
        async with serving(lambda submit: CRAB[1:3]) as server:
            for stream in (False, True):
                given = body(prompt=CRAB[:1], echo=True, logprobs=0, stream=stream)
                reply = await server.http.post("/v1/completions", json=given)
                chunks = events_of(reply.text) if stream else [reply.json()]
                assert "".join(each["choices"][0]["text"] for each in chunks) == "\ufffd"
                assert _joined(chunks)["text_offset"] == [0, 0, 0]

    asyncio.run(run())


def test_prompt_logprobs_are_by_token_id():
    async def run():
        async with serving(lambda submit: HELLO) as server:
            given = body(prompt=[5, 6], prompt_logprobs=2)
            [choice] = (await server.http.post("/v1/completions", json=given)).json()["choices"]
            first, second = choice["prompt_logprobs"]
            assert first is None
            assert {token: entry["rank"] for token, entry in second.items()} == {"6": 1, "7": 2}
            assert second["6"]["logprob"] == -0.25
            assert second["6"]["decoded_token"] == TOKENIZER.decode([6])
            # Others may be there for `echo` with `logprobs`; those beyond the asked ones have no rank.
            given |= {"prompt_logprobs": 0, "echo": True, "logprobs": 2}
            [choice] = (await server.http.post("/v1/completions", json=given)).json()["choices"]
            assert {k: v["rank"] for k, v in choice["prompt_logprobs"][1].items()} == {"6": None}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("guided_regex", "[a"),
        ("structured_outputs", {"regex": "[a"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    ],
)
def test_a_grammar_that_the_engine_refuses_is_named_by_its_field(field, value):
    refusal = "the grammar of structured_outputs cannot be used: unclosed character class"

    async def run():
        async with serving(lambda submit: refusal) as server:
            for stream in (False, True):
                given = body(stream=stream, **{field: value})
                reply = await server.http.post("/v1/completions", json=given)
                assert reply.status_code == 400
                error = reply.json()["error"]
                assert error["param"] == field
                assert error["message"] == refusal.replace("structured_outputs", field)

    asyncio.run(run())


def test_bad_words_of_several_tokens_are_named():
    async def run():
        async with serving() as server:
            given = body(bad_words=["zzz qqq zzz"])
            error = (await server.http.post("/v1/completions", json=given)).json()["error"]
            assert (error["param"], error["code"]) == ("bad_words", "invalid_value")

    asyncio.run(run())


def test_an_unknown_field_is_answered_with_the_closest_one():
    async def run():
        async with serving() as server:
            for field, words in (("max_token", "the closest is max_tokens"), ("xyz", "remove it")):
                given = {"model": "tiny", "prompt": [5], field: 1}
                error = (await server.http.post("/v1/completions", json=given)).json()["error"]
                assert error["message"] == f"the field {field} is unknown; {words}"
                assert (error["param"], error["code"]) == (field, "unknown_field")

    asyncio.run(run())
