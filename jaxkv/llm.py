"""Text in, text out: a model directory, a cache, and the programs that run them."""

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import default_model
from jaxkv.cache.prefix_report import Explanation
from jaxkv.config import CacheConfig, SamplingParams
from jaxkv.engine.compile_cache import enable_compile_cache
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_config import EngineConfig
from jaxkv.engine.executor import Executor
from jaxkv.engine.programs import Programs
from jaxkv.engine.recovery import refuse_broken
from jaxkv.engine.request import Piece, Request, RequestOutput, sample_seed
from jaxkv.engine.rows import Row
from jaxkv.engine.scoring import score_texts
from jaxkv.engine.serve import check_compiled, output_of, serve_all, serve_stream
from jaxkv.engine.stats import Stats, collect_stats
from jaxkv.engine.turns import Turns
from jaxkv.engine.warm_up import WarmUp, compile_all, declare_served
from jaxkv.models.protocol import Model
from jaxkv.models.registry import build_model, load_config
from jaxkv.plan import free_bytes, plan_cache, resolve_dtype, resolve_length, tokens_ahead
from jaxkv.prompts import Prompt, as_prompts, one_each, prompt_ids
from jaxkv.tokenizer import Tokenizer, load_tokenizer
from jaxkv.weights.load import load_params

_LOG = logging.getLogger(__name__)


