"""The `jaxkv` command. A user's mistake is one line on stderr and exit code 2, never a traceback."""

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NoReturn

from jaxkv.bench.command import add_bench
from jaxkv.config import CacheConfig, SamplingParams

# The rest is imported late, so that --help and mistakes answer at once.
if TYPE_CHECKING:
    from jaxkv.engine.request import Piece
    from jaxkv.llm import LLM


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    try:
        options = _parser().parse_args(arguments)
        return options.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except (ValueError, OSError, RuntimeError) as error:
        print(_one_line(error), file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    return f"jaxkv: {' '.join(str(error).split())}"


class _Parser(argparse.ArgumentParser):
    """Leaves it to `main` to say what is wrong; argparse itself would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Refuses the arguments; sub-parsers are of this class too."""
        raise ValueError(f"{message}; see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxkv", description="LLM inference in JAX on NVIDIA GPUs (and, slowly, on CPUs)."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="continue a text")
    _model_options(generate)
    _sampling_options(generate)
    generate.add_argument("prompt", metavar="PROMPT", help="the text to continue")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser("chat", help="talk to a model that has a chat template")
    _model_options(chat)
    _sampling_options(chat)
    chat.set_defaults(run=_chat)
    plan = commands.add_parser("plan", help="what the cache will cost, and what would be compiled")
    _model_options(plan)
    plan.set_defaults(run=_plan)
    add_bench(commands)
    env = commands.add_parser("env", help="versions and devices, for bug reports")
    env.set_defaults(run=_env)
    return parser


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR",
        help="Hugging Face model directory; the small model inside the package",
    )
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output")
    parser.add_argument("--page-size", type=int, default=64, metavar="N", help="tokens per page")
    parser.add_argument(
        "--max-sequences", type=int, default=8, metavar="N", help="sequences in flight at once"
    )
    parser.add_argument(
        "--cache-bytes", type=int, metavar="N", help="memory for the cache; a share of what is free"
    )
    parser.add_argument(
        "--host-bytes",
        type=int,
        default=0,
        metavar="N",
        help="memory of the host for prefixes that the cache gives up; none",
    )
    parser.add_argument(
        "--cache-dtype",
        default="auto",
        help="of keys and values: auto, float32, bfloat16, float16, fp8 or int8",
    )
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help="mosaic_gpu, xla, cudnn or xla_products; the best that can run",
    )


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P")
    parser.add_argument("--top-k", type=int, default=0, metavar="K")
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P")
    parser.add_argument("--seed", type=int, metavar="S")


def _cache(options: argparse.Namespace) -> CacheConfig:
    return CacheConfig(
        page_size=options.page_size,
        dtype=options.cache_dtype,
        max_sequences=options.max_sequences,
        budget_bytes=options.cache_bytes,
        host_bytes=options.host_bytes,
    )


def _sampling(options: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
    )


def _llm(options: argparse.Namespace) -> "LLM":
    from jaxkv.llm import LLM

    return LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        cache=_cache(options),
        implementation=options.implementation,
        progress=sys.stderr.isatty(),
    )


def _generate(options: argparse.Namespace) -> int:
    sampling = _sampling(options)
    pieces = _llm(options).stream(options.prompt, sampling)
    print(options.prompt, end="", flush=True)
    _print_pieces(pieces)
    return 0


def _print_pieces(pieces: "Iterator[Piece]") -> str:
    """Prints a stream while it comes and returns its text."""
    text = ""
    for piece in pieces:
        print(piece.text, end="", flush=True)
        text += piece.text
        if piece.finish_reason == "error":
            print()
            raise RuntimeError("the model's logits were not finite; the text ends here")
    print()
    return text


def _chat(options: argparse.Namespace) -> int:
    sampling = _sampling(options)
    llm = _llm(options)
    # A model that cannot chat says so here, before anybody has typed anything.
    llm.chat_prompt([{"role": "user", "content": "hi"}])
    messages: list[dict[str, str]] = []
    while True:
        try:
            said = input("> ")
        except EOFError:
            print()
            return 0
        if said.strip():
            messages += _turn(llm, messages, said, sampling)


def _turn(
    llm: "LLM", messages: list[dict[str, str]], said: str, sampling: SamplingParams
) -> list[dict[str, str]]:
    """Answers one message and returns both; none if the conversation would outgrow the context."""
    question = {"role": "user", "content": said}
    try:
        pieces = llm.stream(llm.chat_prompt([*messages, question]), sampling)
    except ValueError as error:
        print(f"{_one_line(error)} (this message is forgotten)", file=sys.stderr)
        return []
    return [question, {"role": "assistant", "content": _print_pieces(pieces)}]


def _plan(options: argparse.Namespace) -> int:
    cache = _cache(options)
    import jax

    from jaxkv.plan import explain_plan, free_bytes

    print(
        explain_plan(
            options.model,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            cache=cache,
            free_bytes=free_bytes(1.0),
            # On a CPU `free_bytes` is an allowance for the cache alone.
            holds_weights=jax.default_backend() != "cpu",
            implementation=options.implementation,
        )
    )
    return 0


def _env(options: argparse.Namespace) -> int:
    del options
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
