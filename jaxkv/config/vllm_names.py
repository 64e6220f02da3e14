"""vLLM's option names: those accepted as aliases, and for common others a sentence about the alternative."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, NamedTuple


class Alias(NamedTuple):
    """One alias.

    Attributes:
        theirs: the option's name in vLLM.
        owner: who has the option in jaxkv: "LLM", the name of a configuration class, or "call" for method arguments.
        ours: its name in jaxkv.
    """

    theirs: str
    owner: str
    ours: str


ALIASES = (
    Alias("max_num_seqs", "CacheConfig", "max_sequences"),
    Alias("block_size", "CacheConfig", "page_size"),
    Alias("kv_cache_dtype", "CacheConfig", "dtype"),
    Alias("kv_cache_memory_bytes", "CacheConfig", "budget_bytes"),
    Alias("gpu_memory_utilization", "CacheConfig", "memory_share"),
    Alias("enable_lora", "LLM", "lora"),
    Alias("max_loras", "LoraConfig", "max_adapters"),
    Alias("max_lora_rank", "LoraConfig", "max_rank"),
    Alias("max_num_batched_tokens", "EngineConfig", "token_budget"),
    Alias("enable_prefix_caching", "EngineConfig", "prefix_cache"),
    Alias("batch_invariant", "EngineConfig", "batch_invariant"),
    Alias("speculative_config", "LLM", "speculation"),
    Alias("num_speculative_tokens", "SpeculationConfig", "tokens"),
    Alias("prompt_lookup_max", "SpeculationConfig", "longest_ngram"),
    Alias("prompt_lookup_min", "SpeculationConfig", "shortest_ngram"),
    Alias("seed", "LLM", "seed"),
    Alias("sampling_params", "call", "sampling"),
    Alias("use_tqdm", "call", "progress"),
    Alias("cache_salt", "call", "salt"),
)
"""In the order of README's table. `dtype`, `revision`, `max_model_len`, `load_format`, `quantization`,
`tensor_parallel_size`, `data_parallel_size` and most fields of `SamplingParams` have equal names in both."""

_UNSUPPORTED = {
    "data_parallel_size": "LLM(model, data_parallel_size=...) makes replicas of a directory; LLM.from_parts has one",
    "best_of": "ask for n samples and choose among them",
    "use_beam_search": "there is no beam search; ask for n samples",
    "guided_decoding": "structured_outputs=StructuredOutputs(json=...) constrains tokens by a grammar",
    "priority": "AsyncLLM.generate and AsyncLLM.stream have a priority",
    "allowed_token_ids": "give each of a few ids a logit_bias of 100",
    "detokenize": "outputs have text and token_ids; the text is empty if the model has no tokenizer",
    "output_kind": "generate returns whole outputs, stream yields what is new",
    "truncate_prompt_tokens": "prompts are never cut; give the last ids of llm.tokenizer.encode(text)",
    "prompt_token_ids": 'give the ids as the prompt, or as {"prompt_token_ids": ids}',
    "request_id": "jaxkv chooses RequestOutput.request_id",
    "lora_request": "SamplingParams(lora=name) chooses an adapter that LLM.add_lora(name, path) has loaded",
    "max_cpu_loras": "every loaded adapter has a place on the device; max_loras is their number",
    "chat_template": "LLM.chat has it; for all calls, put it into the model directory as chat_template.jinja",
    "tools": "LLM.chat has them",
    "chat_template_kwargs": "LLM.chat has them",
    "tokenizer": "the tokenizer is tokenizer.json of the model directory; prompts may be token ids",
    "download_dir": "the environment variable HF_HUB_CACHE chooses the folder for downloads",
    "hf_token": "set HF_TOKEN, or run `hf auth login`",
    "generation_config": "llm.get_default_sampling_params() returns what generation_config.json recommends",
    "trust_remote_code": "nothing in a model directory is executed",
    "enforce_eager": "every step is a compiled program",
    "swap_space": "cache=CacheConfig(host_bytes=...) keeps evicted prefixes in host memory",
    "enable_chunked_prefill": "prompts are always computed in chunks; see max_num_batched_tokens",
}

_NO_METHODS = {
    "encode": "there are no pooling models; llm.tokenizer.encode(text) returns token ids",
    "beam_search": "there is no beam search; generate with SamplingParams(n=...) returns n samples",
}
"""Methods of vLLM's `LLM` that have no counterpart."""


def unknown_attribute(owner: object, name: str) -> AttributeError:
    """Returns the error for an attribute that an object has not."""
    message = f"{type(owner).__name__!r} object has no attribute {name!r}"
    hint = _NO_METHODS.get(name)
    return AttributeError(f"{message}: {hint}" if hint else message, name=name, obj=owner)


def unknown_option(owner: str, name: str, known: Mapping[str, str]) -> ValueError:
    """Returns the error for an unknown option.

    Args:
        owner: the class or function that got it, such as "LLM".
        name: the option.
        known: name of a valid option -> how a user writes it.
    """
    start = f"{owner} has no option {name!r}"
    if name in _UNSUPPORTED:
        return ValueError(f"{start}: {_UNSUPPORTED[name]}")
    closest = get_close_matches(name, known, n=1)
    if closest:
        return ValueError(f"{start}; the closest is {known[closest[0]]}")
    own = [each for each, written in known.items() if each == written]
    return ValueError(f"{start}; its options are {', '.join(own)}")


def renamed(owner: str, options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Returns the options under jaxkv's names.

    Args:
        owner: name of the configuration class that has them, or "call".
        options: jaxkv's or vLLM's name -> value.
        known: jaxkv's names.

    Raises:
        ValueError: an option is unknown, or is given under both names.
    """
    ours = {alias.theirs: alias.ours for alias in ALIASES if alias.owner == owner}
    made: dict[str, Any] = {}
    for name, value in options.items():
        target = ours.get(name, name)
        if target not in known:
            raise unknown_option(owner, name, {name: name for name in (*known, *ours)})
        if target in made:
            both = " and ".join(each for each in options if ours.get(each, each) == target)
            raise ValueError(f"{both} are one option of {owner}; give one of them")
        made[target] = value
    return made


def accepts_vllm_names[C: type](config: C) -> C:
    """Lets a keyword-only dataclass accept vLLM's names, and name the closest field of an unknown option."""
    make: Callable[..., None] = config.__init__
    known = tuple(field.name for field in fields(config))

    @wraps(make)
    def __init__(self: object, *values: object, **options: object) -> None:
        if values:
            raise ValueError(
                f"{config.__name__} takes its options by name, such as {known[0]}=...; got {values[0]!r}"
            )
        make(self, **renamed(config.__name__, options, known))

    config.__init__ = __init__
    return config