class LLM:
    """A model ready to generate.

    Example:
        >>> from jaxkv import LLM, SamplingParams
        >>> llm = LLM()  # the small model inside the package
        >>> llm.generate("def ", SamplingParams(temperature=0.0, max_tokens=8))[0].token_ids

    Args:
        model: a Hugging Face model directory (config.json, safetensors, tokenizer.json); the small model
            inside the package if not given. Nothing in the directory is executed.
        dtype: to compute in: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        max_model_len: longest prompt plus output in tokens; the model's own limit if not given.
        cache: size, page size and dtype of the cache, and how many sequences run at once.
        engine: how requests are served: tokens per step, prefix cache, and what becomes of failures.
        implementation: what runs the attention and the cache's writes of every layer: "mosaic_gpu" (Hopper),
            "xla" (anywhere), "cudnn" (NVIDIA's paged attention for decode, and else the best that can run) or
            "xla_products" (our kernels, but XLA's products of few rows). If not given, "mosaic_gpu" where all layers
            can, and "xla" everywhere else; `stats` says which and why.
        strict: after `warm_up`, refuse to compile anything more.
        progress: show a progress bar on stderr while weights load, and on a terminal while `generate` works.

    Raises:
        ValueError: an argument is out of range, or the cache cannot hold one sequence of `max_model_len`.
        Unsupported: the `implementation` asked for cannot run this model here; a `ValueError` with every reason.
        UnknownConfig, BadCheckpoint: the directory holds something that is not understood, or damaged.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        dtype: str = "auto",
        max_model_len: int | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        implementation: str | None = None,
        strict: bool = False,
        progress: bool = True,
    ) -> None:
        cache, engine = cache or CacheConfig(), engine or EngineConfig()
        for name, given, kind in (("cache", cache, CacheConfig), ("engine", engine, EngineConfig)):
            if not isinstance(given, kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {given!r}")
        directory = Path(model) if model is not None else default_model.path()
        config = load_config(directory)
        dtype = resolve_dtype(dtype, config.dtype)
        enable_compile_cache()
        self.model: Model = build_model(config, implementation=implementation)
        self.tokenizer: Tokenizer | None = load_tokenizer(directory)
        named = self.tokenizer.eos_ids if self.tokenizer else ()
        self.eos_ids = config.eos_ids or tuple(
            token for token in named if token < self.model.vocab_size
        )
        self.max_model_len = resolve_length(max_model_len, self.model.max_positions)
        params = load_params(directory, self.model, dtype=dtype, progress=progress)
        self.layout, self.budget = plan_cache(
            self.model,
            cache,
            dtype=dtype,
            max_model_len=self.max_model_len,
            free_bytes=free_bytes(cache.memory_share),
            ahead=tokens_ahead(self.model, cache, engine, self.max_model_len),
        )
        self.executor = Executor(
            self.model,
            params,
            self.layout,
            self.budget.counts,
            max_tokens=self.max_model_len,
            max_rows=cache.max_sequences,
            programs=Programs(strict=strict),
            host_bytes=cache.host_bytes,
        )
        self.engine = Engine(self.executor, self.tokenizer, engine)
        self.turns = Turns()
        self._progress = progress

    def warm_up(
        self,
        *,
        batch: int,
        prompt_tokens: int,
        sampling: SamplingParams | None = None,
        score: bool = False,
    ) -> WarmUp:
        """Compiles what `generate`, `stream` and `AsyncLLM` need for requests like these, or shorter; runs nothing.

        May be called several times. A strict `LLM` refuses afterwards whatever would have to be compiled.

        Args:
            batch: most prompts at once.
            prompt_tokens: tokens of the longest prompt.
            sampling: how their tokens are chosen; `max_tokens` and `n` count too.
            score: also what `score` needs for texts of `prompt_tokens`.

        Returns:
            How many programs that were, and what they took.
        """
        wish = sampling or SamplingParams()
        request = self._request((0,) * prompt_tokens, wish, 0)
        with self.turns.turn():
            needed = declare_served(self.engine, request, batch * wish.n)
            if score:
                row = Row(0, request.prompt, 0, SamplingParams(temperature=0.0))
                needed.append(self.executor.shapes.score(row))
            return compile_all(
                self.executor, needed, progress=self._progress and sys.stderr.isatty()
            )

    def stats(self) -> Stats:
        """Returns what runs the model and why, how full its cache is, what was served, and what was compiled."""
        return collect_stats(self.engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generates for a list of prompts, in one continuous batch; a single string is a list of one.

        All prompts are checked before anything begins: one that can never be served refuses the whole call, by its
        place in the list. What fails later fails alone: its `finish_reason` is "error", and the log says why. An
        interrupt (Ctrl-C) gives up the call and leaves the `LLM` ready for the next. Threads that call at the same
        time wait for one another; `AsyncLLM` serves them together.

        Args:
            prompts: texts, or lists of token ids.
            sampling: for all prompts, or one for each.
            progress: show a bar with tokens per second on stderr; if not given, on a terminal alone.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt is empty, has ids the model lacks, or leaves no room for a token.
            ProgramRefused: strict mode has no program for one of them; nothing was begun.
            OutOfPages: somebody else, such as a stream, holds the pages that the first in the queue needs.
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
        """
        listed = as_prompts(prompts)
        wishes = one_each(sampling, len(listed))
        asked = [
            self._checked(prompt, params, f"prompt {place}: " if len(listed) > 1 else "")
            for place, (prompt, params) in enumerate(zip(listed, wishes, strict=True))
        ]
        shown = self._progress and sys.stderr.isatty() if progress is None else progress
        with self.turns.turn():
            self._recover()
            made = serve_all(self.engine, asked, progress=shown)
        return [output_of(samples, self.tokenizer) for samples in made]

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields pieces of text as they are generated; the pieces joined are the whole text.

        Nothing is computed between two pieces that are asked for; closed or dropped early, it aborts the request.
        Several streams may be under way at once: a step for one is a step for all.

        Raises:
            ValueError: as for `generate`, and for `n` above 1; raised here, not at the first piece.
        """
        params = sampling or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a stream is one sample, got n={params.n}; use generate")
        [request] = self._checked(prompt, params)
        self.turns.refuse_if_lent()
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Piece]:
        with self.turns.turn():
            self._recover()
        yield from serve_stream(self.turns, self.engine, request)

    def _recover(self) -> None:
        """Replaces a cache that an earlier failure has cost, however often that happened: the user asks again."""
        owner = self.executor.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            _LOG.warning("the cache was lost, an empty one takes its place")
            owner.rebuild()
        self.engine.refresh()

    def explain(self, prompt: Prompt, *, salt: str | bytes | None = None) -> Explanation:
        """Returns how much of a prompt the prefix cache holds and why not more, as numbers and as text.

        Args:
            prompt: a text, or token ids.
            salt: the one that the prompt's requests have.

        Raises:
            ValueError: it is no prompt, or the prefix cache is off.
        """
        ids, index = self._prompt_ids(prompt), self.engine.prefix
        if index is None:
            raise ValueError(
                "the prefix cache is off; make the LLM with EngineConfig(prefix_cache=True)"
            )
        if self.turns.lent:
            return index.explain(ids, salt)
        with self.turns.turn():
            self._recover()
            return index.explain(ids, salt)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling: SamplingParams | None = None
    ) -> RequestOutput:
        """Answers a conversation through the model's own chat template.

        Args:
            messages: dicts with "role" and "content".
            sampling: how to choose the answer's tokens.

        Raises:
            ValueError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        return self.generate([self.chat_prompt(messages)], sampling, progress=False)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the token ids of a conversation, ready for the answer."""
        if self.tokenizer is None:
            raise ValueError("this model directory has no tokenizer.json, so it cannot chat")
        return self.tokenizer.encode_chat(messages)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Returns, per prompt, the float32 log-probability of each token after the first, given those before it.

        Raises:
            ValueError: a prompt is empty, too long, or has ids the model lacks.
        """
        ids = [self._prompt_ids(prompt) for prompt in as_prompts(prompts)]
        for prompt in ids:
            if len(prompt) > self.max_model_len:
                raise ValueError(
                    f"a text of {len(prompt)} tokens exceeds max_model_len, {self.max_model_len}"
                )
        with self.turns.turn():
            self._recover()
            return list(score_texts(self.executor, ids))

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt_ids(prompt, self.tokenizer, self.model.vocab_size)

    def requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Returns what the engine is asked for one prompt: `n` samples.

        Raises:
            ValueError: as for `generate`.
            ProgramRefused: strict mode has no program for it.
        """
        ids = self._prompt_ids(prompt)
        requests = [self._request(ids, params, sample) for sample in range(params.n)]
        check_compiled(self.engine, requests[0])
        return requests

    def _checked(self, prompt: Prompt, params: SamplingParams, place: str = "") -> list[Request]:
        """Returns the requests of one prompt, which the engine can serve; errors begin with `place`."""
        try:
            requests = self.requests(prompt, params)
            self.engine.check(requests[0])
        except ValueError as error:
            raise ValueError(f"{place}{error}") from error
        return requests

    def _request(self, prompt: tuple[int, ...], params: SamplingParams, sample: int) -> Request:
        params.check_vocab(self.model.vocab_size)
        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens leaves no room for another, since max_model_len is "
                f"{self.max_model_len}; shorten it or raise max_model_len"
            )
        allowed = min(params.max_tokens, room)
        params = replace(params, max_tokens=allowed, min_tokens=min(params.min_tokens, allowed))
        eos = () if params.ignore_eos else self.eos_ids
        return Request(
            prompt=prompt,
            params=params,
            seed=sample_seed(params, sample),
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
        )
