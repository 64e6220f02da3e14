"""Times stock `generate` before and after three lines: the attention, a cache, and the cache's use.

    python -m torch_bridge.examples.three_lines
    python -m torch_bridge.examples.three_lines --model meta-llama/Llama-3.1-8B

Without `--model` it runs offline with the small model in the package. On a CPU it shows the same tokens; a GPU replays
the decode steps, which saves the time that the host takes to launch them.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from jaxkv import default_model
from torch_bridge import JaxkvCache

COUNT = 64


def main() -> None:
    """Prints the time per token before and after, and whether the tokens are the same."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", help="a Llama on the hub, or its folder")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    folder = given.model or default_model.path()
    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    model.to(device)
    ids = torch.arange(10, 10 + 48, device=device)[None]

    before, tokens = measured(model, ids)
    model.set_attn_implementation("jaxkv")
    cache = JaxkvCache(model, max_tokens=1024)
    after, same = measured(model, ids, past_key_values=cache)

    print(f"before: {before * 1e3:.2f} ms per token")
    print(f"after: {after * 1e3:.2f} ms per token, the same tokens: {tokens.equal(same)}")
    stats = cache.stats()
    print(
        f"steps replayed: {stats.steps_replayed} ({stats.why_not_replayed or 'the last one too'})"
    )


def measured(
    model: PreTrainedModel, ids: torch.Tensor, past_key_values: JaxkvCache | None = None
) -> tuple[float, torch.Tensor]:
    """Returns the seconds per token of the second of two calls, and its tokens."""
    stock: Any = model.generate
    generate: Callable[[], torch.Tensor] = partial(
        stock,
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=past_key_values,
        max_new_tokens=COUNT,
        min_new_tokens=COUNT,
        do_sample=False,
    )
    generate()
    if past_key_values is not None:
        past_key_values.reset()
    start = time.perf_counter()
    # The tokens are read on the host, so all work is done.
    tokens = generate().cpu()
    return (time.perf_counter() - start) / COUNT, tokens


if __name__ == "__main__":
    main()
