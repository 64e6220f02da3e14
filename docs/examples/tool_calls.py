"""A model calls a Python function: the tool is offered, its call is run, and the model answers with the result.

Run it with `python docs/examples/tool_calls.py`. JAXKV_BASE_URL is the server's address, and JAXKV_API_KEY its key.
The model must have been trained to call tools.
"""

import json
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam


def get_weather(city: str) -> str:
    """Returns the weather of a city."""
    return f"18 degrees and sunny in {city}"


WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Returns the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}

client = OpenAI(
    base_url=os.environ.get("JAXKV_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("JAXKV_API_KEY", "none"),
)
model = client.models.list().data[0].id
messages: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]

answer = client.chat.completions.create(
    model=model, messages=messages, tools=[WEATHER], max_tokens=128, temperature=0
)
asked = answer.choices[0].message
if not asked.tool_calls:
    print(f"no call, but: {asked.content}")
else:
    messages.append(
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": call.function.arguments,
                    },
                }
                for call in asked.tool_calls
                if call.type == "function"
            ],
        }
    )
    for call in asked.tool_calls:
        if call.type == "function":
            result = get_weather(**json.loads(call.function.arguments))
            print(f"call: {call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        model=model, messages=messages, tools=[WEATHER], max_tokens=128, temperature=0
    )
    print(f"answer: {answer.choices[0].message.content}")
