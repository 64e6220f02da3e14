"""Completes several texts in one continuous batch of a stock Transformers model, twice; each with its own parameters.

    python -m torch_bridge.examples.many_prompts

It runs offline on the CPU with the small model in the package, which completes Python code. There are more prompts than
rows, so a prompt that ends makes room for the next. The second call finds the prompts' full pages in the cache. Alone,
a seeded request draws the same tokens.
"""

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

import torch_bridge
from jaxkv import SamplingParams, default_model

PREFIX = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
)
PROMPTS = (
    "import ",
    "def add(a, b):\n    return ",
    f"{PREFIX}        self.",
    f"{PREFIX}        return ",
    f"{PREFIX}        if ",
    "for index in ",
)
ROWS = 3


def main() -> None:
    """Runs the prompts, and prints the texts and the tokens that were found in the cache."""
    folder = default_model.path()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model.set_attn_implementation("jaxkv")
    # On a GPU with graphs, each decode step is one replay.
    cache = torch_bridge.JaxkvCache(model, max_tokens=1024, graphs=True)
    sampling = [
        SamplingParams(temperature=0.7, seed=seed, max_tokens=12, stop=("\n",))
        for seed, _ in enumerate(PROMPTS)
    ]
    texts: list[str] = []
    for _ in range(2):
        outputs = torch_bridge.generate(
            model, PROMPTS, sampling, cache=cache, tokenizer=tokenizer, max_sequences=ROWS
        )
        texts = [one.text for one in outputs]
        computed = sum(one.usage.computed_tokens for one in outputs)
        cached = sum(one.usage.cached_tokens for one in outputs)
        print(
            f"{len(PROMPTS)} prompts in {ROWS} rows: {computed} tokens computed, {cached} found in the cache"
        )
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt.splitlines()[-1]!r} -> {text!r}")
    [alone] = torch_bridge.generate(
        model, PROMPTS[-1], sampling[-1], cache=cache, tokenizer=tokenizer, max_sequences=ROWS
    )
    print(f"alone: {alone.text == texts[-1]}")


if __name__ == "__main__":
    main()
