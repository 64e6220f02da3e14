"""The options of `jaxkv serve`. Slow modules are imported in the functions, so that error messages appear at once."""

import argparse
import gc
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxkv.config.cache import CacheConfig
from jaxkv.config.engine import EngineConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.options import (
    add_processor_option,
    add_serving_options,
    add_speculation_options,
    cache_of,
    processor_places,
    size,
    speculation_of_options,
)
from jaxkv.replicas.devices import replica_count
from jaxkv.serve import exit_codes
from jaxkv.serve.http.limits import Limits
from jaxkv.serve.warm_samplings import WARM_SAMPLINGS
from jaxkv.terminal import Screen

_LOG = logging.getLogger(__name__)

KEY_VARIABLE = "JAXKV_API_KEY"
"""The environment variable with an API key."""

_NEEDED = (
    "httptools",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "starlette",
    "uvicorn",
    "uvloop",
)
_DEFAULT_NAME = "default"
_SILENCE_SECONDS = 5.0
"""The engine gives a sign of life each second; a busy machine may delay one."""

_DESCRIPTORS = 64
"""File descriptors that are no connections: libraries, the engine's socket, the model's files."""


def add_serve[P: argparse.ArgumentParser](commands: "argparse._SubParsersAction[P]") -> None:
    """Adds the command to a parser's sub-commands."""
    serve = commands.add_parser("serve", help="answer requests over HTTP as OpenAI's API does")
    serve.add_argument(
        "named_model",
        nargs="?",
        metavar="MODEL",
        help="the same as --model MODEL, as `vllm serve` has it",
    )
    add_serving_options(serve, max_sequences=CacheConfig.max_sequences)
    _add_address_options(serve)
    _add_engine_options(serve)
    _add_host_options(serve)
    _add_parser_options(serve)
    _add_limits(serve)
    serve.set_defaults(run=_serve)


def _add_address_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="NAME",
        help="address to listen on; one that other machines reach needs a key (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=_port,
        default=8000,
        metavar="N",
        help="0 for any free one (default: %(default)s)",
    )
    parser.add_argument(
        "--api-key",
        action="append",
        default=[],
        dest="api_keys",
        metavar="KEY",
        help="that requests need; may be given several times. Other users of the machine can read it: rather use "
        f"--api-key-file or the variable {KEY_VARIABLE} (default: none)",
    )
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="a file with a key on each line (default: none)"
    )
    parser.add_argument(
        "--served-model-name",
        metavar="NAME",
        help=f"that requests give (default: that of --model, else {_DEFAULT_NAME!r})",
    )


def add_program_options(parser: argparse.ArgumentParser, *, without: str) -> None:
    """Adds the options on which it depends what is compiled, besides those of `add_serving_options`.

    `engine_of` and `lora_fields` read them; `jaxkv compile` has them too.

    Args:
        parser: the parser of the command.
        without: what happens without `--warm-up`, for the help text.
    """
    parser.add_argument(
        "--token-budget",
        "--max-num-batched-tokens",
        type=size,
        default=EngineConfig.token_budget,
        metavar="N",
        help="most tokens of a step (default: %(default)s)",
    )
    parser.add_argument(
        "--load-format",
        choices=("auto", "dummy"),
        default="auto",
        help="dummy draws random weights, for measurements (default: %(default)s)",
    )
    add_speculation_options(parser)
    parser.add_argument("--no-prefix-cache", action="store_true", help="share no cached prefixes")
    _add_lora_options(parser)
    parser.add_argument(
        "--warm-up",
        type=_warm_up,
        action="append",
        default=[],
        metavar="BATCH:TOKENS[:SAMPLING]",
        help="compile for so many requests at once with prompts of up to so many tokens; SAMPLING is some of greedy, "
        "drawn and filtered, joined by +, and all three if left out. May be given several times (default: "
        f"{without})",
    )


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    add_program_options(parser, without="programs are compiled when they are first needed")
    parser.add_argument(
        "--warm-up-in-background",
        action="store_true",
        help="be ready once a few programs can serve all requests of --warm-up, though slower, and compile the others "
        "meanwhile; without effect with several hosts",
    )
    parser.add_argument(
        "--programs",
        metavar="FOLDER",
        help="compiled programs that jaxkv compile made with the same options; loading them runs what the folder holds "
        "(default: none)",
    )
    parser.add_argument(
        "--data-parallel-size",
        type=size,
        default=1,
        metavar="N",
        help="replicas of the model, each on --tensor-parallel-size devices of its own; a request goes to the one that "
        "has cached its prefix, unless another has much less to do (default: %(default)s)",
    )
    add_processor_option(parser)
    parser.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="where requests that give no temperature, top_p, top_k, min_p or repetition_penalty take them from: the "
        "model's generation_config.json, or nowhere (default: %(default)s)",
    )


