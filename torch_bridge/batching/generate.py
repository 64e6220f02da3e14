"""`generate`: continuous batching of a Transformers model, with jaxkv's scheduler, sampler and outputs."""

import inspect
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as TokenizersTokenizer
from transformers import PreTrainedModel

from jaxkv.cache.spec import PagedSpec
from jaxkv.config.checks import as_int
from jaxkv.config.sampling import SamplingParams
from jaxkv.engine.drive import output_of
from jaxkv.engine.new_request import new_request
from jaxkv.engine.request import Request, RequestOutput
from jaxkv.engine.request_state import RequestState
from jaxkv.sampling.fields import features_of
from jaxkv.text.bad_words import forbid_words
from jaxkv.text.prompts import Prompt, as_prompts, named, one_each, tokenize
from jaxkv.text.tokenizer import Tokenizer, load_tokenizer
from pallas_kernels.dispatch import Unsupported
from torch_bridge.batching.batch_loop import BatchLoop, ModelChanged
from torch_bridge.batching.row_cache import RowCache
from torch_bridge.batching.sampler import Sampler, SamplerKind
from torch_bridge.transformers_cache.attention import NAME, attends_pages
from torch_bridge.transformers_cache.cache import CacheParts, JaxkvCache
from torch_bridge.transformers_cache.fingerprint import turns_with_length
from torch_bridge.transformers_cache.model_layout import plan_layers
from torch_bridge.transformers_cache.placing import begin_comparison
from torch_bridge.transformers_cache.tables import padded

_REFUSED = ("logits_processors", "prompt_logprobs", "structured_outputs", "lora")
"""Attributes of `SamplingParams` that `jaxkv.LLM` serves and this function does not."""


def generate(
    model: PreTrainedModel,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    cache: JaxkvCache | None = None,
    tokenizer: object = None,
    max_sequences: int = 32,
    token_budget: int = 2048,
) -> list[RequestOutput]:
    """Generates for a list of prompts in one continuous batch; a single prompt is a list of one.

    Requests that end make room for waiting ones. Prompts are computed in packed chunks beside the decode steps, or
    whole and one by one for models with recurrent layers. The host reads a step's tokens while the next step runs. A
    token depends on its logits, the request's parameters, its seed and the position, as in `jaxkv.LLM`: not on the
    other requests, up to rounding of the logits.

    All prompts are checked before any is run. On an exception or an interrupt all requests end and their pages are free
    again. If a forward failed, what the cache holds is lost, its kept prefixes included; the next call begins with an
    empty pool.

    Args:
        model: a causal language model; its attention layers, if it has any, must use "jaxkv".
        prompts: texts, lists or arrays of token ids, or dicts as for `jaxkv.LLM.generate`.
        sampling: for all prompts, or one for each. `logits_processors`, `prompt_logprobs`, `structured_outputs` and
            `lora` are refused. Of the model's `generation_config`, its end ids alone are used.
        cache: the pool, its prefixes and its graphs; pass the same one again to reuse prefixes. Without one, a cache
            for this call alone is made, with graphs on a GPU, which needs `max_tokens` in `sampling`.
        tokenizer: for texts, and for stop strings and bad words: a fast tokenizer of Transformers, a `Tokenizer` of
            jaxkv or the path of a model directory.
        max_sequences: most requests that run at once.
        token_budget: most new tokens of a step, at least `max_sequences`.

    Returns:
        One output per prompt, in the order of the prompts. `text` is empty without a tokenizer.

    Raises:
        Unsupported: the model's attention is another one, its rotary angles depend on the length of the text, or its
            forward takes no `position_ids`.
        ValueError: a prompt or an option cannot be served; a message about one of several prompts has its index.
        OutOfPages: rows of the cache or of its forks hold the pages that the first request needs; `reset()` them.
    """
    max_sequences = as_int("max_sequences", max_sequences, 1, 2**16)
    token_budget = as_int("token_budget", token_budget, max_sequences, 2**24)
    if cache is not None and cache.parts.model is not model:
        raise ValueError("the cache was made for another model; give a JaxkvCache of this model")
    if _attends(model, cache):
        _refuse_model(model)
    words = _tokenizer(tokenizer, _vocab_size(model))
    longest = _longest(model, cache)
    listed = as_prompts(prompts)
    wanted = one_each(sampling, len(listed))
    requests: list[list[Request]] = []
    for index, (prompt, params) in enumerate(zip(listed, wanted, strict=True)):
        with named("prompt", index, len(listed)):
            _refuse_params(params, words, has_cache=cache is not None)
            requests.append(_requests(model, prompt, params, words, longest))
    if not requests:
        return []
    if cache is None:
        cache = _cache_for(model, requests, max_sequences)
    batching = _BATCHING.get(cache)
    if batching is None:
        batching = _BATCHING[cache] = Batching(cache.parts)
    flat = [request for samples in requests for request in samples]
    rows = min(max_sequences, len(flat))
    kind = SamplerKind(_vocab_size(model), features_of(flat), padded(rows, 1), longest)
    device = cache.parts.store.device
    with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        states = batching.run(requests, words, kind, max_rows=rows, token_budget=token_budget)
    return [output_of(samples, words) for samples in states]


