"""Text in, text out: a model directory, a cache, and the programs that run them."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from jaxkv import default_model
from jaxkv.cache.prefix_report import Explanation
from jaxkv.config import CacheConfig, SamplingParams
from jaxkv.engine.compile_cache import enable_compile_cache
from jaxkv.engine.detokenize import Detokenizer
from jaxkv.engine.engine import Engine
from jaxkv.engine.executor import Executor
from jaxkv.engine.offline import Finished, generate_waves, score_texts
from jaxkv.engine.programs import Programs
from jaxkv.engine.recovery import refuse_broken
from jaxkv.engine.request import Piece, Request, RequestOutput, SampleOutput, sample_seed
from jaxkv.engine.rows import Row
from jaxkv.engine.serve import output_of, serve_all, serve_stream
from jaxkv.engine.stats import Stats, collect_stats
from jaxkv.engine.stream import stream_request
from jaxkv.engine.warm_up import declare_served
from jaxkv.models.protocol import Model
from jaxkv.models.registry import build_model, load_config
from jaxkv.plan import free_bytes, plan_cache, resolve_dtype, resolve_length
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
        cache: size, page size and dtype of the cache.
        implementation: what runs the attention and the cache's writes of every layer: "mosaic_gpu" (Hopper),
            "xla" (anywhere) or "cudnn" (NVIDIA's paged attention for decode, and else the best that can run). If not
            given, "mosaic_gpu" where all layers can, and "xla" everywhere else; `stats` says which and why.
        strict: after `warm_up`, refuse to compile anything more.
        progress: show a progress bar on stderr while weights load.

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
        implementation: str | None = None,
        strict: bool = False,
        progress: bool = True,
    ) -> None:
        cache = cache or CacheConfig()
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
        )
        self.executor = Executor(
            self.model,
            params,
            self.layout,
            self.budget.counts,
            max_tokens=self.max_model_len,
            max_rows=cache.max_sequences,
            programs=Programs(strict=strict),
        )
        self._lent = False

    def lend(self) -> None:
        """Leaves the engine to an `AsyncLLM`: until `take_back`, whatever else would run the model is refused.

        Raises:
            RuntimeError: it is lent already.
        """
        self._refuse_if_lent()
        self._lent = True

    def take_back(self) -> None:
        """Ends what `lend` began."""
        self._lent = False

    def _refuse_if_lent(self) -> None:
        if self._lent:
            raise RuntimeError(
                "an AsyncLLM serves this LLM, whose cache and engine only its thread may use; close it first, "
                "or send it the request"
            )

    def warm_up(
        self,
        *,
        batch: int,
        prompt_tokens: int,
        sampling: SamplingParams | None = None,
        score: bool = False,
        engine: bool = False,
    ) -> None:
        """Compiles what `generate` and `stream` need for requests like these; nothing is executed.

        May be called several times. A strict `LLM` refuses afterwards whatever would have to be compiled.

        Args:
            batch: prompts of one `generate` call.
            prompt_tokens: tokens of each prompt.
            sampling: how their tokens are chosen; `max_tokens` and `n` count too.
            score: also what `score` needs for texts of `prompt_tokens`.
            engine: also what `AsyncLLM`, and requests with stop strings, need. If `sampling` has stop strings, that is
                compiled anyway.
        """
        self._refuse_if_lent()
        wish = sampling or SamplingParams()
        request = self._request((0,) * prompt_tokens, wish, 0)
        shapes = self.executor.shapes
        needed = shapes.declare([request] * (batch * wish.n), whole=self.model.whole_prompts)
        if wish.stop:
            needed = []
        if wish.stop or engine:
            needed += declare_served(self.engine, request, batch * wish.n)
        if score:
            needed.append(shapes.score(Row(0, request.prompt, 0, SamplingParams(temperature=0.0))))
        programs = self.executor.programs
        programs.unseal()
        try:
            for declared in needed:
                self.executor.program(declared)
        finally:
            programs.seal()

    def stats(self) -> Stats:
        """Returns what runs the model and why, how full its cache is, and what was compiled."""
        return collect_stats(self.executor)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generates for a list of prompts; a single string is a list of one.

        Args:
            prompts: texts, or lists of token ids.
            sampling: for all prompts, or one for each.

        Raises:
            ValueError: a prompt is empty, has ids the model lacks, or leaves no room for a token.
        """
        ids = [self._prompt_ids(prompt) for prompt in as_prompts(prompts)]
        wishes = one_each(sampling, len(ids))
        prompts_samples = [
            self._samples(prompt, params) for prompt, params in zip(ids, wishes, strict=True)
        ]
        self._recover()
        if any(params.stop for params in wishes):
            made = serve_all(self.engine, prompts_samples)
            return [output_of(samples, self.tokenizer) for samples in made]
        finished = list(generate_waves(self.executor, list(chain.from_iterable(prompts_samples))))
        outputs, first = [], 0
        for prompt, params in zip(ids, wishes, strict=True):
            samples = [self._sample(result) for result in finished[first : first + params.n]]
            outputs.append(RequestOutput(prompt_token_ids=list(prompt), outputs=samples))
            first += params.n
        return outputs

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields pieces of text as they are generated; the pieces joined are the whole text.

        Raises:
            ValueError: as for `generate`, and for `n` above 1; raised here, not at the first piece.
        """
        params = sampling or SamplingParams()
        if params.n != 1:
            raise ValueError(f"a stream is one sample, got n={params.n}; use generate")
        request = self._request(self._prompt_ids(prompt), params, 0)
        self._refuse_if_lent()
        if params.stop:
            self.engine.check(request)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[Piece]:
        detokenizer = Detokenizer(self.tokenizer) if self.tokenizer else None
        self._recover()
        if request.params.stop:
            yield from serve_stream(self.engine, request)
            return
        with closing(stream_request(self.executor, request)) as tokens:
            for token in tokens:
                text = ""
                if detokenizer is not None and token.token_id is not None:
                    text = detokenizer.push(token.token_id)
                if detokenizer is not None and token.reason is not None:
                    text += detokenizer.finish()
                yield Piece(
                    text=text,
                    token_id=token.token_id,
                    finish_reason=token.reason,
                    logprobs=token.logprobs,
                )

    def _recover(self) -> None:
        """Replaces a cache that an earlier failure has cost; nothing of this call is in it yet."""
        self._refuse_if_lent()
        owner = self.executor.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            _LOG.warning("the cache was lost, an empty one takes its place")
            owner.rebuild()
            self.engine.refresh()

    def explain(self, prompt: Prompt, *, salt: str | bytes | None = None) -> Explanation:
        """Returns how much of a prompt the engine's prefix cache holds and why not more, as numbers and as text."""
        if not self._lent:
            self.engine.refresh()
        index = self.engine.prefix
        assert index is not None, "the engine of an LLM keeps prefixes"
        return index.explain(self._prompt_ids(prompt), salt)

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
        return self.generate([self.chat_prompt(messages)], sampling)[0]

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
        self._recover()
        return list(score_texts(self.executor, ids))

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        return prompt_ids(prompt, self.tokenizer, self.model.vocab_size)

    @cached_property
    def engine(self) -> Engine:
        """Serves requests that come and go; `AsyncLLM` runs it in a thread of its own."""
        return Engine(self.executor, self.tokenizer)

    def requests(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Returns what the engine is asked for one prompt: `n` samples.

        Raises:
            ValueError: as for `generate`.
        """
        return self._samples(self._prompt_ids(prompt), params)

    def _samples(self, prompt: tuple[int, ...], params: SamplingParams) -> list[Request]:
        return [self._request(prompt, params, sample) for sample in range(params.n)]

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

    def _sample(self, result: Finished) -> SampleOutput:
        if result.reason == "error":
            _LOG.error(
                "a request failed after %d tokens: its logits were not finite",
                len(result.token_ids),
            )
        text = self.tokenizer.decode(result.token_ids) if self.tokenizer else ""
        return SampleOutput(
            text=text,
            token_ids=list(result.token_ids),
            finish_reason=result.reason,
            logprobs=None if result.logprobs is None else list(result.logprobs),
        )