def _add_host_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--coordinator-address",
        metavar="HOST:PORT",
        help="for an engine on several hosts: where process 0 listens for the others. Start the same command on each "
        "host, with --num-processes and --process-id (default: one process)",
    )
    parser.add_argument(
        "--num-processes",
        type=size,
        default=1,
        metavar="N",
        help="of the engine (default: %(default)s)",
    )
    parser.add_argument(
        "--process-id",
        type=_process_id,
        default=0,
        metavar="I",
        help="number of this process; process 0 answers requests, the others follow it (default: %(default)s)",
    )


def _process_id(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text[:40]!r}")
    return int(text)


def _add_lora_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--lora-modules",
        type=_lora_module,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=FOLDER",
        help="low-rank adapters in PEFT's layout, which requests choose by giving NAME as their model (default: none)",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=size,
        default=LoraConfig.max_rank,
        metavar="N",
        help="highest rank of an adapter (default: %(default)s)",
    )


def _lora_module(text: str) -> tuple[str, str]:
    """Reads "name=folder"."""
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"must be NAME=FOLDER, got {text[:80]!r}")
    return name, folder


def _add_parser_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tool-parser",
        "--tool-call-parser",
        type=_tool_parser,
        metavar="NAME",
        help="format of the model's tool calls, by vLLM's names, such as hermes; \"none\" leaves them in the text "
        "(default: found from the chat template and the tokenizer)",
    )
    parser.add_argument(
        "--reasoning-parser",
        type=_reasoning_parser,
        metavar="NAME",
        help='format of the model\'s reasoning, such as deepseek_r1; "none" leaves it in the text (default: found '
        "likewise)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-waiting",
        type=size,
        default=1024,
        metavar="N",
        help="samples (n for each prompt) beyond --max-sequences that may wait; more are answered 429 (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--request-timeout",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="after which a request is ended with an error (default: %(default)g)",
    )
    parser.add_argument(
        "--drain-seconds",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="that requests in progress may go on after SIGTERM or SIGINT (default: %(default)g)",
    )
    parser.add_argument(
        "--hang-seconds",
        type=_seconds,
        default=30.0,
        metavar="SECONDS",
        help="a step that takes longer ends the server; compiling does not count (default: %(default)g)",
    )
    parser.add_argument(
        "--busy-seconds",
        type=_seconds_or_none,
        default=0.0,
        metavar="SECONDS",
        help="that the engine keeps a core busy after its last work, so that the next request begins sooner (default: "
        "%(default)g)",
    )


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be in [0, 65535], got {text[:40]!r}")
    return int(text)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be above 0 and below 1e9 seconds, got {text}")
    return seconds


def _seconds_or_none(text: str) -> float:
    return 0.0 if text == "0" else _seconds(text)


def _tool_parser(text: str) -> str:
    return _parser_name(text, tools=text)


def _reasoning_parser(text: str) -> str:
    return _parser_name(text, reasoning=text)


def _parser_name(text: str, **named: str) -> str:
    from jaxkv.serve.parsers.choose import choose_parsers

    try:
        choose_parsers(None, (), "", **named)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _warm_up(text: str) -> tuple[int, int, tuple[str, ...]]:
    """Reads "8:1024", "8:1k" or "8:1k:greedy+drawn"."""
    batch, colon, rest = text.partition(":")
    tokens, named, chosen = rest.partition(":")
    samplings = tuple(chosen.split("+")) if named else tuple(WARM_SAMPLINGS)
    if not colon or not set(samplings) <= set(WARM_SAMPLINGS):
        raise argparse.ArgumentTypeError(
            f"must be BATCH:TOKENS such as 8:1024, or with some of {', '.join(WARM_SAMPLINGS)} such as "
            f"8:1024:greedy+drawn, got {text[:40]!r}"
        )
    sizes = size(batch), size(tokens)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"BATCH and TOKENS must be above 0, got {text[:40]!r}")
    return *sizes, samplings