class Batching:
    """What calls with the same cache share: the forwards and the compiled samplers.

    Args:
        parts: the parts of the cache.
    """

    def __init__(self, parts: CacheParts) -> None:
        self._model, self._store, self._graphs = parts.model, parts.store, parts.graphs
        self._rows = RowCache(parts)
        self._samplers: dict[SamplerKind, Sampler] = {}
        self._running = threading.Lock()

    def run(
        self,
        requests: Sequence[Sequence[Request]],
        tokenizer: Tokenizer | None,
        kind: SamplerKind,
        *,
        max_rows: int,
        token_budget: int,
    ) -> list[list[RequestState]]:
        """Runs requests until all have ended; see `BatchLoop.run`.

        Raises:
            RuntimeError: another call with this cache is not over.
        """
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "another torch_bridge.generate with this cache is not over; give each thread a JaxkvCache of its own"
            )
        try:
            if self._store.owner.poisoned:
                self._store.index.clear()
                self._store.owner.rebuild()
            has_changed = begin_comparison(self._model, self._graphs.known, self._store)
            self._graphs.notice_text()
            sampler = self._samplers.pop(kind, None) or Sampler(kind, self._store.device)
            loop = partial(BatchLoop, self._store, self._rows)
            sizes = {"max_rows": max_rows, "token_budget": token_budget}
            try:
                states = loop(sampler, **sizes).run(requests, tokenizer, has_changed)
            except ModelChanged:
                # After an exception a sampler's entries are in an unknown state, so it is dropped.
                sampler = Sampler(kind, self._store.device)
                states = loop(sampler, **sizes).run(requests, tokenizer)
            self._samplers[kind] = sampler
            if len(self._samplers) > _MOST_SAMPLERS:
                del self._samplers[next(iter(self._samplers))]
            return states
        finally:
            self._running.release()


_MOST_SAMPLERS = 8
"""Samplers that a cache keeps, those used last; each has a buffer of logits."""

_BATCHING: weakref.WeakKeyDictionary[JaxkvCache, Batching] = weakref.WeakKeyDictionary()


def _vocab_size(model: PreTrainedModel) -> int:
    return model.config.get_text_config(decoder=True).vocab_size


def _longest(model: PreTrainedModel, cache: JaxkvCache | None) -> int:
    """Returns the most tokens of prompt and output of one request."""
    config = model.config.get_text_config(decoder=True)
    limits = [getattr(config, "max_position_embeddings", None)]
    if cache is not None:
        limits.append(cache.parts.store.allocator.longest(frees_out_of_window=True))
    return min((limit for limit in limits if limit is not None), default=2**20)


def _requests(
    model: PreTrainedModel,
    prompt: Prompt,
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    longest: int,
) -> list[Request]:
    """Returns the requests of one prompt, one for each sample."""
    made = tokenize(prompt, tokenizer, _vocab_size(model), max_tokens=longest)
    params = forbid_words(params, tokenizer)
    params.check_vocab(_vocab_size(model))
    ends = _end_ids(model)
    return [
        new_request(made, params, sample, max_model_len=longest, eos_ids=ends)
        for sample in range(params.n)
    ]


def _attends(model: PreTrainedModel, cache: JaxkvCache | None) -> bool:
    """Whether a layer attends. A cache has the plans of its layers; to make them takes milliseconds."""
    plans = plan_layers(model, page_size=_PAGE_SIZE) if cache is None else cache.parts.plans
    return any(isinstance(spec, PagedSpec) for plan in plans for spec in plan.specs)


def _refuse_model(model: PreTrainedModel) -> None:
    name = type(model).__name__
    why = None
    if not attends_pages(model):
        why = f'has another attention; call model.set_attn_implementation("{NAME}") first'
    elif turns_with_length(model):
        why = "has rotary angles that depend on the length of the text, and rows differ in length"
    elif "position_ids" not in inspect.signature(model.forward).parameters:
        why = "takes no position_ids, so rows of several lengths cannot share a forward"
    if why is not None:
        raise Unsupported(f"torch_bridge.generate cannot run {name}: it {why}")


def _refuse_params(params: SamplingParams, tokenizer: Tokenizer | None, *, has_cache: bool) -> None:
    for name in _REFUSED:
        if getattr(params, name) not in (None, {}):
            raise ValueError(
                f"torch_bridge.generate has no {name}, got {getattr(params, name)!r}; use jaxkv.LLM"
            )
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer; pass tokenizer=, or use stop_token_ids")
    if params.max_tokens is None and not has_cache:
        raise ValueError(
            "max_tokens=None takes as many tokens as the cache has room for; pass a cache, or max_tokens"
        )


def _end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Returns the ids that end a text in the model's own `generate`."""
    config = model.generation_config
    ends: Any = None if config is None else config.eos_token_id
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(int(one) for one in ends)


def _tokenizer(given: object, vocab_size: int) -> Tokenizer | None:
    """Returns jaxkv's tokenizer of one in another form, which may have fewer ids than the model's logits."""
    if given is None or isinstance(given, Tokenizer):
        return given
    if isinstance(given, str | Path):
        return load_tokenizer(given)
    library = getattr(given, "backend_tokenizer", None)
    if not isinstance(library, TokenizersTokenizer):
        raise ValueError(
            f"tokenizer must be a fast tokenizer of Transformers, a Tokenizer of jaxkv or the path of a model "
            f"directory, got {type(given).__name__}; or give token ids"
        )
    if library.padding is not None or library.truncation is not None:
        library = TokenizersTokenizer.from_str(library.to_str())
        library.no_padding()
        library.no_truncation()
    return Tokenizer(library, model_vocab_size=vocab_size)


def _cache_for(
    model: PreTrainedModel, requests: Sequence[Sequence[Request]], rows: int
) -> JaxkvCache:
    """Returns a cache with room for the longest requests that can run at once."""
    held = sorted(request.tokens_held for samples in requests for request in samples)
    # A sample of several copies the page of the prompt's end before it writes there.
    room = sum(_pages(tokens) + 1 for tokens in held[-rows:])
    return JaxkvCache(model, room * _PAGE_SIZE, page_size=_PAGE_SIZE, max_sequences=rows)


def _pages(tokens: int) -> int:
    return -(-tokens // _PAGE_SIZE)


_PAGE_SIZE = 16
