"""Structured output: the answer is JSON that fits a schema, whatever the model would rather write.

Run it with `python docs/examples/json_schema.py`. JAXKV_BASE_URL is the server's address, and JAXKV_API_KEY its key.
"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("JAXKV_BASE_URL", "http://127.0.0.1:8000") + "/v1",
    api_key=os.environ.get("JAXKV_API_KEY", "none"),
)

answer = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "Ada Lovelace, 36, loved machines and chess."}],
    response_format={
        "type": "json_schema",
        "json_schema": {
            "name": "person",
            "strict": True,
            "schema": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 40},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "hobbies": {
                        "type": "array",
                        "items": {"type": "string", "maxLength": 20},
                        "maxItems": 3,
                    },
                },
                "required": ["name", "age", "hobbies"],
                "additionalProperties": False,
            },
        },
    },
    max_tokens=200,
    temperature=0,
)
text = answer.choices[0].message.content or ""
if answer.choices[0].finish_reason == "length":
    print(f"the answer was cut: {text}")
else:
    person = json.loads(text)
    print(f"{person['name']} is {person['age']} and likes {', '.join(person['hobbies'])}")
