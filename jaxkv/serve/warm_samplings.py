"""`warm_up_served`: compiles what requests of a server need; `WARM_SAMPLINGS`: the kinds of sampling that it knows."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from jaxkv.config.checks import as_int
from jaxkv.config.engine import MOST_WARMED
from jaxkv.config.sampling import SamplingParams

WARM_SAMPLINGS: Mapping[str, SamplingParams] = MappingProxyType(
    {
        "greedy": SamplingParams(temperature=0.0),
        "drawn": SamplingParams(temperature=1.0),
        "filtered": SamplingParams(temperature=1.0, top_p=0.9),
    }
)
"""Name -> example of requests that need programs of their own: greedy ones, those that draw, those with filters."""


def warm_up_served(
    llm: Any,  # noqa: ANN401 - this file imports no JAX
    sizes: Sequence[tuple[int, int, Sequence[str]]],
    *,
    background: bool = False,
) -> None:
    """Compiles the programs for requests of some sizes, with and without logits processors and adapters.

    Args:
        llm: the `LLM`, with all adapters loaded.
        sizes: values of `--warm-up`: (requests at once, tokens of a prompt, names of `WARM_SAMPLINGS`).
        background: see `LLM.warm_up`.

    Raises:
        ValueError: a size is out of range; nothing was compiled.
    """
    longest = llm.max_model_len - 1
    why = f"max_model_len is {llm.max_model_len}, of which one token is generated"
    for batch, prompt_tokens, _ in sizes:
        given = f"--warm-up {batch}:{prompt_tokens}"
        as_int(f"BATCH of {given}", batch, 1, MOST_WARMED)
        as_int(f"TOKENS of {given}", prompt_tokens, 1, longest, why)
    # One program serves all processors.
    names = [one.name for one in llm.engine.runner.processors.processors]
    calls = [{}, {names[0]: {}}] if names else [{}]
    # One program serves all adapters, too.
    adapters = [None, *list(llm.list_loras())[:1]]
    for batch, prompt_tokens, samplings in sizes:
        # From those with most features: in the background, their programs can serve for the others first.
        kinds = [name for name in [*WARM_SAMPLINGS][::-1] if name in samplings]
        for sampling, processors, adapter in product(kinds, reversed(calls), reversed(adapters)):
            llm.warm_up(
                batch=batch,
                prompt_tokens=prompt_tokens,
                background=background,
                sampling=replace(
                    WARM_SAMPLINGS[sampling],
                    max_tokens=llm.max_model_len - prompt_tokens,
                    logits_processors=processors,
                    lora=adapter,
                ),
            )
