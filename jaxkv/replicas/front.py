"""`ReplicatedLLM`: the methods of `LLM` over several replicas of one model; `LLM(data_parallel_size=...)` makes it.

Each replica is a process, for two reasons. An engine keeps Python busy for 0.6 to 4 ms per step, and threads of one
interpreter would add that up: four replicas in one process would wait for each other more than for their GPUs. And a
fault that breaks a CUDA context ends the process, which then costs one replica and not all.
"""

import importlib
import itertools
import queue
import sys
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Sharding
from tqdm import tqdm

from jaxkv.cache.prefix.report import Explanation
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checks import as_int
from jaxkv.config.engine import EngineConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.config.plain_sampling import pack_sampling
from jaxkv.config.sampling import SamplingParams
from jaxkv.config.vllm_names import unknown_attribute
from jaxkv.engine.new_request import new_request
from jaxkv.engine.request import Piece, RequestOutput
from jaxkv.engine.saved_prefixes import PrefixCounts
from jaxkv.engine.warm_up import WarmUp
from jaxkv.errors import ReplicaLost
from jaxkv.given_samples import Outputs, by_adapter, given_samples
from jaxkv.models.hf_config.generation_json import load_sampling_defaults
from jaxkv.models.protocol import Params
from jaxkv.monitoring.stats import Stats
from jaxkv.replicas.group import FULL, Job, ReplicaGroup, as_prompt
from jaxkv.replicas.prefix_files import found_files, new_files, texts_of
from jaxkv.replicas.replica import Replica
from jaxkv.replicas.totals import total
from jaxkv.rollout import Rollout, column_count, rollout_of, rollout_sampling
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.sampling.processors import LogitsProcessor
from jaxkv.text.chat_template import ChatOptions
from jaxkv.text.prompts import (
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
from jaxkv.text.tokenizer import NO_TOKENIZER, load_tokenizer
from jaxkv.weights.hub import fetch_weights, resolve_model

_ATTEMPTS = 2
"""How many replicas a request may lose before it counts as the cause."""

_ELSEWHERE = {
    "params": "the parameters are in the processes of the replicas; load them by jaxkv.load_model to look at them",
    "engine": "every replica has an engine of its own in its process; stats() and replica_stats() tell of them",
    "model": "every replica has the model in its process; jaxkv.load_model returns it",
    "layout": "every replica has a cache of its own; replica_stats() tells of them",
    "budget": "every replica has a cache of its own; replica_stats() tells of them",
    "lock": "replicas serve several threads at once",
    "requests": "requests are made in the processes of the replicas; call generate, or AsyncLLM.stream",
    "rollout_requests": "requests are made in the processes of the replicas; call rollout",
    "replay": "requests are made in the processes of the replicas; call score with outputs",
    "whole_texts": "texts are scored in the processes of the replicas; call score",
    "save_programs": "jaxkv compile, or an LLM with data_parallel_size=1, makes programs that all replicas can load",
    "follow": "replicas are processes of one host; start an LLM with data_parallel_size=1 on several hosts",
}
"""Attributes of `LLM` that replicas do not have -> the way out."""


class ReplicatedLLM:
    """Replicas of one model behind the methods of `LLM`; see there for what each takes, returns and raises.

    A request runs on the replica that was given the longest prefix of its prompt, unless that one has much more to do
    than another. All samples of a prompt run on one replica. Calls of several threads run at the same time.

    A replica whose process ends is logged by name. What `generate`, `chat` and `rollout` had begun there runs again on
    another replica, with the same seeds. A stream in progress there, and every other call, raises `ReplicaLost`.

    Args:
        count: number of replicas, each on `tensor_parallel_size` devices of its own.
        model: as for `LLM`, like all that follow.
        cache: size of the cache of each replica.
        engine: options of the engine of each replica.
        lora: room for adapters of each replica.
        seed: seed of random weights (`load_format`).
        draw_seed: returns the seed of a request without one, given its bits.
        progress: show bars on a terminal.
        logits_processors: name -> a function of a module, which the processes import.
        options: further arguments of `LLM`.

    Attributes:
        directory: folder of the model.
        tokenizer: its tokenizer; `None` if it has none.
        eos_ids: ids that end a text.
        max_model_len: longest prompt plus output in tokens.
        weight_version: version of the parameters of all replicas.
        group: the replicas.
    """

    def __init__(
        self,
        count: int,
        model: str | Path | None,
        *,
        cache: CacheConfig,
        engine: EngineConfig,
        lora: LoraConfig | None,
        seed: int | None,
        draw_seed: Callable[[int], int],
        progress: bool,
        logits_processors: Mapping[str, LogitsProcessor] | None,
        **options: Any,  # noqa: ANN401 - as `LLM` declares them
    ) -> None:
        places = {name: _place_of(name, one) for name, one in (logits_processors or {}).items()}
        revision = options.pop("revision")
        self.directory = resolve_model(model, revision, progress=progress)
        if options["load_format"] != "dummy":
            # Once, and not by every replica.
            fetch_weights(model, self.directory, revision, progress=progress)
        self.tokenizer = load_tokenizer(self.directory)
        self.group = ReplicaGroup(
            count,
            {
                **options,
                "model": str(self.directory),
                "cache": cache,
                "engine": engine,
                "lora": lora,
                "seed": seed,
                "logits_processors": places,
            },
        )
        facts = self.group.facts
        self.eos_ids, self.max_model_len = facts.eos_ids, facts.max_model_len
        self.weight_version: WeightVersion = 0
        self._vocab_size = facts.vocab_size
        self._draw_seed = draw_seed
        self._progress = progress
        self._numbers = itertools.count()
        self._end = weakref.finalize(self, self.group.close)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises `AttributeError`, with the alternative to what only a single `LLM` has."""
        if name in _ELSEWHERE:
            raise AttributeError(
                f"an LLM with data_parallel_size above 1 has no {name}: {_ELSEWHERE[name]}",
                name=name,
                obj=self,
            )
        raise unknown_attribute(self, name)

    def __enter__(self) -> "ReplicatedLLM":
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Calls `close`."""
        self.close()

    def close(self) -> None:
        """Ends all replicas; calls in progress raise. A second call does nothing."""
        self._end()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> list[RequestOutput]:
        """Generates for a list of prompts, on all replicas; see `LLM.generate`."""
        call = as_call("LLM.generate", options, sampling=sampling, progress=progress)
        listed = as_prompts(prompts)
        jobs = self._jobs(listed, one_each(call["sampling"], len(listed)))
        return self._outputs_of(jobs, call["progress"])

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> RequestOutput | list[RequestOutput]:
        """Answers one conversation or several; see `LLM.chat`."""
        call = as_call("LLM.chat", options, sampling=sampling, progress=progress, chat=None)
        conversations, several = as_conversations(messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with named("conversation", index, len(conversations)):
                prompts.append(self._chat_prompt(conversation, call["chat"]))
        bar = False if call["progress"] is None and not several else call["progress"]
        outputs = self.generate(prompts, call["sampling"], progress=bar)
        return outputs if several else outputs[0]

    def chat_prompt(self, messages: Messages, **options: object) -> list[int]:
        """Returns the token ids of one conversation; see `LLM.chat_prompt`."""
        return self._chat_prompt(messages, as_call("LLM.chat_prompt", options, chat=None)["chat"])

    def rollout(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_width: int | None = None,
        output_width: int | None = None,
        pad_id: int = 0,
        device: jax.Device | Sharding | None = None,  # pyright: ignore[reportInvalidTypeForm]
        progress: bool | None = None,
        **options: object,
    ) -> Rollout:
        """Generates all samples as padded arrays for a train step; see `LLM.rollout`."""
        call = as_call("LLM.rollout", options, sampling=sampling, progress=progress)
        jobs, output_width = self.rollout_jobs(
            prompts, call["sampling"], prompt_width=prompt_width, output_width=output_width
        )
        made = rollout_of(
            self._outputs_of(jobs, call["progress"]),
            prompt_width=prompt_width,
            output_width=output_width,
            pad_id=pad_id,
        )
        return made if device is None else made.to(device)

    def rollout_jobs(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        prompt_width: int | None,
        output_width: int | None,
        priority: int = 0,
        salt: str | bytes | None = None,
    ) -> tuple[list[Job], int | None]:
        """Returns the jobs of a rollout, and the columns of their outputs; see `LLM.rollout_requests`."""
        listed = as_prompts(prompts)
        if not listed:
            raise ValueError("a rollout needs at least one prompt, got none")
        chosen = rollout_sampling(sampling, len(listed))
        limits = [one.max_tokens for one in chosen if one.max_tokens is not None]
        if len(limits) == len(chosen):
            output_width = column_count("output", limits, output_width)
        jobs = self._jobs(listed, chosen, priority=priority, salt=salt)
        if prompt_width is not None:
            column_count("prompt", [len(job.prompt.ids) for job in jobs], prompt_width)
        return jobs, output_width

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: object
    ) -> Generator[Piece]:
        """Yields pieces of text as they are generated, whether or not the caller waits for one; see `LLM.stream`."""
        call = as_call("LLM.stream", options, sampling=sampling)
        [job] = self._jobs([prompt], [one_sample(call["sampling"])])
        return self._stream(job)

    def _stream(self, job: Job) -> Generator[Piece]:
        arrived: queue.SimpleQueue[list[Piece] | None] = queue.SimpleQueue()
        result = self.group.begin("stream", job, pieces=arrived.put)
        assert result is not None, "there is no limit"
        result.add_done_callback(lambda _: arrived.put(None))
        try:
            while (pieces := arrived.get()) is not None:
                yield from pieces
            result.result()
        finally:
            result.cancel()

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Outputs | None = None,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | None = None,
        progress: bool | None = None,
        **options: object,
    ) -> list[np.ndarray]:
        """Returns the log-probabilities of given tokens, each replica those of a share of the prompts; see `LLM.score`.

        Its bits are those of a rollout with `batch_invariant` alone, or `pinned_shapes` without recurrent layers, since
        other prompts share the steps of a replica.
        """
        if outputs is not None and lora is not None:
            options = by_adapter(options, sampling, lora)
        call = as_call("LLM.score", options, sampling=sampling, progress=progress)
        begun = self.begin_scores(prompts, outputs, call, lora)
        try:
            return [scores for result in begun for scores in result.result()]
        finally:
            for result in begun:
                result.cancel()

    def begin_scores(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Outputs | None,
        call: Mapping[str, Any],
        lora: str | None,
        priority: int = 0,
    ) -> "list[Future[list[np.ndarray]]]":
        """Returns the results to come of a share of the prompts each; see `score`."""
        listed = as_prompts(prompts)
        tokenized = self._tokenized(listed)
        replicas = self.group.live[: max(1, len(listed))]
        bounds = np.linspace(0, len(listed), len(replicas) + 1).astype(int).tolist()
        shares = [slice(first, last) for first, last in itertools.pairwise(bounds)]
        if outputs is None:
            if any(value is not None for value in call.values()):
                raise ValueError(
                    f"{' and '.join(call)} are for decode steps, and whole texts are scored in one step each; give "
                    "outputs"
                )
            texts = [list(one.ids) for one in tokenized]
            shared = [{"texts": texts[share], "lora": lora} for share in shares]
            return _begin_shares("score_texts", replicas, shared)
        samples = [
            list(map(list, one)) for one in given_samples(outputs, len(listed), self._vocab_size)
        ]
        chosen = None if call["sampling"] is None else one_each(call["sampling"], len(listed))
        packed = None if chosen is None else [pack_sampling(one) for one in chosen]
        shared = [
            {
                "prompts": [as_prompt(one) for one in tokenized[share]],
                "outputs": samples[share],
                "sampling": None if packed is None else packed[share],
                "priority": priority,
            }
            for share in shares
        ]
        return _begin_shares("score_samples", replicas, shared)

    def update_weights(
        self,
        params: Params | Iterable[tuple[str, Any]],
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Replaces the parameters of all replicas; see `LLM.update_weights`.

        The arrays are copied to the host and from there to every replica. A tree is one of the whole model, as
        `jaxkv.load_model` returns it, also if each replica divides the model among devices.
        """
        tree = named_arrays = None
        if isinstance(params, Mapping) or not isinstance(params, Iterable):
            leaves, _ = jax.tree_util.tree_flatten_with_path(params)
            tree = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
        else:
            named_arrays = [(name, as_numpy(array)) for name, array in params]
        return self._updated(
            "update_weights", tree=tree, named=named_arrays, version=version, requests=requests
        )

    def load_lora(
        self,
        path: str | Path | None,
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Adds an adapter to the weights of all replicas; see `LLM.load_lora`."""
        given = None if path is None else str(path)
        return self._updated("load_lora", path=given, version=version, requests=requests)

    def add_lora(
        self, name: str, path: str | Path, *, version: WeightVersion | None = None
    ) -> WeightVersion:
        """Loads an adapter on all replicas; see `LLM.add_lora`."""
        return self._changed("add_lora", name=name, path=str(path), version=version)

    def remove_lora(self, name: str) -> None:
        """Removes an adapter from all replicas; see `LLM.remove_lora`."""
        self._changed("remove_lora", name=name)

    def list_loras(self) -> dict[str, WeightVersion]:
        """Returns name -> version of each adapter; see `LLM.list_loras`."""
        return self._answers("list_loras")[0]

    def sleep(self, level: int = 1) -> None:
        """Gives memory of all replicas back; see `LLM.sleep`."""
        level = as_int("level", level, 1, 2)
        self._changed("sleep", level=level)
        self.group.forget()

    def wake_up(self) -> None:
        """Makes the caches of all replicas again; see `LLM.wake_up`."""
        self._changed("wake_up")

    def warm_up(
        self,
        *,
        batch: int,
        prompt_tokens: int,
        sampling: SamplingParams | None = None,
        score: bool = False,
        saved_prefixes: bool = False,
        background: bool = False,
        **options: object,
    ) -> WarmUp:
        """Compiles the programs of all replicas, whose compilers share a cache on disk; see `LLM.warm_up`.

        With `background`, `finish_warm_up` waits for those that are left to threads.

        Args:
            batch: most prompts at once on one replica.
            prompt_tokens: tokens of the longest prompt.
            sampling: sampling parameters of the requests.
            score: also compile the programs of `score`.
            saved_prefixes: also compile the programs of `save_prefixes` and `load_prefixes`.
            background: compile most programs in a thread of each replica.
            options: as for `generate`.

        Returns:
            The statistics of the replica that took longest.
        """
        call = as_call("LLM.warm_up", options, sampling=sampling)
        [params] = one_each(call["sampling"], 1)
        sizes = {
            "batch": batch,
            "prompt_tokens": prompt_tokens,
            "score": score,
            "saved_prefixes": saved_prefixes,
            "background": background,
        }
        made = self._answers("warm_up", sampling=pack_sampling(params), options=sizes)
        return max(made, key=lambda one: one.seconds)

    def finish_warm_up(self) -> None:
        """Waits for the programs that `warm_up(background=True)` has left to threads; see `LLM.finish_warm_up`."""
        self._answers("finish_warm_up")

    def stats(self) -> Stats:
        """Returns the statistics of all replicas that work, added up; texts are those of the first one."""
        return total(self.replica_stats())

    def replica_stats(self) -> list[Stats]:
        """Returns the statistics of each replica that works."""
        return self._answers("stats")

    def get_tokenizer(self) -> Any:  # noqa: ANN401 - as `tokenizer`
        """Returns the tokenizer; `None` if the model directory has no tokenizer.json."""
        return self.tokenizer

    def get_default_sampling_params(self, **options: Any) -> SamplingParams:  # noqa: ANN401
        """Returns the sampling that the model recommends; see `LLM.get_default_sampling_params`."""
        return SamplingParams(**{**load_sampling_defaults(self.directory), **options})

    def explain(
        self,
        prompt: Prompt,
        *,
        salt: str | bytes | None = None,
        lora: str | None = None,
        **options: object,
    ) -> Explanation:
        """Returns the report of the replica that holds most of a prompt; see `LLM.explain`."""
        call = as_call("LLM.explain", options, salt=salt)
        [made] = self._tokenized([prompt], call["salt"])
        found = self._answers("explain", prompt=as_prompt(made), lora=lora)
        return max(found, key=lambda one: one.num_reused)

    def save_prefixes(
        self, path: str | Path, prompts: Prompt | Sequence[Prompt] | None = None
    ) -> PrefixCounts:
        """Writes the prefix cache of each replica to a file of its own; see `LLM.save_prefixes`.

        Replica 0 of 2 writes prefixes.0-of-2.safetensors for the path prefixes.safetensors, and so on.

        Returns:
            The sums over all files.
        """
        given = (
            None
            if prompts is None
            else [as_prompt(p) for p in self._tokenized(as_prompts(prompts))]
        )
        replicas = self.group.live
        files = new_files(path, len(replicas))
        saved = [
            replica.call("save_prefixes", {"path": str(file), "prompts": given})
            for replica, file in zip(replicas, files, strict=True)
        ]
        return total([one.result() for one in saved])

    def load_prefixes(self, path: str | Path) -> PrefixCounts:
        """Loads the files of `save_prefixes`, of any number of replicas, or of a single `LLM`; see `LLM.load_prefixes`.

        Each file goes to one replica; with fewer files than replicas, several load the same one.

        Returns:
            The sums over all replicas.

        Raises:
            FileNotFoundError: there is no such file, or one of a set is missing.
        """
        files, replicas = found_files(path), self.group.live
        pairs = [
            (replicas[number % len(replicas)], files[number % len(files)])
            for number in range(max(len(files), len(replicas)))
        ]
        loads = [replica.call("load_prefixes", {"path": str(file)}) for replica, file in pairs]
        counts = [load.result() for load in loads]
        for replica, file in pairs:
            for text in texts_of(file):
                self.group.note(replica, text)
        return total(counts)

    def jobs(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        *,
        priority: int = 0,
        salt: str | bytes | None = None,
    ) -> list[Job]:
        """Returns the jobs of some prompts, checked as far as this process can.

        Raises:
            ValueError: a prompt or its parameters can never be served; it names the prompt's index.
        """
        jobs = []
        for index, (made, params) in enumerate(
            zip(self._tokenized(prompts, salt), sampling, strict=True)
        ):
            with named("prompt", index, len(prompts)):
                params.check_vocab(self._vocab_size)
                if params.seed is None:
                    params = replace(params, seed=self._draw_seed(64))
                job = Job(prompt=made, sampling=params, priority=priority)
                new_request(
                    made, params, 0, max_model_len=self.max_model_len, eos_ids=(), priority=priority
                )
                jobs.append(job)
        return jobs

    def _jobs(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        **options: Any,  # noqa: ANN401 - keywords of `jobs`
    ) -> list[Job]:
        """Returns checked jobs: a replica has checked the longest prompt of each kind of sampling too."""
        jobs = self.jobs(prompts, sampling, **options)
        longest: dict[SamplingParams, int] = {}
        for index, job in enumerate(jobs):
            kind = replace(job.sampling, seed=0)
            if len(job.prompt.ids) > len(jobs[longest.get(kind, index)].prompt.ids) or (
                kind not in longest
            ):
                longest[kind] = index
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._check(jobs, longest)
                break
            except ReplicaLost:
                if not left:
                    raise
        return jobs

    def _check(self, jobs: Sequence[Job], longest: Mapping[SamplingParams, int]) -> None:
        """Has a replica check the longest job of each kind of sampling."""
        [replica, *_] = self.group.live
        checks = {
            index: replica.call(
                "check",
                {"prompt_tokens": len(jobs[index].prompt.ids), "sampling": pack_sampling(kind)},
            )
            for kind, index in longest.items()
        }
        for index in sorted(checks):
            with named("prompt", index, len(jobs)):
                checks[index].result()

    def _outputs_of(self, jobs: Sequence[Job], progress: bool | None) -> list[RequestOutput]:
        """Runs jobs until all have ended; those of a lost replica run again on another one."""
        shown = self._progress and sys.stderr.isatty() if progress is None else bool(progress)
        outputs: dict[int, RequestOutput] = {}
        waiting, open_calls = deque(range(len(jobs))), dict[int, "Future[Any]"]()
        attempts = dict.fromkeys(waiting, 0)
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        most = FULL * self.group.facts.max_sequences
        bar = tqdm(total=len(jobs), desc="generating", unit="prompt", disable=not shown)
        try:
            while waiting or open_calls:
                while waiting:
                    begun = self.group.begin("generate", jobs[waiting[0]], most=most)
                    if begun is None and open_calls:
                        break
                    if begun is None:
                        begun = self.group.begin("generate", jobs[waiting[0]])
                        assert begun is not None, "there is no limit"
                    index = waiting.popleft()
                    open_calls[index] = begun
                    attempts[index] += 1
                    begun.add_done_callback(lambda _, index=index: ended.put(index))
                index = ended.get()
                error = open_calls[index].exception()
                if isinstance(error, ReplicaLost) and attempts[index] < _ATTEMPTS:
                    del open_calls[index]
                    waiting.appendleft(index)
                    continue
                outputs[index] = open_calls.pop(index).result()
                bar.update()
        finally:
            bar.close()
            for begun in open_calls.values():
                begun.cancel()
        return [self.numbered(outputs[index]) for index in range(len(jobs))]

    def numbered(self, output: RequestOutput) -> RequestOutput:
        """Returns an output with a number that no other output of this object has."""
        return replace(output, request_id=str(next(self._numbers)))

    def _tokenized(
        self, prompts: Sequence[Prompt], salt: str | bytes | None = None
    ) -> list[TokenizedPrompt]:
        found = []
        for index, prompt in enumerate(prompts):
            with named("prompt", index, len(prompts)):
                made = tokenize(
                    prompt, self.tokenizer, self._vocab_size, max_tokens=self.max_model_len
                )
                if salt is not None and made.salt is not None:
                    raise ValueError('the prompt has a "cache_salt" of its own; give one salt')
                found.append(made if salt is None else replace(made, salt=salt))
        return found

    def _chat_prompt(self, messages: Messages, options: ChatOptions | None) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(f"chat needs a tokenizer: {NO_TOKENIZER}")
        [conversation], _ = as_conversations(messages)
        return self.tokenizer.encode_chat(conversation, options, max_tokens=self.max_model_len)

    def _answers(self, operation: str, **arguments: Any) -> list[Any]:  # noqa: ANN401
        """Returns the result of an operation on every replica that works."""
        return [result.result() for result in self.group.all(operation, **arguments).values()]

    def _changed(self, operation: str, **arguments: Any) -> Any:  # noqa: ANN401
        """Makes a change on every replica that works; returns its result."""
        return self.group.change(operation, **arguments)

    def _updated(self, operation: str, **arguments: Any) -> WeightVersion:  # noqa: ANN401
        """Changes the weights of every replica that works; returns their version."""

        def made(version: WeightVersion) -> None:
            self.weight_version = version
            self.group.forget()

        return self.group.change(operation, made, **arguments)


def as_numpy(array: Any) -> np.ndarray:  # noqa: ANN401 - of JAX, NumPy or PyTorch
    """Returns an array on the host; a tensor of PyTorch through JAX, which knows all its dtypes."""
    if isinstance(array, np.ndarray | jax.Array):
        return np.asarray(array)
    return np.asarray(jax.dlpack.from_dlpack(array.detach().cpu().contiguous()))


def _place_of(name: str, function: LogitsProcessor) -> str:
    """Returns where the processes of replicas find a function.

    Raises:
        ValueError: they cannot import it.
    """
    module, qualified = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    found = None
    if module and module != "__main__" and qualified.isidentifier():
        found = getattr(importlib.import_module(module), qualified, None)
    if found is not function:
        raise ValueError(
            f"the logits processor {name!r} must be a function at the top of a module, since the process of each "
            f"replica imports it; got {qualified or function!r} of {module or 'no module'}: move it into a file"
        )
    return f"{module}:{qualified}"


def _begin_shares(
    operation: str, replicas: Sequence[Replica], shares: Sequence[Mapping[str, Any]]
) -> "list[Future[Any]]":
    """Begins an operation on each replica with its share; if one cannot begin, those before it are aborted."""
    begun: list[Future[Any]] = []
    try:
        for replica, share in zip(replicas, shares, strict=True):
            begun.append(replica.call(operation, share))
    except BaseException:
        for result in begun:
            result.cancel()
        raise
    return begun
