"""OpenAI's own client against a jaxkv server: a completion, and a chat that is streamed.

Run it with `python docs/examples/openai_client.py`. JAXKV_BASE_URL is the server's address, and JAXKV_API_KEY its key.
"""

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("JAXKV_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    # The client demands a key; a server without keys ignores it.
    api_key=os.environ.get("JAXKV_API_KEY", "none"),
)

model = client.models.list().data[0].id
print(f"model: {model}")

completion = client.completions.create(
    model=model, prompt="def fibonacci(n):", max_tokens=16, temperature=0
)
print(f"completion: {completion.choices[0].text!r}")

chunks = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Name three prime numbers."}],
    max_tokens=16,
    stream=True,
    stream_options={"include_usage": True},
)
print("chat: ", end="")
for chunk in chunks:
    # The last chunk has the counts of tokens and no choices.
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage is not None:
        print(f"\nusage: {chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
