"""The `jaxkv` command. A user's mistake is one line on stderr and exit code 2, never a traceback."""

import argparse
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxkv import __version__
from jaxkv.bench.command import add_bench
from jaxkv.config.cache import CacheConfig
from jaxkv.config.lora import LoraConfig
from jaxkv.config.sampling import SamplingParams
from jaxkv.errors import CachePoisoned
from jaxkv.options import (
    Parser,
    add_convert_options,
    add_processor_option,
    add_serving_options,
    cache_of,
    processor_functions,
    processor_places,
    size,
    with_command_options,
    with_hyphens,
)
from jaxkv.serve.command import add_program_options, add_serve, engine_of, lora_fields
from jaxkv.serve.inspect import add_inspect
from jaxkv.serve.warm_samplings import WARM_SAMPLINGS, warm_up_served
from jaxkv.terminal import Screen

# Slow modules are imported inside the commands, so that --help and error messages appear at once.
if TYPE_CHECKING:
    from jaxkv.llm import LLM


_RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Options for which the generation_config.json of a model may have a value."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    screen = Screen()
    try:
        given = sys.argv[1:] if arguments is None else arguments
        options = _parser().parse_args(with_hyphens(given))
        with screen.logged():
            return options.run(options, screen)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (ValueError, OSError, RuntimeError, MemoryError, CachePoisoned) as error:
        screen.note(f"jaxkv: {with_command_options(error)}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxkv", description="LLM inference in JAX on NVIDIA GPUs (and, slowly, on CPUs)."
    )
    parser.add_argument("--version", action="version", version=f"jaxkv {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a text")
    add_serving_options(generate, max_sequences=1)
    _add_sampling_options(generate, max_tokens=128)
    generate.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="the text to continue; - reads it from stdin, without its last newline (default: - for a pipe)",
    )
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="talk to a model that has a chat template")
    add_serving_options(chat, max_sequences=1)
    _add_sampling_options(chat, max_tokens=1024, named_by="generation_config.json of the model")
    chat.set_defaults(run=_chat)
    plan = commands.add_parser("plan", help="what the cache will cost, and what would be compiled")
    add_serving_options(plan, max_sequences=CacheConfig.max_sequences)
    add_processor_option(plan)
    plan.set_defaults(run=_plan)
    compile_ = commands.add_parser(
        "compile",
        help="write the compiled programs of a model and its options into a folder to ship",
    )
    compile_.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="the new folder, not there yet"
    )
    add_serving_options(compile_, max_sequences=CacheConfig.max_sequences)
    add_program_options(compile_, without="as many requests and tokens as there is room for")
    compile_.set_defaults(run=_compile)
    convert = commands.add_parser("convert", help="write a checkpoint with weights in 8 or 4 bits")
    add_convert_options(convert)
    convert.set_defaults(run=_convert)
    add_serve(commands)
    add_bench(commands)
    add_inspect(commands)
    env = commands.add_parser("env", help="versions and devices, for bug reports")
    env.set_defaults(run=_env)
    return parser


def _add_sampling_options(
    parser: argparse.ArgumentParser, *, max_tokens: int, named_by: str | None = None
) -> None:
    """Adds the options of sampling; `named_by` is a file with defaults for some of them, for the help text."""
    first = f"what {named_by} names, else " if named_by else ""
    parser.add_argument(
        "--max-tokens",
        type=size,
        default=max_tokens,
        metavar="N",
        help="most tokens of an answer (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help=f"0 is greedy (default: {first}0)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help=f"keep the most likely tokens of this probability together (default: {first}1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help=f"keep the K most likely tokens; 0 keeps all (default: {first}0)",
    )
    parser.add_argument(
        "--min-p",
        type=float,
        metavar="P",
        help=f"keep tokens at least this times as likely as the most likely one (default: {first}0)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=float,
        metavar="R",
        help=f"make tokens of prompt and answer less likely, above 1 (default: {first}1)",
    )
    parser.add_argument("--seed", type=int, metavar="S", help="of the draws (default: random)")


def _sampling(options: argparse.Namespace) -> SamplingParams:
    """Returns the sampling parameters; options that are not given are greedy and unfiltered."""
    given = {name: getattr(options, name) for name in _RECOMMENDED}
    given = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(
        max_tokens=options.max_tokens,
        seed=options.seed,
        **{"temperature": 0.0, **given},
    )


def _llm(options: argparse.Namespace, screen: Screen) -> "LLM":
    cache = cache_of(options)
    screen.status("starting")
    from jaxkv.llm import LLM

    screen.status("")
    return LLM(
        options.model,
        revision=options.revision,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        cache=cache,
        implementation=options.implementation,
        ignore_config_keys=options.ignore_config_keys,
        quantization=options.quantization,
        tensor_parallel_size=options.tensor_parallel_size,
    )


def _compiling_shown(llm: "LLM", screen: Screen) -> AbstractContextManager[None]:
    return llm.engine.runner.programs.watched(
        lambda program: screen.status(program and f"compiling {program}")
    )


