"""`Service`: what all routes share: the engine, the tokenizer, the limits, and the one way to begin a generation."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxkv.config.sampling import SamplingParams
from jaxkv.serve.engine_client import EngineClient, EngineLost
from jaxkv.serve.generation import Generation, generate
from jaxkv.serve.http.errors import ApiError, bad_request, from_engine, unavailable
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.metrics import Recorder
from jaxkv.serve.parsers.choose import ParserChoice, choose_parsers
from jaxkv.serve.replicas import ReplicaClient
from jaxkv.serve.stats_poll import StatsPoll
from jaxkv.serve.token_texts import TokenTexts
from jaxkv.serve.wire import Ready
from jaxkv.text.chat_template import ChatOptions
from jaxkv.text.tokenizer import Tokenizer
from jaxkv.wording import clip

PROMPT_END = 1000
"""How many of a prompt's last characters parsers of answers see."""


class ChatPrompt(NamedTuple):
    """A conversation as a prompt.

    Attributes:
        ids: its token ids.
        end: the last characters of its text.
    """

    ids: list[int]
    end: str


@dataclass
class Service:
    """The served model. All methods belong to one event loop.

    Attributes:
        client: the engine process, or those of several replicas.
        tokenizer: the tokenizer of the model; `None` if it has none.
        model_name: the name that requests give.
        limits: bounds on requests.
        loading: the tokenizer is still to come.
        draining: no new requests are taken; those in progress go on.
        created: Unix time of the start, in seconds.
        tool_parser: name of the format of the model's tool calls, or "none"; if not given, it is found.
        reasoning_parser: name of the format of the model's reasoning, or "none"; if not given, it is found.
        adapters: names of the adapters that requests may give in place of the model's.
        recorder: counts what the server does.
        stats: the engine's statistics.
        picture: the engine's statistics and its picture.
        token_texts: texts of single tokens.
    """

    client: EngineClient | ReplicaClient
    tokenizer: Tokenizer | None
    model_name: str
    limits: Limits = field(default_factory=Limits)
    loading: bool = False
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    adapters: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Bounds the threads."""
        self.token_texts = TokenTexts(self.tokenizer)
        self._parsers: ParserChoice | None = None
        self._threads = asyncio.Semaphore(self.limits.threads)
        self.recorder = Recorder()
        self.stats = StatsPoll(self.client, pages=False)
        self.picture = StatsPoll(self.client, pages=True)

    def loaded(self, tokenizer: Tokenizer | None) -> None:
        """Takes the tokenizer of a model that has been loaded; requests are served from now on."""
        self.tokenizer = tokenizer
        self.token_texts = TokenTexts(tokenizer)
        self._parsers = None
        self.loading = False

    @property
    def parsers(self) -> ParserChoice:
        """The parsers of the model's answers.

        Raises:
            ApiError: 503 while the model loads.
        """
        if self._parsers is None:
            tokenizer, model_type = self.tokenizer, self.facts.model_type
            template = None if tokenizer is None else tokenizer.chat_template
            self._parsers = choose_parsers(
                None if template is None else "\n".join(template.templates.values()),
                () if tokenizer is None else tokenizer.special_texts(),
                model_type,
                tools=self.tool_parser,
                reasoning=self.reasoning_parser,
            )
        return self._parsers

    def now(self) -> int:
        """Returns the Unix time in seconds."""
        return int(time.time())

    @property
    def facts(self) -> Ready:
        """The facts about its model that the engine process has sent.

        Raises:
            ApiError: 503 while it loads or after it has ended.
        """
        if self.client.failure is not None:
            raise from_engine(self.client.failure, self.limits.retry_after_seconds)
        if self.loading or self.client.facts is None:
            raise unavailable(
                "loading", "the model is being loaded; try again", self.limits.retry_after_seconds
            )
        return self.client.facts

    @property
    def most_samples(self) -> int:
        """Most samples that may run or wait at once.

        Raises:
            ApiError: 503 without an engine, see `facts`.
        """
        return self.facts.max_sequences + self.limits.most_waiting

    def check_takes(self, samples: int) -> None:
        """Checks that this number of samples can begin now.

        Raises:
            ApiError: 503 while draining, loading or without an engine, 429 if too many samples wait.
        """
        wait = self.limits.retry_after_seconds
        if self.draining:
            raise unavailable("draining", "the server is ending and takes no new requests", wait)
        most, taken = self.most_samples, self.client.num_open
        if taken + samples > most:
            raise ApiError(
                429,
                "queue_full",
                f"{taken} samples run or wait, at most {most} may; try again in {wait} s",
                headers={"retry-after": str(wait)},
            )

    def begin(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes | None = None,
    ) -> Generation:
        """Begins one prompt in the engine; returns its texts. The caller aborts it in a `finally`.

        Args:
            prompt_ids: token ids of the prompt.
            params: sampling parameters.
            priority: lower numbers are served first.
            salt: see `prefix_salt`.

        Raises:
            ApiError: 400 for a prompt or parameters that the model cannot serve, otherwise see `check_takes`.
        """
        self.check_takes(params.n)
        self.check_ids(prompt_ids)
        self.check_length(len(prompt_ids), params)
        try:
            return generate(
                self.client,
                self.tokenizer,
                prompt_ids,
                params,
                priority=priority,
                salt=salt,
                watcher=self.recorder,
            )
        except EngineLost as error:
            raise from_engine(error, self.limits.retry_after_seconds) from error
        except ValueError as error:
            text = clip(error, 500)
            param = next((name for name in ("stop", "bad_words") if text.startswith(name)), None)
            raise bad_request(text, param) from error

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Returns the token ids of a text, in a thread.

        Raises:
            ApiError: 400 if there is no tokenizer, or the text is certainly too long or no text.
        """
        tokenizer, most = self._tokenizer(), self.facts.max_model_len
        return await self.in_thread(
            lambda: tokenizer.encode(text, add_special=add_special, max_tokens=most), "prompt"
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: ChatOptions | None = None
    ) -> ChatPrompt:
        """Returns the prompt of a conversation, made in a thread.

        Raises:
            ApiError: 400 if there is no tokenizer or chat template, or the template refuses the messages.
        """
        tokenizer, most = self._tokenizer(), self.facts.max_model_len
        template = tokenizer.chat_template
        if template is None:
            raise bad_request("the model has no chat template; use /v1/completions", "messages")

        def encode() -> ChatPrompt:
            text = template.render(messages, options)
            ids = tokenizer.encode(text, add_special=False, max_tokens=most)
            return ChatPrompt(ids, text[-PROMPT_END:])

        return await self.in_thread(encode, "messages")

    async def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, special tokens by their names, in a thread.

        Raises:
            ApiError: 400 if there is no tokenizer or an id is out of range.
        """
        tokenizer = self._tokenizer()
        return await self.in_thread(
            lambda: tokenizer.decode(ids, skip_special_tokens=False), "tokens"
        )

    def check_ids(self, ids: Sequence[int], param: str = "prompt") -> None:
        """Checks token ids that a request gives.

        Raises:
            ApiError: 400 if there are none, or one is outside the vocabulary.
        """
        if not ids:
            raise bad_request("the prompt is empty; it needs at least one token", param)
        vocab_size = self.facts.vocab_size
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise bad_request(
                f"token ids must be in [0, {vocab_size}), got {clip(wrong, 30)}", param
            )

    def check_length(
        self, prompt_tokens: int, params: SamplingParams, param: str = "prompt"
    ) -> None:
        """Checks that a prompt and the tokens it asks for fit the context, and that ids it names are the model's.

        Args:
            prompt_tokens: length of the prompt.
            params: what is asked for.
            param: the field with the prompt.

        Raises:
            ApiError: 400 if not.
        """
        most, vocab_size = self.facts.max_model_len, self.facts.vocab_size
        for name in ("stop_token_ids", "logit_bias"):
            for token in getattr(params, name):
                if token >= vocab_size:
                    raise bad_request(
                        f"{name} must be token ids below {vocab_size}, got {token}", name
                    )
        wanted = params.max_tokens or max(1, params.min_tokens)
        if prompt_tokens + wanted > most:
            asked = "min_tokens" if params.max_tokens is None else "max_tokens"
            raise bad_request(
                # Clients that shorten conversations look for the first words.
                f"this model's maximum context length is {most} tokens, but the prompt has {prompt_tokens} and "
                f"{wanted} more were asked for; shorten the prompt or ask for fewer tokens",
                param if prompt_tokens >= most else asked,
                "context_length_exceeded",
            )

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise bad_request("the model has no tokenizer; give token ids", "prompt")
        return self.tokenizer

    async def in_thread[T](self, work: Callable[[], T], param: str | None = None) -> T:
        """Runs `work` in one of a few threads.

        Args:
            work: long work of a request.
            param: the field of the request that it is about.

        Raises:
            ApiError: 400 for a `ValueError`, with its message.
        """
        async with self._threads:
            try:
                return await asyncio.to_thread(work)
            except ValueError as error:
                raise bad_request(clip(error, 500), param) from error
