"""`LLM`: loads a model directory, allocates its cache, and generates and scores texts."""

import inspect
import logging
import random
import secrets
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxkv.cache.prefix.report import Explanation
from jaxkv.config.cache import CacheConfig
from jaxkv.config.checks import as_int
from jaxkv.config.engine import MOST_WARMED, EngineConfig, merge_configs
from jaxkv.config.lora import LoraConfig, lora_of
from jaxkv.config.model import ModelConfig
from jaxkv.config.sampling import MAX_EOS_IDS, SamplingParams
from jaxkv.config.speculation import SpeculationConfig
from jaxkv.config.vllm_names import unknown_attribute
from jaxkv.draft_loading import drafter_of, load_draft_model
from jaxkv.engine.bundled_programs import (
    budget_of,
    load_bundled,
    plan_facts,
    refuse_unbundled,
    save_bundle,
)
from jaxkv.engine.drive import check_compiled, output_of, serve_all, serve_stream
from jaxkv.engine.engine import Engine
from jaxkv.engine.engine_lock import EngineLock, refuse_forked_user
from jaxkv.engine.new_request import new_request
from jaxkv.engine.recovery import refuse_broken
from jaxkv.engine.request import Piece, Request, RequestOutput, check_salt
from jaxkv.engine.request_state import RequestState
from jaxkv.engine.saved_prefixes import PrefixCounts, load_prefixes, save_prefixes
from jaxkv.engine.warm_up import (
    WarmUp,
    compile_all,
    compile_drafter,
    declare_saved_prefixes,
    declare_served,
)
from jaxkv.errors import BadCheckpoint
from jaxkv.given_samples import (
    Outputs,
    Replay,
    by_adapter,
    given_requests,
    given_samples,
    given_sampling,
    replay_salt,
)
from jaxkv.memory import named_exhaustion, start_devices
from jaxkv.models.decoder import Decoder
from jaxkv.models.hf_config.generation_json import load_sampling_defaults
from jaxkv.models.protocol import Model, Params
from jaxkv.models.registry import (
    build_model,
    expected_params,
    load_config,
    load_params,
    resolve_dtype,
)
from jaxkv.models.tensor_parallel import TensorParallel, mailbox_room, over_devices, spans_processes
from jaxkv.monitoring.stats import Stats, collect_stats
from jaxkv.plan import (
    bytes_of_types,
    check_room,
    free_bytes,
    model_for,
    plan_cache,
    resolve_length,
    tokens_ahead,
)
from jaxkv.programs.bundle import Bundle
from jaxkv.programs.jax_cache import enable_compile_cache
from jaxkv.programs.manifest import Programs
from jaxkv.replicas.devices import replica_count
from jaxkv.replicas.front import ReplicatedLLM
from jaxkv.rollout import Rollout, column_count, rollout_of, rollout_sampling
from jaxkv.runner.adapter_stacks import AdapterStacks, stack_bytes
from jaxkv.runner.hosts import Follower, meet, refuse_on_hosts
from jaxkv.runner.model_runner import ModelRunner
from jaxkv.runner.param_types import ParamTypes, params_of_model
from jaxkv.runner.scoring import score_program
from jaxkv.runner.sequence_runner import SequenceRunner
from jaxkv.runner.weight_version import WeightVersion
from jaxkv.sampling.processors import LogitsProcessor
from jaxkv.sampling.register_processors import register_processors
from jaxkv.structured.grammar import Grammar
from jaxkv.structured.grammars import Grammars
from jaxkv.text.bad_words import forbid_words
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
from jaxkv.text.tokenizer import NO_TOKENIZER, Tokenizer, load_tokenizer
from jaxkv.weights.hub import fetch_weights, resolve_model
from jaxkv.weights.lora import merged_tensors

_LOG = logging.getLogger(__name__)

_FOLLOWS = "this process only follows process 0, which takes the requests; call follow() here, and nothing else"

_LOAD_FORMATS = ("auto", "safetensors", "dummy")


def _check_options(
    model: object, revision: object, load_format: str, *, strict: object, progress: object
) -> None:
    """Raises `ValueError` for an option of `LLM` of the wrong type or value."""
    if not isinstance(model, str | Path | None):
        raise ValueError(
            f"model must be the path of a model directory or a name on the Hugging Face Hub, got {model!r}"
        )
    if not isinstance(revision, str | None):
        raise ValueError(f"revision must be the name of a branch, tag or commit, got {revision!r}")
    if load_format not in _LOAD_FORMATS:
        raise ValueError(
            f"load_format must be one of {', '.join(_LOAD_FORMATS)}, got {load_format!r}"
        )
    for name, flag in (("strict", strict), ("progress", progress)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name} must be True or False, got {flag!r}")


