"""Text in, text out: a model directory, a cache, and the programs that run them."""

import inspect
import logging
import random
import secrets
import sys
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv import default_model
from jaxkv.cache.prefix.report import Explanation
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checks import as_int
from jaxkv.config.engine import EngineConfig, merge_configs
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import MAX_EOS_IDS, SamplingParams
from jaxkv.config.vllm_names import unknown_attribute
from jaxkv.engine.drive import check_compiled, output_of, serve_all, serve_stream
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock, refuse_forked_user
from jaxkv.engine.recovery import refuse_broken
from jaxkv.engine.request import Piece, Request, RequestOutput, check_salt, sample_seed
from jaxkv.engine.saved_prefixes import PrefixCounts, load_prefixes, save_prefixes
from jaxkv.engine.stats import Stats, collect_stats
from jaxkv.engine.warm_up import WarmUp, compile_all, declare_saved_prefixes, declare_served
from jaxkv.errors import BadCheckpoint
from jaxkv.memory import named_exhaustion
from jaxkv.models.decoder import Decoder
from jaxkv.models.protocol import Params
from jaxkv.models.registry import build_model, load_config, load_params, resolve_dtype
from jaxkv.plan import (
    check_room,
    free_bytes,
    plan_cache,
    resolve_length,
    tokens_ahead,
    weight_bytes,
)
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.programs.manifest import Programs
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.rows import Row
from jaxkv.runner.scoring import score_texts
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.text.bad_words import forbid_words
from jaxkv.text.prompts import (
    NO_TOKENIZER,
    Messages,
    Prompt,
    TokenizedPrompt,
    as_call,
    as_conversations,
    as_prompts,
    named,
    one_each,
    one_sample,
    tokenize,
)
from jaxkv.text.tokenizer import Tokenizer, load_tokenizer

_LOG = logging.getLogger(__name__)

_LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _check_options(model: object, load_format: str, *, strict: object, progress: object) -> None:
    """Raises `ValueError` for an option of `LLM` of the wrong type or value."""
    if not isinstance(model, str | Path | None):
        raise ValueError(f"model must be the path of a model directory, got {model!r}")
    if load_format not in _LOAD_FORMATS:
        raise ValueError(
            f"load_format must be one of {', '.join(_LOAD_FORMATS)}, got {load_format!r}"
        )
    for name, flag in (("strict", strict), ("progress", progress)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def _end_ids(directory: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the ids that end a text: those of the configuration, or else of the tokenizer.

    Raises:
        BadCheckpoint: there are more than `MAX_EOS_IDS`.
    """
    named = tokenizer.eos_ids if tokenizer else ()
    named = config.eos_ids or (token for token in named if token < config.vocab_size)
    found = tuple(dict.fromkeys(named))
    if len(found) > MAX_EOS_IDS:
        raise BadCheckpoint(
            f"{directory} names {len(found)} end ids, at most {MAX_EOS_IDS} can be used; "
            f"shorten eos_token_id in generation_config.json or config.json"
        )
    return found


def _key(seed: int) -> jax.Array:
    """Returns the PRNG key of 64 bits of a seed. `jax.random.key` drops those above 32."""
    words = np.asarray([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


class LLM:
    """A model ready to generate.

    Examples:
        >>> from jaxkv import LLM, SamplingParams
        >>> llm = LLM()  # the small model inside the package
        >>> llm.generate("def ", SamplingParams(temperature=0.0, max_tokens=8))[0].token_ids

    A dropped `LLM` frees its memory when Python collects it; `close`, or `with LLM() as llm:`, frees it at once.

    Args:
        model: a Hugging Face model directory (config.json, safetensors, tokenizer.json); the small model
            inside the package if not given. Nothing in the directory is executed.
        dtype: to compute in: "float32" ("fp32", "float"), "bfloat16" ("bf16"), "float16" ("fp16", "half"), or "auto"
            for the checkpoint's own.
        max_model_len: longest prompt plus output in tokens; the model's own limit if not given.
        cache: size, page size and dtype of the cache, and how many sequences run at once.
        engine: how requests are served: tokens per step, prefix cache, and what becomes of failures.
        implementation: what runs the attention and the cache's writes of every layer: "mosaic_gpu" (Hopper),
            "xla" (anywhere), "cudnn" (NVIDIA's paged attention for decode, and else the best that can run) or
            "xla_products" (our kernels, but XLA's products of few rows). If not given, "mosaic_gpu" where all layers
            can, and "xla" everywhere else; `stats` says which and why.
        strict: after `warm_up`, refuse to compile anything more.
        progress: where stderr is a terminal, show bars on it while weights load, programs compile and `generate` works.
        seed: requests without a seed get theirs from a generator with this one, in the order in which they come;
            `None` for unpredictable seeds.
        load_format: "auto" or "safetensors" read the checkpoint; "dummy" draws random weights instead, so the
            directory needs none.
        options: fields of `cache` and `engine` under vLLM's names, such as `max_num_seqs`; `jaxkv.config.vllm_names`
            lists them. They replace what `cache` and `engine` have.

    Raises:
        ValueError: an option is unknown or out of range, the cache cannot hold one sequence of `max_model_len`, or
            weights and cache need more memory than the device has.
        OutOfMemory: memory ran out all the same while the weights were loaded or the cache was made.
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
        seed: int | None = None,
        load_format: str = "auto",
        **options: object,
    ) -> None:
        refuse_forked_user()
        cache, engine = merge_configs(cache, engine, options, inspect.signature(LLM).parameters)
        _check_options(model, load_format, strict=strict, progress=progress)
        if seed is not None:
            seed = as_int("seed", seed, -(2**63), 2**64 - 1)
        # Requests without a seed take theirs from here. Python's generator drops the sign of its seed.
        self._draw_seed = (
            secrets.randbits if seed is None else random.Random(seed % 2**64).getrandbits
        )
        directory = Path(model) if model is not None else default_model.path()
        config = load_config(directory)
        dtype = resolve_dtype(dtype, config.dtype)
        enable_compile_cache()
        self.model: Decoder = build_model(config, implementation=implementation)
        self.tokenizer: Tokenizer | None = load_tokenizer(directory)
        self.eos_ids = _end_ids(directory, config, self.tokenizer)
        self.max_model_len = resolve_length(max_model_len, self.model.max_positions)
        # All of it is planned before anything is read, so that what cannot fit is refused at once.
        weights = weight_bytes(self.model, dtype)
        self.layout, self.budget = plan_cache(
            self.model,
            cache,
            dtype=dtype,
            max_model_len=self.max_model_len,
            free_bytes=free_bytes(cache.memory_share, weights=weights),
            ahead=tokens_ahead(self.model, cache, engine, self.max_model_len),
        )
        check_room(weights, self.budget.bytes)
        with named_exhaustion(f"loading weights of {weights:,} bytes"):
            params: Params = (
                self.model.init_params(_key(seed or 0), dtype)
                if load_format == "dummy"
                else load_params(
                    directory, self.model, dtype=dtype, progress=progress and sys.stderr.isatty()
                )
            )
        runner = ModelRunner(
            self.model, params, self.layout, self.budget.counts, Programs(strict=strict)
        )
        self.engine = Engine(
            SequenceRunner(runner, max_tokens=self.max_model_len, max_rows=cache.max_sequences),
            self.tokenizer,
            engine,
            host_bytes=cache.host_bytes,
        )
        self.lock = EngineLock()
        self._progress = progress

    # Hidden from type checkers, for which every attribute would exist.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raises `AttributeError`, with the alternative to a method that only vLLM has."""
            raise unknown_attribute(self, name)

    def __enter__(self) -> "LLM":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Frees the device's memory at once, and the host's; any further use of this `LLM` is a RuntimeError.

        Waits for a call of another thread to end. Streams under way end with the reason "abort". Twice is once. In a
        forked child it does nothing, since the memory is the parent's.

        Raises:
            RuntimeError: an `AsyncLLM` serves it; close that first.
        """
        if self.lock.is_closed:
            return
        with self.lock.held():
            self.lock.close()
            self.engine.close()

    def warm_up(
        self,
        *,
        batch: int,
        prompt_tokens: int,
        sampling: SamplingParams | None = None,
        score: bool = False,
        saved_prefixes: bool = False,
        **options: object,
    ) -> WarmUp:
        """Compiles what `generate`, `stream` and `AsyncLLM` need for requests like these, or shorter; runs nothing.

        May be called several times. A strict `LLM` refuses afterwards every request that needs another program.

        Args:
            batch: most prompts at once.
            prompt_tokens: tokens of the longest prompt.
            sampling: how their tokens are chosen; `max_tokens` and `n` count too.
            score: also what `score` needs for texts of `prompt_tokens`.
            saved_prefixes: also what `save_prefixes` and `load_prefixes` need.
            options: as for `generate`.

        Returns:
            How many programs that were, and what they took.

        Raises:
            ValueError: a number is out of range, or an option is unknown.
        """
        call = as_call("LLM.warm_up", options, sampling=sampling)
        [wish] = one_each(call["sampling"], 1)
        batch = as_int("batch", batch, 1, 2**20)
        prompt_tokens = as_int("prompt_tokens", prompt_tokens, 1, self.max_model_len)
        # The programs do not depend on the seed, and no seed is drawn for a request that is not served.
        wish = forbid_words(replace(wish, seed=0), self.tokenizer)
        request = self._request(TokenizedPrompt((0,) * prompt_tokens), wish, 0)
        with self.lock.held():
            needed = declare_served(self.engine, request, batch * wish.n)
            if score:
                row = Row(0, request.prompt, 0, SamplingParams(temperature=0.0))
                needed.append(self.engine.sequence_runner.score_spec(row))
            if saved_prefixes:
                needed += declare_saved_prefixes(self.engine)
            return compile_all(
                self.engine.runner, needed, progress=self._progress and sys.stderr.isatty()
            )

    def stats(self) -> Stats:
        """Returns what runs the model and why, how full its cache is, what was served, and what was compiled."""
        self.lock.refuse_if_closed()
        return collect_stats(self.engine)

    def get_tokenizer(self) -> Tokenizer | None:
        """Returns what turns text into ids and back; `None` if the model directory has no tokenizer.json."""
        return self.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> list[RequestOutput]:
        """Generates for a list of prompts, in one continuous batch; a single prompt is a list of one.

        All prompts are checked before anything begins: one that can never be served refuses the whole call, by its
        place in the list. What fails later fails alone: its `finish_reason` is "error", and `error` has the reason. An
        interrupt (Ctrl-C) gives up the call and leaves the `LLM` ready for the next. Threads that call at the same
        time wait for one another; `AsyncLLM` serves them together.

        Args:
            prompts: texts, lists or arrays of token ids, or dicts with "prompt" or "prompt_token_ids" and perhaps
                "cache_salt".
            sampling: for all prompts, or one for each.
            progress: show a bar with tokens per second on stderr; if not given, on a terminal alone.
            options: fields of `SamplingParams` in place of `sampling`, such as `max_tokens=3`; and vLLM's names
                `sampling_params` and `use_tqdm`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt is empty, has ids the model lacks, or leaves no room for a token; or an option is
                unknown.
            ProgramRefused: strict mode has no program for one of them; nothing was begun.
            OutOfPages: another caller, such as a stream, holds the pages that the first request in the queue needs.
            CachePoisoned, JaxRuntimeError: the cache was lost too often, or the device is broken.
        """
        call = as_call("LLM.generate", options, sampling=sampling, progress=progress)
        listed = as_prompts(prompts)
        wishes = one_each(call["sampling"], len(listed))
        asked = []
        for place, (prompt, params) in enumerate(zip(listed, wishes, strict=True)):
            with named("prompt", place, len(listed)):
                asked.append(self._checked(prompt, params))
        bar = call["progress"]
        shown = self._progress and sys.stderr.isatty() if bar is None else bool(bar)
        with self.lock.held():
            self._recover()
            made = serve_all(self.engine, asked, progress=shown)
        return [output_of(samples, self.tokenizer) for samples in made]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: object
    ) -> Generator[Piece]:
        """Yields pieces of text as they are generated; the pieces joined are the whole text.

        Nothing is computed between two pieces that are asked for; closed or dropped early, it aborts the request.
        Several streams may be under way at once: a step for one is a step for all.

        Args:
            prompt: one prompt in any form that `generate` takes.
            sampling: how its tokens are chosen.
            options: as for `generate`.

        Raises:
            ValueError: as for `generate`, and for `n` above 1; raised here, not at the first piece.
        """
        call = as_call("LLM.stream", options, sampling=sampling)
        [request] = self._checked(prompt, one_sample(call["sampling"]))
        self.lock.refuse_if_lent()
        return self._stream(request)

    def _stream(self, request: Request) -> Generator[Piece]:
        with self.lock.held():
            self._recover()
        yield from serve_stream(self.lock, self.engine, request)

    def _recover(self) -> None:
        """Replaces a cache that an earlier failure has cost, however often that happened: the user asks again."""
        owner = self.engine.runner.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            _LOG.warning("the cache was lost, an empty one takes its place")
            owner.rebuild()
        self.engine.refresh()

    def explain(
        self, prompt: Prompt, *, salt: str | bytes | None = None, **options: object
    ) -> Explanation:
        """Returns how much of a prompt the prefix cache holds and why not more, as numbers and as text.

        Args:
            prompt: one prompt in any form that `generate` takes.
            salt: the one that the prompt's requests have.
            options: vLLM's name `cache_salt`.

        Raises:
            ValueError: it is no prompt, or the prefix cache is off.
        """
        call = as_call("LLM.explain", options, salt=salt)
        asked = self._tokenize(prompt, call["salt"])
        check_salt(asked.salt)
        ids, salt, index = asked.ids, asked.salt, self.engine.prefix
        if index is None:
            raise ValueError(
                "the prefix cache is off; make the LLM with EngineConfig(prefix_cache=True)"
            )
        if self.lock.lent:
            return index.explain(ids, salt)
        with self.lock.held():
            self._recover()
            return index.explain(ids, salt)

    def save_prefixes(
        self, path: str | Path, prompts: Prompt | Sequence[Prompt] | None = None
    ) -> PrefixCounts:
        """Writes the prefix cache to one safetensors file, from which `load_prefixes` of a later process restores it.

        Full pages and state checkpoints are saved, with the tokens that they belong to in plain: the file tells what
        the prompts were. What was cached under a salt is not saved, since the salt is a secret of its user. The file
        appears whole or not at all.

        Args:
            path: a new file, or a file to replace.
            prompts: save only what is cached of the beginnings of these; in any form that `generate` takes, without a
                salt. Everything if not given.

        Returns:
            How many tokens, pages, checkpoints and bytes were saved.

        Raises:
            ValueError: the prefix cache is off, a prompt is none or has a salt, or `path` is no regular file.
            ProgramRefused: strict mode was not warmed up with `saved_prefixes=True`.
            OSError: the file cannot be written; a file that was there is as it was.
            RuntimeError: an `AsyncLLM` serves this `LLM`.
        """
        texts = None if prompts is None else self._texts_to_save(prompts)
        with self.lock.held():
            self._recover()
            return save_prefixes(self.engine, path, texts)

    def load_prefixes(self, path: str | Path) -> PrefixCounts:
        """Puts as much as fits of a file of `save_prefixes` into the prefix cache; requests that begin alike hit it.

        The cache may have another number of pages than the one that was saved. What the file has more than there is
        room for is left out: prefixes that more texts share come first, in free pages and in those of prefixes that no
        request holds. The bytes of the file are believed, like those of a checkpoint.

        Args:
            path: the file.

        Returns:
            How much was loaded, was cached already, and was left out.

        Raises:
            BadCheckpoint: the file is damaged, or was saved with another model, implementation, dtype or cache layout,
                or with other weights; nothing was changed.
            FileNotFoundError: there is no such file.
            ValueError: the prefix cache is off.
            ProgramRefused: strict mode was not warmed up with `saved_prefixes=True`.
            RuntimeError: an `AsyncLLM` serves this `LLM`.
        """
        with self.lock.held(), named_exhaustion("loading prefixes"):
            self._recover()
            return load_prefixes(self.engine, path)

    def _texts_to_save(self, prompts: Prompt | Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Returns the tokens of prompts without a salt."""
        texts = []
        listed = as_prompts(prompts)
        for place, prompt in enumerate(listed):
            with named("prompt", place, len(listed)):
                made = self._tokenize(prompt)
                if made.salt is not None:
                    raise ValueError("what is cached under a cache_salt is not saved")
                texts.append(made.ids)
        return texts

    @overload
    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, Any]]] | list[str],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers a conversation, or each of a list of conversations, through the model's own chat template.

        Args:
            messages: dicts with "role" and "content", or a text for one message of the user; or a list of these.
            sampling: how to choose the answer's tokens; for several conversations, one or one each.
            progress: show a bar on stderr; if not given, for several conversations on a terminal.
            options: as for `generate`.

        Returns:
            One output for a conversation, where vLLM returns a list of one; a list of outputs for a list of
            conversations, also if it has one.

        Raises:
            ValueError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        call = as_call("LLM.chat", options, sampling=sampling, progress=progress)
        conversations, several = as_conversations(messages)
        prompts: list[Prompt] = []
        for place, conversation in enumerate(conversations):
            with named("conversation", place, len(conversations)):
                prompts.append(self.chat_prompt(conversation))
        bar = False if call["progress"] is None and not several else call["progress"]
        outputs = self.generate(prompts, call["sampling"], progress=bar)
        return outputs if several else outputs[0]

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Returns the token ids of one conversation, ready for the answer."""
        self.lock.refuse_if_closed()
        if self.tokenizer is None:
            raise ValueError(f"chat needs a tokenizer: {NO_TOKENIZER}")
        [conversation], _ = as_conversations(messages)
        return self.tokenizer.encode_chat(conversation, max_tokens=self.max_model_len)

    def score(self, prompts: Prompt | Sequence[Prompt]) -> list[np.ndarray]:
        """Returns, per prompt, the float32 log-probability of each token after the first, given those before it.

        Raises:
            ValueError: a prompt is empty, too long, or has ids the model lacks.
        """
        ids = []
        listed = as_prompts(prompts)
        for place, prompt in enumerate(listed):
            with named("prompt", place, len(listed)):
                ids.append(self._tokenize(prompt).ids)
                if len(ids[-1]) > self.max_model_len:
                    raise ValueError(
                        f"a text of {len(ids[-1])} tokens exceeds max_model_len, {self.max_model_len}"
                    )
        with self.lock.held(), named_exhaustion("scoring texts"):
            self._recover()
            return list(score_texts(self.engine.sequence_runner, ids))

    def _tokenize(self, prompt: Prompt, salt: str | bytes | None = None) -> TokenizedPrompt:
        self.lock.refuse_if_closed()
        made = tokenize(
            prompt, self.tokenizer, self.model.vocab_size, max_tokens=self.max_model_len
        )
        if salt is None:
            return made
        if made.salt is not None:
            raise ValueError('the prompt has a "cache_salt" of its own; give one salt')
        return replace(made, salt=salt)

    def requests(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
    ) -> list[Request]:
        """Returns what the engine is asked for one prompt: `n` samples.

        Raises:
            ValueError: as for `generate`.
            ProgramRefused: strict mode has no program for it.
        """
        made = self._tokenize(prompt, salt)
        params = forbid_words(params, self.tokenizer)
        requests = [self._request(made, params, sample, priority) for sample in range(params.n)]
        check_compiled(self.engine, requests[0])
        return requests

    def _checked(self, prompt: Prompt, params: SamplingParams) -> list[Request]:
        """Returns the requests of one prompt, which the engine can serve."""
        requests = self.requests(prompt, params)
        self.engine.check(requests[0])
        return requests

    def _request(
        self, prompt: TokenizedPrompt, params: SamplingParams, sample: int, priority: int = 0
    ) -> Request:
        params.check_vocab(self.model.vocab_size)
        room = self.max_model_len - len(prompt.ids)
        if room < 1:
            raise ValueError(
                f"a prompt of {len(prompt.ids)} tokens leaves no room for another, since max_model_len is "
                f"{self.max_model_len}; shorten it or raise max_model_len"
            )
        allowed = room if params.max_tokens is None else min(params.max_tokens, room)
        params = replace(params, max_tokens=allowed, min_tokens=min(params.min_tokens, allowed))
        eos = () if params.ignore_eos else self.eos_ids
        return Request(
            prompt=prompt.ids,
            text=prompt.text,
            params=params,
            seed=sample_seed(params, sample, self._draw_seed),
            stop_ids=tuple(dict.fromkeys((*params.stop_token_ids, *eos))),
            priority=priority,
            salt=prompt.salt,
        )