def _serve(options: argparse.Namespace, screen: Screen) -> int:
    _refuse_if_missing()
    import uvloop

    from jaxkv.serve.api.app import make_app
    from jaxkv.serve.engine_process import EngineProcess
    from jaxkv.serve.http.auth import ApiKeys
    from jaxkv.serve.http.service import Service
    from jaxkv.serve.listener import open_listener, url_of
    from jaxkv.serve.replicas import ReplicaProcesses
    from jaxkv.serve.server import Server, uvicorn_config

    options.model = _model(options)
    start, replicas = _start(options), replica_count(options.data_parallel_size)
    if start.hosts is not None and replicas > 1:
        raise ValueError(
            "--data-parallel-size makes replicas on one host, and --coordinator-address puts one engine on several; "
            "give one of them"
        )
    if start.hosts is not None and start.hosts.process_id > 0:
        return uvloop.run(_follow(start))
    keys = ApiKeys(_keys(options))
    limits = _limits(options)
    _allow_descriptors(limits.connections + limits.lingering + _DESCRIPTORS)
    name = _served_name(options, start.lora_modules)

    async def run() -> int:
        engine = EngineProcess(start) if replicas == 1 else ReplicaProcesses(start, replicas)
        service = Service(
            engine.client,
            None,
            name,
            limits,
            tool_parser=options.tool_parser,
            reasoning_parser=options.reasoning_parser,
            adapters=tuple(start.lora_modules),
        )
        server = Server(
            engine,
            service,
            uvicorn_config(make_app(service, keys), limits),
            listener,
            drain_seconds=options.drain_seconds,
            on_ready=lambda: _say_ready(screen, name, url_of(listener, options.host)),
        )
        return await server.run()

    with open_listener(options.host, options.port, has_keys=bool(keys)) as listener:
        return uvloop.run(run())


async def _follow(start: Any) -> int:  # noqa: ANN401 - `Start` needs the extra
    """Runs an engine process that follows another host's, until that one ends; returns the exit code."""
    from jaxkv.serve.engine_process import EngineProcess
    from jaxkv.serve.server import EngineRefused

    engine = EngineProcess(start)
    engine.client.start()
    await engine.client.wait_lost()
    words, failure, code = engine.client.last_words, engine.client.failure, await engine.end()
    if code == exit_codes.REFUSED:
        raise EngineRefused(words)
    if code != exit_codes.OK:
        _LOG.error("%s", words or failure)
    return code


def _hosts(options: argparse.Namespace) -> Any:  # noqa: ANN401 - `Hosts` needs the extra
    """Returns how the engine joins the processes of other hosts; `None` for one process.

    Raises:
        ValueError: the options contradict each other.
    """
    from jaxkv.serve.wire import Hosts

    count, number = options.num_processes, options.process_id
    if options.coordinator_address is None:
        if count > 1 or number > 0:
            raise ValueError(
                "--num-processes and --process-id need --coordinator-address, the host and port of process 0"
            )
        return None
    if not 0 <= number < count or count < 2:
        raise ValueError(
            f"--coordinator-address needs --num-processes of at least 2 and a --process-id below it, got {count} and "
            f"{number}"
        )
    return Hosts(
        coordinator_address=options.coordinator_address, num_processes=count, process_id=number
    )


