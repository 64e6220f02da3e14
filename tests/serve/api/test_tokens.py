import asyncio

from jaxkv.serve.api.app import OPERATIONS
from tests.serve.http.serving import CHATTY, TOKENIZER, serving


def test_tokenize_and_detokenize_are_inverse():
    async def run():
        async with serving(tokenizer=CHATTY) as server:
            given = {"prompt": "hello world", "return_token_strs": True}
            found = (await server.http.post("/tokenize", json=given)).json()
            assert found["tokens"] == TOKENIZER.encode("hello world")
            assert found["count"] == len(found["tokens"])
            assert found["max_model_len"] == 1024
            assert "".join(found["token_strs"]) == "hello world"
            back = await server.http.post("/detokenize", json={"tokens": found["tokens"]})
            assert back.json() == {"prompt": "hello world"}

    asyncio.run(run())


def test_tokenize_takes_conversations():
    async def run():
        async with serving(tokenizer=CHATTY) as server:
            given = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
            for prompts, end in ((True, "<|assistant|>"), (False, "")):
                reply = await server.http.post(
                    "/tokenize", json=given | {"add_generation_prompt": prompts}
                )
                assert TOKENIZER.decode(reply.json()["tokens"]) == f"<|user|>a\n{end}"

    asyncio.run(run())


def test_the_openapi_document_has_every_route():
    async def run():
        async with serving() as server:
            found = (await server.http.get("/openapi.json")).json()
            listed = {
                (path, method.upper())
                for path, methods in found["paths"].items()
                for method in methods
            }
            assert listed == {(each.path.replace(":path", ""), each.method) for each in OPERATIONS}
            body = found["components"]["schemas"]["ChatBody"]["properties"]
            assert body["temperature"]["anyOf"][0]["maximum"] == 2

    asyncio.run(run())