def _generate(options: argparse.Namespace, screen: Screen) -> int:
    sampling = _sampling(options)
    prompt = _prompt(options.prompt)
    llm = _llm(options, screen)
    pieces, unprinted = llm.stream(prompt, sampling), prompt
    with _compiling_shown(llm, screen), closing(pieces):
        for piece in pieces:
            # The prompt waits for the first piece, so that until then the status line can be shown.
            screen.write(unprinted + piece.text)
            unprinted = ""
            if piece.finish_reason == "error":
                raise RuntimeError("the model's logits were not finite; the text ends here")
    return 0


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise ValueError("no PROMPT was given; give a text, or - to read it from stdin")
    return sys.stdin.read().removesuffix("\n") if given in (None, "-") else given


def _chat(options: argparse.Namespace, screen: Screen) -> int:
    sampling = _sampling(options)
    from jaxkv.chat import Conversation, open_messages

    with open_messages() as messages:
        llm = _llm(options, screen)
        # A model that cannot chat is refused before the user types anything.
        llm.chat_prompt([{"role": "user", "content": "hi"}])
        conversation = Conversation(llm, _with_defaults(sampling, options, llm.directory), screen)
        if sys.stdin.isatty():
            screen.note("/help lists the commands; Ctrl-D ends")
        with _compiling_shown(llm, screen):
            conversation.run(messages)
    return 0


def _with_defaults(
    sampling: SamplingParams, options: argparse.Namespace, directory: Path
) -> SamplingParams:
    """Returns the parameters; options that are not given have the values of generation_config.json, if it has them."""
    from jaxkv.models.hf_config.generation_json import load_sampling_defaults

    defaults = load_sampling_defaults(directory)
    return replace(
        sampling,
        **{name: value for name, value in defaults.items() if getattr(options, name) is None},
    )


def _plan(options: argparse.Namespace, screen: Screen) -> int:
    del screen
    cache = cache_of(options)
    import jax

    from jaxkv.plan import explain_plan, free_bytes
    from jaxkv.weights.hub import resolve_model

    print(
        explain_plan(
            resolve_model(options.model, options.revision),
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            cache=cache,
            free_bytes=free_bytes(1.0),
            # On a CPU `free_bytes` is an allowance for the cache alone.
            holds_weights=jax.default_backend() != "cpu",
            implementation=options.implementation,
            ignore_config_keys=options.ignore_config_keys,
            quantization=options.quantization,
            tensor_parallel_size=options.tensor_parallel_size,
            logits_processors=processor_functions(processor_places(options)),
        )
    )
    return 0


def _compile(options: argparse.Namespace, screen: Screen) -> int:
    output = Path(options.output)
    if output.exists() or not output.absolute().parent.is_dir():
        raise ValueError(f"--output must be a new folder in one that exists, got {output}")
    cache, engine, lora = cache_of(options), engine_of(options), lora_fields(options)
    screen.status("starting")
    import jax

    from jaxkv.engine.bundled_programs import refuse_unbundled
    from jaxkv.llm import LLM

    # A program that was loaded from a store may not be one that can be stored again.
    jax.config.update("jax_enable_compilation_cache", False)
    screen.status("")
    llm = LLM(
        options.model,
        revision=options.revision,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        cache=cache,
        engine=engine,
        implementation=options.implementation,
        ignore_config_keys=options.ignore_config_keys,
        load_format=options.load_format,
        quantization=options.quantization,
        lora=None if lora is None else LoraConfig(**lora),
        tensor_parallel_size=options.tensor_parallel_size,
    )
    # What no bundle holds is refused before it is compiled.
    refuse_unbundled(llm.model, llm.engine.runner.processors, llm.engine.config)
    for name, folder in options.lora_modules:
        llm.add_lora(name, folder)
    largest = cache.max_sequences, llm.max_model_len - 1, tuple(WARM_SAMPLINGS)
    with _compiling_shown(llm, screen):
        warm_up_served(llm, options.warm_up or [largest])
    count = llm.save_programs(output)
    total = sum(file.stat().st_size for file in output.iterdir())
    print(
        f"{count} programs in {output}, {total:,} bytes; jaxkv serve --programs {output} loads them"
    )
    return 0


def _convert(options: argparse.Namespace, screen: Screen) -> int:
    del screen
    from jaxkv.models.registry import convert_checkpoint

    report = convert_checkpoint(
        options.model,
        options.output,
        quantization=options.quantization,
        revision=options.revision,
        dtype=options.dtype,
        ignore_config_keys=options.ignore_config_keys,
        progress=sys.stderr.isatty(),
    )
    print(report)
    return 0


def _env(options: argparse.Namespace, screen: Screen) -> int:
    del options, screen
    from importlib.metadata import PackageNotFoundError, version

    import jax

    from jaxkv.models.implementation import best_on_device

    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for name in ("jaxkv", "jax", "jaxlib", "flax", "numpy", "tokenizers", "safetensors", "torch"):
        try:
            print(f"{name} {version(name)}")
        except PackageNotFoundError:
            print(f"{name} is not installed")
    for device in jax.devices():
        memory = (device.memory_stats() or {}).get("bytes_limit")
        size = f", {memory / 2**30:.1f} GiB for JAX" if memory else ""
        print(f"device {device.id}: {device.device_kind} ({device.platform}){size}")
    print(f"models run as {best_on_device()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
