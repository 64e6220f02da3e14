"""Answers two questions over one prefix with a stock Transformers model; the prefix is computed once.

    python -m torch_bridge.examples.chat_over_one_prefix

It runs offline on the CPU with the small model in the package, which completes Python code. The second question starts
like the first, so its first pages are found in the cache. A fork then continues the answer in two ways; both share the
pages.
"""

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from jaxkv import default_model
from torch_bridge import JaxkvCache

PREFIX = '''class Stack:
    """A list that grows and shrinks at one end."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

'''
QUESTIONS = ("    def pop(self):\n", "    def __len__(self):\n")


def main() -> None:
    """Answers both questions and prints the tokens reused and computed."""
    folder = default_model.path()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    # Without this line Transformers' own attention runs, on copies gathered from the pages.
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=1024)

    def extend(ids: torch.Tensor, holder: JaxkvCache, count: int) -> torch.Tensor:
        """Returns the ids and the most likely `count` more."""
        return model.generate(  # pyright: ignore[reportAttributeAccessIssue] - its mixin's `self` is too strict
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=holder,
            max_new_tokens=count,
            do_sample=False,
        )

    answer = torch.zeros(1, 0)
    for question in QUESTIONS:
        cache.reset(keep_prefix=True)
        before = cache.stats()
        ids = torch.tensor([tokenizer(PREFIX + question).input_ids])
        answer = extend(ids, cache, 12)
        after = cache.stats()
        print(f"{question}{tokenizer.decode(answer[0, ids.shape[1] :])}\n")
        print(
            f"prompt of {ids.shape[1]} tokens: "
            f"{after.tokens_reused - before.tokens_reused} reused, "
            f"{after.tokens_computed - before.tokens_computed} computed, answer included\n"
        )
    child = cache.fork()
    for name, holder, ending in (("one way", cache, "\n"), ("the other", child, "  # ")):
        more = torch.tensor([tokenizer(ending, add_special_tokens=False).input_ids])
        out = extend(torch.cat([answer, more], dim=1), holder, 8)
        print(f"{name}: {tokenizer.decode(out[0, answer.shape[1] :])!r}")
    stats = cache.stats()
    print(f"the pool holds {stats.bytes:,} bytes and was lent to torch {stats.leases_taken} times")


if __name__ == "__main__":
    main()