def _refuse_if_missing() -> None:
    """Raises `RuntimeError` if packages of the server are not installed."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f'the server needs {", ".join(missing)}, not installed here; run pip install "jaxkv[serve]", '
            f'or in a clone pip install -e ".[serve]"'
        )


def _limits(options: argparse.Namespace) -> Limits:
    """Returns the bounds on requests and connections."""
    return Limits(
        most_waiting=options.max_waiting,
        request_seconds=options.request_timeout,
        silence_seconds=max(_SILENCE_SECONDS, 2 * options.hang_seconds),
    )


def _served_name(options: argparse.Namespace, adapters: Collection[str]) -> str:
    """Returns the name by which requests ask for the model; raises `ValueError` if an adapter has it too."""
    name = options.served_model_name or options.model or _DEFAULT_NAME
    if name in adapters:
        raise ValueError(
            f"an adapter of --lora-modules has the model's name, {name!r}; give it another, or --served-model-name"
        )
    return name


def _say_ready(screen: Screen, name: str, url: str) -> None:
    # What is loaded by now stays; the garbage collector need not look at it again during requests.
    gc.collect()
    gc.freeze()
    # A closed pipe is no reason not to serve.
    with suppress(OSError):
        screen.write(f"serving {name} at {url} (ready)\n")


def _model(options: argparse.Namespace) -> str | None:
    """Returns the model, which may be given in two ways; raises `ValueError` if both are used."""
    if options.named_model is None or options.model is None:
        return options.model or options.named_model
    raise ValueError(
        f"the model is given twice, as {options.named_model!r} and as --model {options.model!r}; give it once"
    )


def _start(options: argparse.Namespace) -> Any:  # noqa: ANN401 - `Start` needs the extra
    """Returns what the engine process is to load.

    Raises:
        ValueError: an option is out of range.
    """
    if options.warm_up_in_background and not options.warm_up:
        raise ValueError(
            "--warm-up-in-background is for the programs of --warm-up, of which there is none; give both or neither"
        )
    from jaxkv.serve.wire import Start

    return Start(
        model=options.model,
        revision=options.revision,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        implementation=options.implementation,
        ignore_config_keys=tuple(options.ignore_config_keys),
        load_format=options.load_format,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
        cache=_changed(cache_of(options)),
        engine=_changed(engine_of(options)),
        logits_processors=processor_places(options),
        lora=lora_fields(options),
        lora_modules=dict(options.lora_modules),
        warm_up=tuple(options.warm_up),
        warm_up_in_background=options.warm_up_in_background,
        programs=options.programs,
        hang_seconds=options.hang_seconds,
        busy_seconds=options.busy_seconds,
        hosts=_hosts(options),
        sampling_defaults=options.generation_config == "auto",
    )


def engine_of(options: argparse.Namespace) -> EngineConfig:
    """Returns the options of the engine that those of `add_program_options` describe.

    Raises:
        ValueError: an option is out of range.
    """
    return EngineConfig(
        token_budget=options.token_budget,
        prefix_cache=not options.no_prefix_cache,
        speculation=speculation_of_options(options),
    )


def lora_fields(options: argparse.Namespace) -> dict[str, int] | None:
    """Returns the fields of the `LoraConfig` that those of `add_program_options` describe; `None` without adapters.

    Raises:
        ValueError: two adapters have the same name, or there are too many.
    """
    modules = dict(options.lora_modules)
    if len(modules) < len(options.lora_modules):
        raise ValueError("two adapters of --lora-modules have the same name; rename one of them")
    if not modules:
        return None
    return asdict(LoraConfig(max_adapters=len(modules), max_rank=options.max_lora_rank))


def _changed(config: CacheConfig | EngineConfig) -> dict[str, Any]:
    """Returns the fields of a configuration that differ from their defaults."""
    default = type(config)()
    return {
        field.name: value
        for field in fields(config)
        if (value := getattr(config, field.name)) != getattr(default, field.name)
    }


def _keys(options: argparse.Namespace) -> list[str]:
    """Returns the API keys of the options, of the file and of the environment.

    Raises:
        ValueError: the file holds no key.
        OSError: it cannot be read.
    """
    keys = list(options.api_keys)
    if options.api_key_file is not None:
        lines = Path(options.api_key_file).read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise ValueError(f"--api-key-file {options.api_key_file} holds no key")
        keys += found
    if os.environ.get(KEY_VARIABLE):
        keys.append(os.environ[KEY_VARIABLE])
    return keys


def _allow_descriptors(count: int) -> None:
    """Lets this process open so many files and sockets, as far as the system allows it."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