def _end_ids(directory: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the ids that end a text, see `_named_ends`; those of the tokenizer may exceed the vocabulary.

    Raises:
        BadCheckpoint: there are more than `MAX_EOS_IDS`.
    """
    own = tokenizer.eos_ids if tokenizer else ()
    own = tuple(token for token in own if token < config.vocab_size)
    found = tuple(dict.fromkeys(_named_ends(config, own)))
    if len(found) > MAX_EOS_IDS:
        raise BadCheckpoint(
            f"{directory} names {len(found)} end ids, at most {MAX_EOS_IDS} can be used; "
            f"shorten eos_token_id in generation_config.json or config.json"
        )
    return found


def _named_ends(config: ModelConfig, own: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids that the model's files name, or else `own`, the tokenizer's, or else Transformers' defaults."""
    return own if own and config.assumed_eos else config.eos_ids or own


def _checked_ends(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Returns end ids, each once; raises `ValueError` if there are too many or the model lacks one."""
    found = tuple(dict.fromkeys(as_int("eos_ids", token, 0, vocab_size - 1) for token in ids))
    if len(found) > MAX_EOS_IDS:
        raise ValueError(f"eos_ids has {len(found)} ids, at most {MAX_EOS_IDS} can be used")
    return found


def _key(seed: int) -> jax.Array:
    """Returns the PRNG key of 64 bits of a seed. `jax.random.key` drops those above 32."""
    words = np.asarray([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def _seed_source(seed: int | None) -> Callable[[int], int]:
    """Returns a function of a number of bits that draws the seed of a request without one.

    Args:
        seed: seed of the generator; `None` for unpredictable seeds.

    Raises:
        ValueError: the seed is no int of 64 bits.
    """
    if seed is None:
        return secrets.randbits
    # Python's generator drops the sign of its seed.
    return random.Random(as_int("seed", seed, -(2**63), 2**64 - 1) % 2**64).getrandbits


def _replicas_of(
    count: int,
    model: str | Path | None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    cache: CacheConfig | None = None,
    engine: EngineConfig | None = None,
    implementation: str | None = None,
    strict: bool = False,
    progress: bool = True,
    seed: int | None = None,
    load_format: str = "auto",
    ignore_config_keys: Sequence[str] = (),
    quantization: str | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    lora: LoraConfig | bool | None = None,
    speculation: SpeculationConfig | None = None,
    tensor_parallel_size: int = 1,
    programs: str | Path | None = None,
    **options: object,
) -> ReplicatedLLM:
    """Returns replicas behind one front, given the arguments of `LLM`."""
    known = inspect.signature(LLM.__init__).parameters
    cache, engine = merge_configs(cache, engine, options, known, speculation=speculation)
    _check_options(model, revision, load_format, strict=strict, progress=progress)
    return ReplicatedLLM(
        count,
        model,
        cache=cache,
        engine=engine,
        lora=lora_of(lora, options),
        seed=seed,
        draw_seed=_seed_source(seed),
        progress=progress,
        logits_processors=logits_processors,
        revision=revision,
        dtype=dtype,
        max_model_len=max_model_len,
        implementation=implementation,
        strict=strict,
        load_format=load_format,
        ignore_config_keys=list(ignore_config_keys),
        quantization=quantization,
        tensor_parallel_size=as_int("tensor_parallel_size", tensor_parallel_size, 1, 2**16),
        programs=None if programs is None else str(programs),
    )


class LLM:
    """A model ready to generate.

    Examples:
        >>> from jaxkv import LLM, SamplingParams
        >>> llm = LLM()  # the small model inside the package
        >>> llm.generate("def ", SamplingParams(temperature=0.0, max_tokens=8))[0].token_ids

    A dropped `LLM` frees its memory when Python collects it; `close`, or `with LLM() as llm:`, frees it at once.

    Args:
        model: a Hugging Face model directory (config.json, safetensors, tokenizer.json), or a name on the Hugging Face
            Hub, such as "Qwen/Qwen3-0.6B"; the small model inside the package if not given. A directory of that name
            takes precedence. Nothing in the directory is executed.
        revision: branch, tag or commit of a model on the hub; its main branch if not given.
        dtype: to compute in: "float32" ("fp32", "float"), "bfloat16" ("bf16"), "float16" ("fp16", "half"), or "auto"
            for the checkpoint's own.
        max_model_len: longest prompt plus output in tokens; the model's own limit if not given.
        cache: size, page size and dtype of the cache, and how many sequences run at once.
        engine: options of the scheduler and the engine: tokens per step, prefix cache, recovery from failures.
        implementation: implementation of every layer's attention and cache writes: "mosaic_gpu" (Hopper),
            "xla" (anywhere), "cudnn" (NVIDIA's paged attention for decode, and else the best that can run) or
            "xla_products" (our kernels, but XLA's products of few rows). If not given, "mosaic_gpu" where all layers
            can, and "xla" everywhere else; `stats` reports the choice and its reasons.
        strict: after `warm_up`, refuse to compile anything more than it has declared.
        progress: where stderr is a terminal, show bars on it while weights load, programs compile and `generate` works.
        seed: requests without a seed get theirs from a generator with this one, in the order in which they come;
            `None` for unpredictable seeds.
        load_format: "auto" or "safetensors" read the checkpoint; "dummy" draws random weights instead, so the
            directory needs none.
        ignore_config_keys: keys of config.json that jaxkv does not know and that you know to be harmless; each is
            ignored with a warning. A key that is known or not in the file is an error.
        quantization: "fp8", "int8" or "int4" rounds projections and experts of a plain checkpoint to 8 or 4 bits while
            they are read, without calibration, and "fp8" the activations of steps of more than 64 tokens too
            (`docs/how-to/quantisation.md`); `None` keeps weights as the checkpoint has them, quantised ones too.
        logits_processors: name -> a pure JAX function `f(logits, history, *, argument=default)`, which requests name in
            `SamplingParams.logits_processors`; see `LogitsProcessor`.
        lora: room for low-rank adapters that requests name in `SamplingParams.lora`, see `add_lora`; True for the
            defaults of `LoraConfig`.
        speculation: drafts of the next tokens, which decode steps verify and which change no token; a field of `engine`
            too.
        tensor_parallel_size: number of devices that compute the model together, each a part of every layer, see
            `TensorParallel`.
        programs: folder of compiled programs that `jaxkv compile` or `save_programs` made, for the same options on the
            same kind of device. All of them are loaded, and none is traced or compiled; loading them runs what the
            folder holds. The cache has the size that they were compiled for, unless `cache` has one.
        data_parallel_size: number of replicas of the model, each in a process and on devices of its own, behind this
            one front: `LLM(data_parallel_size=2)` is a `ReplicatedLLM`, which has the methods of this class.
        options: fields of `cache`, `engine` and `lora` under vLLM's names, such as `max_num_seqs`;
            `jaxkv.config.vllm_names` lists them. They replace what `cache`, `engine` and `lora` have.

    Raises:
        ValueError: an option is unknown or out of range, the cache cannot hold one sequence of `max_model_len`,
            weights and cache need more memory than the device has, or a logits processor cannot run on the device.
        OutOfMemory: memory ran out all the same while the weights were loaded or the cache was made.
        Unsupported: the `implementation` asked for cannot run this model here; a `ValueError` with every reason.
        BadBundle: the `programs` are damaged, or were compiled for something else; a `ValueError` with the differences.
        UnknownConfig, BadCheckpoint: the directory holds something that is not understood, or damaged; or there is no
            model of this name.
        OSError: the hub cannot be reached and its cache has not this model, or the disk is full.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        implementation: str | None = None,
        strict: bool = False,
        progress: bool = True,
        seed: int | None = None,
        load_format: str = "auto",
        ignore_config_keys: Sequence[str] = (),
        quantization: str | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        lora: LoraConfig | bool | None = None,
        speculation: SpeculationConfig | None = None,
        tensor_parallel_size: int = 1,
        programs: str | Path | None = None,
        data_parallel_size: int = 1,
        **options: object,
    ) -> None:
        assert data_parallel_size == 1, "`__new__` makes replicas"
        refuse_forked_user()
        known = inspect.signature(LLM).parameters
        cache, engine = merge_configs(cache, engine, options, known, speculation=speculation)
        room = lora_of(lora, options)
        _check_options(model, revision, load_format, strict=strict, progress=progress)
        self._draw_seed = _seed_source(seed)
        bundle = None if programs is None else Bundle(programs)
        directory = resolve_model(model, revision, progress=progress)
        config = load_config(directory, ignore_config_keys=ignore_config_keys)
        dtype = resolve_dtype(dtype, config.dtype)
        start_devices()
        enable_compile_cache()
        decoder = build_model(config, implementation=implementation)
        tokenizer = load_tokenizer(directory)
        max_model_len = resolve_length(max_model_len, decoder.max_positions)
        decoder = decoder.limited(max_model_len)
        expected = expected_params(directory, decoder, dtype=dtype, quantization=quantization)
        divided = over_devices(decoder, tensor_parallel_size, expected)
        weights = bytes_of_types(expected if divided is None else divided.divided_types(expected))

        def fetch() -> None:
            fetch_weights(model, directory, revision, progress=progress)

        def load() -> Params:
            if load_format != "dummy":
                fetch()
            with named_exhaustion(f"loading weights of {weights:,} bytes"):
                if load_format == "dummy":
                    return (divided or decoder).init_params_like(_key(seed or 0), expected)
                return load_params(
                    directory,
                    decoder,
                    dtype=dtype,
                    quantization=quantization,
                    progress=progress and sys.stderr.isatty(),
                    placed=None if divided is None else divided.divide,
                )

        self.directory, self.tokenizer = directory, tokenizer
        self.eos_ids = _end_ids(directory, config, tokenizer)
        self.max_model_len = max_model_len
        self._progress = progress
        self._allocate(
            divided or decoder,
            load,
            weights,
            dtype,
            cache,
            engine,
            Programs(strict=strict),
            logits_processors,
            room,
            fetch,
            bundle,
        )

    # Hidden from type checkers, for which an `LLM` is an `LLM`.
    if not TYPE_CHECKING:

        def __new__(cls, model=None, *, data_parallel_size=1, **options):  # noqa: ANN001, ANN003, ANN204
            """Returns a new `LLM`; replicas with its methods if there are to be several."""
            if replica_count(data_parallel_size) == 1:
                return super().__new__(cls)
            return _replicas_of(data_parallel_size, model, **options)

        __new__.__signature__ = inspect.signature(__init__)

    @classmethod
    def from_parts(
        cls,
        model: Model,
        params: Params,
        *,
        tokenizer: Tokenizer | str | Path | None = None,
        eos_ids: Sequence[int] | None = None,
        dtype: str = "auto",
        max_model_len: int | None = None,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        implementation: str | None = None,
        strict: bool = False,
        progress: bool = True,
        seed: int | None = None,
        logits_processors: Mapping[str, LogitsProcessor] | None = None,
        lora: LoraConfig | bool | None = None,
        speculation: SpeculationConfig | None = None,
        **options: object,
    ) -> "LLM":
        """Returns an `LLM` of a model and parameters that are in memory already, such as those of a trainer.

        Examples:
            >>> params, model = jaxkv.load_model("path/to/hf_dir")
            >>> llm = LLM.from_parts(model, params, tokenizer="path/to/hf_dir")
            >>> llm.update_weights(trained)  # after each step of training

        Args:
            model: a `Decoder`, as `jaxkv.load_model` returns it, one over several devices (`TensorParallel`), or a
                `FlaxModel` of a module of your own.
            params: its parameters; arrays on the device are used as they are, without a copy, and must live until
                `update_weights` replaces them.
            tokenizer: a tokenizer, or the model directory that has one, whose generation_config.json then also sets
                `get_default_sampling_params`. Without a tokenizer, prompts are token ids.
            eos_ids: ids that end a text; if not given, those that the model's files name, or else of the tokenizer, or
                else Transformers' defaults for the family.
            dtype: dtype of keys and values unless `cache` has one; that of most parameters with "auto".
            max_model_len: as for `LLM`, like all that follow.
            cache: size, page size and dtype of the cache, and how many sequences run at once.
            engine: options of the scheduler and the engine.
            implementation: implementation of every layer's attention and cache writes.
            strict: after `warm_up`, refuse to compile anything more than it has declared.
            progress: show bars on a terminal.
            seed: seed of the generator for requests without one.
            logits_processors: name -> function, which requests name in `SamplingParams.logits_processors`.
            lora: room for low-rank adapters that requests name.
            speculation: drafts of the next tokens, which decode steps verify.
            options: fields of `cache`, `engine` and `lora` under vLLM's names.

        Raises:
            ValueError: the parameters are not those of the model, an option is unknown or out of range, or a logits
                processor cannot run on the device.
            OutOfMemory: memory ran out while the cache was made.
            Unsupported: the `implementation` asked for cannot run this model here; a `ValueError` with every reason.
        """
        refuse_forked_user()
        known = inspect.signature(cls.from_parts).parameters
        cache, engine = merge_configs(cache, engine, options, known, speculation=speculation)
        room = lora_of(lora, options)
        _check_options(None, None, "auto", strict=strict, progress=progress)
        if not isinstance(model, Model):
            raise ValueError(
                f"model must be a Decoder or a FlaxModel, got {model!r}; for a directory or a name use LLM(...)"
            )
        params = params_of_model(model, params)
        enable_compile_cache()
        llm = cls.__new__(cls)
        llm._draw_seed = _seed_source(seed)
        llm.directory = Path(tokenizer) if isinstance(tokenizer, str | Path) else None
        llm.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else None
        if llm.directory is not None:
            llm.tokenizer = load_tokenizer(llm.directory)
        if eos_ids is None:
            own = llm.tokenizer.eos_ids if llm.tokenizer else ()
            has_files = isinstance(model, Decoder | TensorParallel)
            eos_ids = _named_ends(model.config, own) if has_files else own
        llm.eos_ids = _checked_ends(eos_ids, model.vocab_size)
        llm.max_model_len = resolve_length(max_model_len, model.max_positions)
        llm._progress = progress
        if isinstance(model, Decoder | TensorParallel):
            model = model.limited(llm.max_model_len)
        if implementation is not None:
            model = model.running(implementation)
        dtype = resolve_dtype(dtype, ParamTypes(params).dtype)
        programs = Programs(strict=strict)
        llm._allocate(
            model, lambda: params, 0, dtype, cache, engine, programs, logits_processors, room
        )
        return llm

    def _allocate(
        self,
        model: Model,
        load: Callable[[], Params],
        weights: int,
        dtype: str,
        cache: CacheConfig,
        engine: EngineConfig,
        programs: Programs,
        logits_processors: Mapping[str, LogitsProcessor] | None,
        lora: LoraConfig | None,
        fetch: Callable[[], None] = lambda: None,
        bundle: Bundle | None = None,
    ) -> None:
        """Plans the memory, loads the parameters, and makes the cache and the engine.

        The memory is planned first, so that a model that does not fit is refused before its weights are read.

        Args:
            model: the model.
            load: returns its parameters on the device.
            weights: bytes that `load` takes on the device.
            dtype: dtype of keys and values unless `cache` has one.
            cache: size of the cache.
            engine: options of the engine.
            programs: the compiled programs.
            logits_processors: name -> function.
            lora: room for adapters; `None` for none.
            fetch: gets the files of the weights to the model's directory.
            bundle: programs to load; `None` for none.
        """
        self.model: Model = model_for(model, cache, engine)
        model = self.model
        processors = register_processors(
            logits_processors, vocab_size=model.vocab_size, max_tokens=self.max_model_len
        )
        if bundle is not None:
            refuse_unbundled(model, processors, engine)
        self.grammars = Grammars(self.tokenizer, self.eos_ids, model.vocab_size)
        # Parameters that take memory here are nobody else's.
        owned = weights > 0
        smaller = load_draft_model(
            engine.speculation,
            model,
            directory=self.directory,
            fetch=fetch,
            dtype=dtype,
            max_model_len=self.max_model_len,
            max_sequences=cache.max_sequences,
            strict=programs.strict,
            progress=self._progress,
        )
        weights += stack_bytes(model, lora, dtype) + mailbox_room(model)
        free, hosts = free_bytes(cache.memory_share, weights=weights), None
        if spans_processes(model):
            refuse_on_hosts(cache, lora)
            hosts = meet()
            options = f"{model!r}, {cache}, {engine}, max_model_len={self.max_model_len}, {dtype}"
            free = hosts.agree(options, free)
        self.layout, self.budget = plan_cache(
            model,
            cache,
            dtype=dtype,
            max_model_len=self.max_model_len,
            free_bytes=free,
            ahead=tokens_ahead(model, cache, engine, self.max_model_len),
            processor_words=processors.num_words,
            speculation=engine.speculation,
        )
        if bundle is not None and cache.budget_bytes is None:
            self.budget = budget_of(bundle, self.budget)
        self._facts = partial(
            plan_facts,
            model,
            self.budget,
            cache,
            engine,
            max_model_len=self.max_model_len,
            lora=lora,
        )
        if bundle is not None:
            bundle.refuse_unless(self._facts())
        check_room(weights, self.budget.bytes)
        runner = ModelRunner(
            model,
            load(),
            self.layout,
            self.budget.counts,
            programs,
            processors,
            owns_params=owned,
            adapters=None if lora is None else AdapterStacks(model, lora, dtype),
            hosts=hosts,
        )
        sequence_runner = SequenceRunner(
            runner, max_tokens=self.max_model_len, max_rows=cache.max_sequences
        )
        self.engine = Engine(
            sequence_runner,
            self.tokenizer,
            engine,
            host_bytes=cache.host_bytes,
            drafter=drafter_of(smaller, sequence_runner, engine),
        )
        if bundle is not None:
            load_bundled(bundle, runner)
        self.lock = EngineLock()
        if isinstance(hosts, Follower):
            self.lock.close(_FOLLOWS)

    # Hidden from type checkers, which would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raises `AttributeError`, with the alternative to a method that only vLLM has."""
            raise unknown_attribute(self, name)

    def __enter__(self) -> "LLM":
        """Returns the `LLM` itself."""
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
        """Frees the memory on the device and the host at once. Any later use of this `LLM` raises a `RuntimeError`.

        It waits until a call of another thread ends, and for programs that XLA compiles in the background. Open streams
        end with the reason "abort". A second call does nothing. In a forked child it does nothing, because the memory
        belongs to the parent.

        Raises:
            RuntimeError: an `AsyncLLM` serves this `LLM`; close that first.
        """
        if self.lock.is_closed:
            return
        with self.lock.held():
            self.lock.close()
            self.engine.close()
            self.grammars.close()

    def follow(self) -> None:
        """Computes this process's share of what the `LLM` of process 0 runs, until that one is closed.

        Of an `LLM` over the devices of several processes (`jax.distributed`), those of the other processes do this and
        nothing else; they refuse all other calls.

        Raises:
            HostLost: process 0 has ended without a word.
            RuntimeError: this is process 0, or the `LLM` is on devices of this process alone.
            Exception: a step has failed here; all processes then end.
        """
        hosts = self.engine.runner.hosts
        if not isinstance(hosts, Follower):
            raise RuntimeError(
                "an LLM follows in processes other than process 0 alone, if tensor_parallel_size counts the devices of "
                f"all; this is process {jax.process_index()} of {jax.process_count()}"
            )
        try:
            hosts.follow(self.engine.runner)
        finally:
            self.engine.close()

    @property
    def params(self) -> Params:
        """The current parameters, not copied; `None` after `sleep(level=2)`."""
        return self.engine.runner.params

    @property
    def weight_version(self) -> WeightVersion:
        """The version of `params`: 0 for the first ones."""
        return self.engine.runner.weight_version

    def update_weights(
        self,
        params: Params | Iterable[tuple[str, Any]],
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Replaces the model's parameters between two steps; no step is compiled again.

        From the next step on all tokens come from the new parameters. What was cached with the old ones (pages, state
        checkpoints and their copies on the host) is dropped at once, and no later request sees it. Outputs tell the
        version that sampled each token (`SampleOutput.weight_versions`).

        Args:
            params: a tree like `LLM.params`, with arrays of equal shapes, dtypes and shardings. JAX arrays are used as
                they are, so they must live until the next update: a trainer that donates them must update first.
                Or an iterable of (name, array) with all tensors of a checkpoint of the model, of JAX, NumPy or PyTorch
                and of any floating-point dtype. One program makes the parameters of them, compiled at the first such
                update; it overwrites parameters that this `LLM` has loaded or made itself. The arrays have been read
                when the call returns.
            version: name of these parameters; the number of the last version plus 1 if not given.
            requests: what open streams, and under `AsyncLLM` all requests in progress, do: "continue" keeps the keys,
                values and states of the old parameters for their own tokens (in-flight updates of AReaL and prime-rl),
                "recompute" computes them again.

        Returns:
            The version.

        Raises:
            ValueError: a name, shape, dtype or sharding differs, an array was deleted, or an option is unknown; nothing
                was changed.
            ProgramRefused: strict mode, and tensors of these names, shapes and dtypes were not given before `warm_up`.
            RuntimeError: an `AsyncLLM` serves this `LLM`; call its `update_weights`.
        """
        with self.lock.held():
            return self.engine.update_weights(params, version=version, requests=requests)

    def load_lora(
        self,
        path: str | Path | None,
        *,
        version: WeightVersion | None = None,
        requests: str = "continue",
    ) -> WeightVersion:
        """Adds a low-rank adapter to the weights of the model directory, in place; no step is compiled again.

        All requests use the sum. An adapter that was loaded before, and updates of the weights, are replaced.

        Args:
            path: a folder as PEFT saves it, with adapter_config.json and adapter_model.safetensors; `None` for the
                directory's weights alone.
            version: as for `update_weights`.
            requests: as for `update_weights`.

        Returns:
            The version.

        Raises:
            ValueError: this `LLM` has no model directory, a file is damaged, the adapter is more than pairs of factors
                or does not fit the model; nothing was changed.
            ProgramRefused, RuntimeError: as for `update_weights`.
        """
        if self.directory is None:
            raise ValueError(
                "an adapter is added to the weights of a model directory, and this LLM has none; give update_weights "
                "the sums"
            )
        self.engine.runner.refuse_named_weights()
        tensors = merged_tensors(self.directory, path, dtype=self.engine.runner.dtype)
        return self.update_weights(tensors, version=version, requests=requests)

    def add_lora(
        self, name: str, path: str | Path, *, version: WeightVersion | None = None
    ) -> WeightVersion:
        """Loads a low-rank adapter that requests may name in `SamplingParams.lora`; no step is compiled again.

        A step serves requests with different adapters, and with none, together. Cached prefixes are shared between
        requests of the same load of an adapter alone.

        Args:
            name: its name. An adapter that is loaded under this name is replaced, unless requests use it.
            path: a folder as PEFT saves it, with adapter_config.json and adapter_model.safetensors.
            version: its version, which outputs tell (`SampleOutput.adapter`); the number of the last one of this name
                plus 1 if not given, and 0 for the first.

        Returns:
            The version.

        Raises:
            ValueError: this `LLM` has no room for adapters (`lora`), or for no further one; requests use the adapter of
                this name; or a file is damaged, or the adapter is more than pairs of factors, has a higher rank than
                `LoraConfig.max_rank`, or does not fit the model. Nothing was changed.
            RuntimeError: an `AsyncLLM` serves this `LLM`; call its `add_lora`.
        """
        factors = self.engine.adapters.read(path)
        with self.lock.held():
            return self.engine.adapters.add(name, factors, version, self.engine.adapters_in_use)

    def remove_lora(self, name: str) -> None:
        """Removes an adapter of `add_lora`; another one may take its place.

        Raises:
            ValueError: no such adapter is loaded, or requests use it.
            RuntimeError: an `AsyncLLM` serves this `LLM`; call its `remove_lora`.
        """
        with self.lock.held():
            self.engine.adapters.remove(name, self.engine.adapters_in_use)

    def list_loras(self) -> dict[str, WeightVersion]:
        """Returns name -> version of each adapter that `add_lora` has loaded."""
        return self.engine.adapters.versions

    def sleep(self, level: int = 1) -> None:
        """Gives memory on the device back until `wake_up`, for a trainer in the same process. Programs stay compiled.

        Open streams go on after `wake_up`; their tokens are computed again. Meanwhile every request raises.

        Args:
            level: 1 frees the cache; what the prefix cache keeps on the device is lost, its copies on the host stay.
                2 drops the parameters too: `update_weights` must give new ones before `wake_up`. Their memory is free
                once nothing else holds the arrays.

        Raises:
            ValueError: the level is neither 1 nor 2.
            RuntimeError: an `AsyncLLM` serves this `LLM`; call its `sleep`.
        """
        with self.lock.held():
            self.engine.sleep(level)

    def wake_up(self) -> None:
        """Makes the cache again, empty, after `sleep`. Nothing is compiled; does nothing if the `LLM` is awake.

        Raises:
            OutOfMemory: the memory is not free any more; free some and call it again.
            RuntimeError: `sleep(level=2)` has dropped the parameters and no others were given, or an `AsyncLLM` serves
                this `LLM`.
        """
        with self.lock.held():
            self.engine.wake_up()

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
        """Compiles the programs that `generate`, `stream` and `AsyncLLM` need for such requests; runs none of them.

        The programs serve shorter requests too. May be called several times. A strict `LLM` then refuses every request
        that needs another program.

        With `background` it returns as soon as a few programs can serve all such requests, and a thread compiles the
        others meanwhile. Until a step's own program is there, a larger one computes the step with padding, and serving
        is slower, since the thread runs Python too. `finish_warm_up` waits for the thread.

        Args:
            batch: most prompts at once.
            prompt_tokens: tokens of the longest prompt.
            sampling: sampling parameters of the requests; `max_tokens` and `n` count too.
            score: also compile the programs of `score` for texts of `prompt_tokens`.
            saved_prefixes: also compile the programs of `save_prefixes` and `load_prefixes`.
            background: compile most programs in a thread. Ignored where several processes compute the model.
            options: as for `generate`.

        Returns:
            The number of programs and their compile time, without those of the thread.

        Raises:
            ValueError: a number is out of range, or an option is unknown.
        """
        call = as_call("LLM.warm_up", options, sampling=sampling)
        [params] = one_each(call["sampling"], 1)
        batch = as_int("batch", batch, 1, MOST_WARMED)
        prompt_tokens = as_int("prompt_tokens", prompt_tokens, 1, self.max_model_len - 1)
        # The programs do not depend on the seed. A seed drawn here would change those of later requests.
        params = forbid_words(replace(params, seed=0), self.tokenizer)
        request = self._request(TokenizedPrompt((0,) * prompt_tokens), params, 0)
        with self.lock.held():
            self.engine.refuse_if_asleep()
            needed = declare_served(self.engine, request, batch * params.n)
            slot = request.adapter_slot
            tops = [0] if score else []
            if params.prompt_logprobs is not None:
                tops.append(params.prompt_logprobs)
            needed += [
                score_program(self.engine.sequence_runner, request.prompt, top, adapter_slot=slot)
                for top in tops
            ]
            if saved_prefixes:
                needed += declare_saved_prefixes(self.engine)
            compile_drafter(self.engine, request, batch * params.n)
            return compile_all(
                self.engine.runner,
                needed,
                progress=self._progress and sys.stderr.isatty(),
                background=background,
            )

    def finish_warm_up(self) -> None:
        """Waits for the programs that a thread compiles, such as those of `warm_up(background=True)`.

        Any thread may call it.

        Raises:
            ProgramRefused, ValueError, RuntimeError: one could not be compiled, as for `warm_up`; the others are.
        """
        self.lock.refuse_if_closed()
        self.engine.runner.programs.wait()

    def save_programs(self, path: str | Path) -> int:
        """Writes all programs that are compiled, such as those of `warm_up`, into a folder for `LLM(programs=...)`.

        It waits for those that a thread compiles, see `finish_warm_up`.

        Args:
            path: the new folder.

        Returns:
            The number of programs.

        Raises:
            ProgramRefused: as for `finish_warm_up`.
            BadBundle: a program is of a kind that a folder cannot hold, or cannot be serialised on this device. A CPU's
                program that came from a cache of compiled programs cannot.
            FileExistsError: there is a file or folder at `path`.
            OSError: the folder cannot be written.
        """
        with self.lock.held():
            runner = self.engine.runner
            refuse_unbundled(self.model, runner.processors, self.engine.config)
            runner.programs.wait()
            return save_bundle(Path(path), self._facts(), self.budget, runner)

    def stats(self) -> Stats:
        """Returns the implementation and its reasons, the use of the cache, and counts of requests and programs."""
        self.lock.refuse_if_closed()
        return collect_stats(self.engine)

    def get_tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer; `None` if the model directory has no tokenizer.json."""
        return self.tokenizer

    def get_default_sampling_params(self, **options: Any) -> SamplingParams:  # noqa: ANN401 - as the fields
        """Returns the sampling that generation_config.json of the model recommends, as `jaxkv chat` uses it.

        These are temperature, top-p, top-k, min-p and repetition penalty; fields that the file does not set have the
        values of `SamplingParams()`.

        Args:
            options: fields of `SamplingParams` to set beside them or in their place, such as `max_tokens=256`.

        Raises:
            ValueError: the file or an option has a value of the wrong type or out of range.
        """
        defaults = {} if self.directory is None else load_sampling_defaults(self.directory)
        return SamplingParams(**{**defaults, **options})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: object,
    ) -> list[RequestOutput]:
        """Generates for a list of prompts, in one continuous batch; a single prompt is a list of one.

        All prompts are checked before any is run. If one can never be served, the whole call raises an error that names
        its index. A request that fails later has the `finish_reason` "error" and the exception in `error`; the others
        go on. An interrupt (Ctrl-C) aborts the call's requests, and the `LLM` stays usable. Calls of several threads
        run one after the other; `AsyncLLM` serves them together.

        Args:
            prompts: texts, lists or arrays of token ids, or dicts with "prompt" or "prompt_token_ids" and perhaps
                "cache_salt".
            sampling: for all prompts, or one for each.
            progress: show a bar with tokens per second on stderr; if not given, only on a terminal.
            options: fields of `SamplingParams` in place of `sampling`, such as `max_tokens=3`; and vLLM's names
                `sampling_params` and `use_tqdm`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            ValueError: a prompt is empty, has ids the model lacks, or leaves no room for a token; or an option is
                unknown.
            ProgramRefused: strict mode has no program for one of them; none was run.
            OutOfPages: another caller, such as a stream, holds the pages that the first request in the queue needs.
            CachePoisoned: the cache was lost too often.
            JaxRuntimeError: the device is broken.
        """
        call = as_call("LLM.generate", options, sampling=sampling, progress=progress)
        listed = as_prompts(prompts)
        requests = self._checked_all(listed, one_each(call["sampling"], len(listed)))
        return self._outputs_of(requests, call["progress"])

    def _outputs_of(
        self, requests: Sequence[Sequence[Request]], progress: bool | None
    ) -> list[RequestOutput]:
        """Runs checked requests until all have ended; makes outputs while the device computes, where it can."""
        outputs: list[RequestOutput] = []

        def ended(samples: Sequence[RequestState]) -> None:
            outputs.append(output_of(samples, self.tokenizer))

        made = self._serve_all(requests, progress, ended=ended)
        for samples in made[len(outputs) :]:
            ended(samples)
        return outputs

    def _serve_all(
        self,
        requests: Sequence[Sequence[Request]],
        progress: bool | None,
        *,
        clear_prefixes: bool = False,
        ended: Callable[[list[RequestState]], None] | None = None,
    ) -> list[list[RequestState]]:
        """Runs checked requests until all have ended; if `progress` is `None`, shows a bar on a terminal.

        Args:
            requests: the samples of each prompt.
            progress: as for `generate`.
            clear_prefixes: empty the prefix cache first.
            ended: see `jaxkv.engine.drive.serve_all`.
        """
        shown = self._progress and sys.stderr.isatty() if progress is None else bool(progress)
        with self.lock.held():
            self._recover()
            if clear_prefixes:
                self.engine.clear_prefixes()
            return serve_all(self.engine, requests, progress=shown, ended=ended)

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
        """Generates as `generate` does, and returns all samples as padded arrays for a train step.

        Samples of a prompt share its pages. A sample that failed has fewer tokens and the reason 3.

        Args:
            prompts: as for `generate`.
            sampling: as for `generate`; `logprobs_mode` names the distribution of the log-probabilities.
            prompt_width: columns of prompts, so that a compiled train step sees one shape; the longest prompt if not
                given.
            output_width: columns of outputs; the largest `max_tokens` if not given, or the longest output if one is
                `None`.
            pad_id: fills the columns that have no token.
            device: a device or sharding for the arrays; NumPy arrays if not given.
            progress: as for `generate`.
            options: as for `generate`.

        Raises:
            ValueError: as for `generate`, there is no prompt, or a prompt or output is longer than its width.
        """
        call = as_call("LLM.rollout", options, sampling=sampling, progress=progress)
        requests, output_width = self.rollout_requests(
            prompts, call["sampling"], prompt_width=prompt_width, output_width=output_width
        )
        rollout = rollout_of(
            self._outputs_of(requests, call["progress"]),
            prompt_width=prompt_width,
            output_width=output_width,
            pad_id=pad_id,
        )
        return rollout if device is None else rollout.to(device)

    def rollout_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        *,
        prompt_width: int | None,
        output_width: int | None,
        priority: int = 0,
        salt: str | bytes | None = None,
    ) -> tuple[list[list[Request]], int | None]:
        """Returns the engine's requests for the samples of each prompt, and the columns of their outputs.

        Raises:
            ValueError: as for `rollout`.
            ProgramRefused: strict mode has no program for one of them.
        """
        listed = as_prompts(prompts)
        if not listed:
            raise ValueError("a rollout needs at least one prompt, got none")
        chosen = rollout_sampling(sampling, len(listed))
        limits = [one.max_tokens for one in chosen if one.max_tokens is not None]
        if len(limits) == len(chosen):
            output_width = column_count("output", limits, output_width)
        requests = self._checked_all(listed, chosen, priority=priority, salt=salt)
        if prompt_width is not None:
            column_count("prompt", [len(one[0].prompt) for one in requests], prompt_width)
        return requests, output_width

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: object
    ) -> Generator[Piece]:
        """Yields pieces of text as they are generated; the pieces joined are the whole text.

        The engine runs only while the caller waits for a piece. Closing or collecting the generator early aborts the
        request. Several streams may be open at once; each step then serves all of them.

        Args:
            prompt: one prompt in any form that `generate` takes.
            sampling: sampling parameters of the request.
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
        """Replaces a cache that an earlier failure has destroyed; unlike the engine's rebuilds, this has no limit."""
        self.engine.refuse_if_asleep()
        owner = self.engine.runner.owner
        if owner.poisoned:
            refuse_broken(owner.cause)
            _LOG.warning("the cache was lost; continuing with an empty cache")
            owner.rebuild()
        self.engine.refresh()

    def explain(
        self,
        prompt: Prompt,
        *,
        salt: str | bytes | None = None,
        lora: str | None = None,
        **options: object,
    ) -> Explanation:
        """Returns how much of a prompt the prefix cache holds, and why not more, as numbers and as text.

        Args:
            prompt: one prompt in any form that `generate` takes.
            salt: the `salt` of the prompt's requests.
            lora: the adapter of the prompt's requests.
            options: vLLM's name `cache_salt`.

        Raises:
            ValueError: the prompt is not valid, no such adapter is loaded, or the prefix cache is off.
        """
        call = as_call("LLM.explain", options, salt=salt)
        tokenized = self._tokenize(prompt, call["salt"])
        check_salt(tokenized.salt)
        ids, salt, index = tokenized.ids, tokenized.salt, self.engine.prefix
        if (adapter := self.engine.adapters.of(lora)) is not None:
            salt = adapter.salted(salt)
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

        The file holds full pages, state checkpoints and their token ids in plain, so it reveals the prompts. Entries
        cached under a salt are not saved, because the salt is a secret of its user. The file is written atomically.

        Args:
            path: a new file, or a file to replace.
            prompts: save only the cached prefixes of these prompts; in any form that `generate` takes, without a salt.
                If not given, all prefixes are saved.

        Returns:
            The numbers of saved tokens, pages, checkpoints and bytes.

        Raises:
            ValueError: the prefix cache is off, a prompt is not valid or has a salt, or `path` is no regular file.
            ProgramRefused: strict mode was not warmed up with `saved_prefixes=True`.
            OSError: the file cannot be written; an existing file is unchanged.
            RuntimeError: an `AsyncLLM` serves this `LLM`.
        """
        texts = None if prompts is None else self._texts_to_save(prompts)
        with self.lock.held():
            self._recover()
            return save_prefixes(self.engine, path, texts)

    def load_prefixes(self, path: str | Path) -> PrefixCounts:
        """Loads the prefixes of a file of `save_prefixes` into the prefix cache, as many as fit.

        The cache may have another number of pages than the saved one. Prefixes go into free pages, and into pages of
        cached prefixes that no request holds. If they do not all fit, those that more texts share are loaded first. The
        contents of the file are trusted, like those of a checkpoint.

        Args:
            path: a file of `save_prefixes`.

        Returns:
            How much was loaded, was cached already, and did not fit.

        Raises:
            BadCheckpoint: the file is damaged, or was saved with another model, implementation, dtype or cache layout,
                or with other weights; the cache is unchanged.
            FileNotFoundError: there is no such file.
            ValueError: the prefix cache is off, or `path` is no regular file.
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
        for index, prompt in enumerate(listed):
            with named("prompt", index, len(listed)):
                tokenized = self._tokenize(prompt)
                if tokenized.salt is not None:
                    raise ValueError(
                        "prefixes with a cache_salt are not saved; leave the prompt out"
                    )
                texts.append(tokenized.ids)
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
            sampling: sampling parameters of the answers; for several conversations, one for all or one for each.
            progress: show a bar on stderr; if not given, for several conversations on a terminal.
            options: as for `generate`, and for the chat template:
                `tools`, what the model may call: JSON schemas, or Python functions with type hints and a docstring in
                Google's style; `documents`, dicts for templates of retrieval; `chat_template`, the name of one of the
                model's templates or the Jinja source of another; `chat_template_kwargs`, further variables such as
                `{"enable_thinking": False}`; `continue_final_message=True` to continue the last message;
                `add_generation_prompt=False` not to begin the assistant's turn.

        Returns:
            One output for a conversation, where vLLM returns a list of one; a list of outputs for a list of
            conversations, also if it has one.

        Raises:
            ValueError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
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
        """Returns the token ids of one conversation, up to where the answer begins.

        Args:
            messages: one conversation in any form that `chat` takes.
            options: those of `chat` for the chat template, such as `tools`.
        """
        return self._chat_prompt(messages, as_call("LLM.chat_prompt", options, chat=None)["chat"])

    def _chat_prompt(self, messages: Messages, options: ChatOptions | None) -> list[int]:
        self.lock.refuse_if_closed()
        if self.tokenizer is None:
            raise ValueError(f"chat needs a tokenizer: {NO_TOKENIZER}")
        [conversation], _ = as_conversations(messages)
        return self.tokenizer.encode_chat(conversation, options, max_tokens=self.max_model_len)

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
        """Returns the natural log-probabilities of given tokens, computed in one of two ways, as float32 arrays.

        Without `outputs` each text takes one step, as a prompt does. That is the cheapest way. Decode steps have other
        shapes, so the log-probabilities of a sample differ from these by rounding, unless the engine has
        `batch_invariant`.

        With `outputs` the engine runs as `generate` and `rollout` do, and takes these tokens in place of sampled ones,
        in the same programs. It costs as much as the rollout with an empty prefix cache. If the same programs run with
        the same rows, the result equals the rollout's log-probabilities bit for bit: always with
        `EngineConfig(batch_invariant=True)`, and for models without recurrent layers with `pinned_shapes=True`, which
        then also leave the prefix cache as it was. Any other engine empties its prefix cache first; the bits are then
        equal if all of the rollout's prompts are given in its order, and the rollout began with an empty prefix cache,
        was alone in the engine and had no drafts (`speculation`), which a replay takes none of.

        Args:
            prompts: whole texts, or the prompts before `outputs`; in any form that `generate` takes.
            outputs: a `Rollout` of these prompts, or for each prompt the token ids of each of its samples.
            sampling: with `outputs` alone: what they were generated with, for all prompts or one for each; its
                `logprobs_mode` names the distribution. `n` and seeds have no effect. Greedy if not given.
            lora: name of the adapter that computes them; `None` for the model alone. With `outputs` it is a field of
                `sampling`.
            progress: with `outputs` alone, as for `generate`.
            options: as for `generate`, with `outputs` alone.

        Returns:
            One array per text, [tokens - 1], of its tokens but the first; or one per sample, [tokens], by prompts.

        Raises:
            ValueError: a prompt is empty, too long, or has ids the model lacks; there are not samples for each prompt;
                `outputs` are missing; or no such adapter is loaded.
            ProgramRefused: strict mode has no program for it.
            RuntimeError: a sample's request has failed, or a text has lost the cache twice.
        """
        if outputs is not None and lora is not None:
            options = by_adapter(options, sampling, lora)
        call = as_call("LLM.score", options, sampling=sampling, progress=progress)
        if outputs is not None:
            replay = self.replay(prompts, outputs, call["sampling"])
            return replay.scores(
                self._serve_all(
                    replay.requests, call["progress"], clear_prefixes=replay.clears_prefixes
                )
            )
        texts = self.whole_texts(prompts, call)
        with self.lock.held(), named_exhaustion("scoring texts"):
            self._recover()
            return [self.engine.score_text(text, lora) for text in texts]

    def whole_texts(
        self, prompts: Prompt | Sequence[Prompt], call: Mapping[str, object]
    ) -> list[tuple[int, ...]]:
        """Returns the token ids of texts that are scored in one step each.

        Args:
            prompts: the texts.
            call: options of `score` that need outputs; `None` for those that were not given.

        Raises:
            ValueError: a text cannot be scored, or an option was given.
        """
        if any(value is not None for value in call.values()):
            raise ValueError(
                f"{' and '.join(call)} are for decode steps, and whole texts are scored in one step each; give outputs"
            )
        ids = []
        listed = as_prompts(prompts)
        for index, prompt in enumerate(listed):
            with named("prompt", index, len(listed)):
                ids.append(self._tokenize(prompt).ids)
                if len(ids[-1]) > self.max_model_len:
                    raise ValueError(
                        f"a text of {len(ids[-1])} tokens exceeds max_model_len, {self.max_model_len}"
                    )
        return ids

    def replay(
        self,
        prompts: Prompt | Sequence[Prompt],
        outputs: Outputs,
        sampling: SamplingParams | Sequence[SamplingParams] | None,
        priority: int = 0,
    ) -> Replay:
        """Returns the engine's requests that compute the log-probabilities of given samples.

        Args:
            prompts: as for `score`, like `outputs` and `sampling`.
            outputs: the samples.
            sampling: what they were generated with.
            priority: lower numbers are served first.

        Raises:
            ValueError, ProgramRefused: as for `score`.
        """
        listed = as_prompts(prompts)
        samples = given_samples(outputs, len(listed), self.model.vocab_size)
        chosen = None if sampling is None else one_each(sampling, len(listed))
        requests = self._checked_all(listed, given_sampling(chosen, samples), priority=priority)
        salt, given = replay_salt() if self.engine.repeats_bits else None, []
        for index, (group, tokens) in enumerate(zip(requests, samples, strict=True)):
            with named("prompt", index, len(listed)):
                given.append(given_requests(group, tokens, salt))
        return Replay([group for group in given if group], samples, clears_prefixes=salt is None)

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
        """Returns the engine's requests for one prompt, one for each of its `n` samples.

        It compiles a grammar of `structured_outputs`, which may take seconds; the thread of an engine should not wait
        for it.

        Raises:
            ValueError: as for `generate`.
            ProgramRefused: strict mode has no program for it.
        """
        made = self._tokenize(prompt, salt)
        params = forbid_words(params, self.tokenizer)
        outputs = params.structured_outputs
        grammar = None if outputs is None else self.grammars.compile(outputs)
        requests = [
            self._request(made, params, sample, priority, grammar) for sample in range(params.n)
        ]
        # `_request` lowers `min_tokens` to what fits. A warm-up needs that; a request is refused.
        if params.min_tokens > self.max_model_len - len(made.ids):
            raise ValueError(
                f"min_tokens is {params.min_tokens}, but a prompt of {len(made.ids)} tokens leaves room for "
                f"{self.max_model_len - len(made.ids)}, since max_model_len is {self.max_model_len}; ask for fewer, "
                "shorten the prompt or raise max_model_len"
            )
        check_compiled(self.engine, requests[0])
        return requests

    def _checked(self, prompt: Prompt, params: SamplingParams, **options: Any) -> list[Request]:  # noqa: ANN401
        """Returns the requests of one prompt; raises `ValueError` if the engine can never serve them.

        Args:
            prompt: the prompt.
            params: its sampling parameters.
            options: keywords of `requests`.
        """
        requests = self.requests(prompt, params, **options)
        self.engine.check(requests[0])
        return requests

    def _checked_all(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        **options: Any,  # noqa: ANN401 - keywords of `requests`
    ) -> list[list[Request]]:
        """Returns the requests of each prompt; an error names the index of its prompt."""
        requests = []
        for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
            with named("prompt", index, len(prompts)):
                requests.append(self._checked(prompt, params, **options))
        return requests

    def _request(
        self,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        sample: int,
        priority: int = 0,
        grammar: Grammar | None = None,
    ) -> Request:
        params.check_vocab(self.model.vocab_size)
        self.engine.runner.processors.check(params.logits_processors)
        return new_request(
            prompt,
            params,
            sample,
            max_model_len=self.max_model_len,
            eos_ids=self.eos_ids,
            draw_seed=self._draw_seed,
            priority=priority,
            grammar=grammar,
            adapter=self.engine.adapters.of(params.lora),
        )
