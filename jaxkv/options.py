"""Command-line options that several commands share, and parsers of their values."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from jaxkv.config.cache import CacheConfig
from jaxkv.config.speculation import METHODS, SpeculationConfig

SIZES = (
    "N is a number such as 4096 or 8k: k, M, G and T are powers of 1024, so 8k is 8192. Bytes may be written 512MB or "
    "1GiB, which are powers of 1024 too."
)
"""Explains to users the numbers that `size` reads."""

_SIZE = re.compile(
    r"([+-]?\d+)(?:\.(\d+)(?=[kmgt]))?(?:([kmgt])(?:i?b)?|b)?", re.IGNORECASE | re.ASCII
)

_SPELLED = {
    "budget_bytes": "--cache-bytes",
    "data_parallel_size": "--data-parallel-size",
    "host_bytes": "--host-bytes",
    "ignore_config_keys": "--ignore-config-key",
    "max_model_len": "--max-model-len",
    "max_rank": "--max-lora-rank",
    "max_sequences": "--max-sequences",
    "max_tokens": "--max-tokens",
    "min_p": "--min-p",
    "most_waiting": "--max-waiting",
    "output_tokens": "--output-tokens",
    "page_size": "--page-size",
    "prefix_tokens": "--prefix-tokens",
    "prompt_tokens": "--prompt-tokens",
    "repetition_penalty": "--repetition-penalty",
    "tensor_parallel_size": "--tensor-parallel-size",
    "token_budget": "--token-budget",
    "top_k": "--top-k",
    "top_p": "--top-p",
}
"""Names of options in Python -> the command's options that set them."""

_SPELLED_NAMES = re.compile(rf"(?<![\w./=-])(?:{'|'.join(_SPELLED)})(?![\w/=-])")


def with_command_options(error: BaseException) -> str:
    """Returns an error's message on one line, with Python's option names replaced by the command's."""
    return _SPELLED_NAMES.sub(lambda name: _SPELLED[name[0]], " ".join(str(error).split()))


class Parser(argparse.ArgumentParser):
    """Raises `ValueError` for wrong arguments; argparse itself would print the usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Raises for wrong arguments; sub-parsers are of this class too."""
        if "--trust-remote-code" in message:
            message += ": nothing in a model directory is executed"
        raise ValueError(f"{message}; see {self.prog} --help")


def with_hyphens(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with the names of options in hyphens: `--max_tokens=8` becomes `--max-tokens=8`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    spelled = []
    for argument in arguments[:end]:
        name, equals, value = argument.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        spelled.append(name + equals + value)
    return [*spelled, *arguments[end:]]


def size(text: str) -> int:
    """Reads a number of tokens, bytes or other units, such as "4096", "8k", "1.5G", "512MB" or "1GiB".

    Raises:
        argparse.ArgumentTypeError: the text is no such number.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"must be a number such as 4096, 8k or 1GB, got {text[:40]!r}"
        )
    whole, fraction, unit = found[1], found[2] or "", (found[3] or " ").lower()
    scale = 1024 ** " kmgt".index(unit)
    return int(whole + fraction) * scale // 10 ** len(fraction)


_DTYPE_HELP = (
    "to compute in: auto (the checkpoint's), float32, bfloat16 or float16; fp32, bf16, fp16 and half too (default: "
    "%(default)s)"
)


def add_convert_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `jaxkv convert`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model directory, or a name on the Hugging Face Hub such as Qwen/Qwen3-0.6B",
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="DIR", help="the new directory, not there yet"
    )
    _add_checkpoint_options(parser, quantization_needed=True)
    parser.add_argument("--dtype", default="auto", metavar="NAME", help=_DTYPE_HELP)


def _add_checkpoint_options(
    parser: argparse.ArgumentParser, *, quantization_needed: bool = False
) -> None:
    """Adds the options that tell how a checkpoint is found and read."""
    parser.add_argument(
        "--revision",
        metavar="NAME",
        help="branch, tag or commit of a model on the hub (default: its main branch)",
    )
    parser.add_argument(
        "--ignore-config-key",
        action="append",
        default=[],
        dest="ignore_config_keys",
        metavar="NAME",
        help="a key of config.json that jaxkv does not know, to be ignored with a warning; may be given several times "
        "(default: none)",
    )
    parser.add_argument(
        "--quantization",
        choices=("fp8", "int8", "int4"),
        required=quantization_needed,
        help="round the weights of a plain checkpoint while they are read (default: weights as the checkpoint has "
        "them, quantised ones too)",
    )


def add_model_options(parser: argparse.ArgumentParser, *, max_sequences: int | None) -> None:
    """Adds the options of the model, its cache and what runs it.

    Args:
        parser: the parser of the command.
        max_sequences: default of `--max-sequences`; `None` for a default that depends on the number of requests.
    """
    parser.epilog = SIZES
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model directory, or a name on the Hugging Face Hub such as Qwen/Qwen3-0.6B (default: the small model "
        "inside the package)",
    )
    _add_checkpoint_options(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="NAME",
        help=_DTYPE_HELP,
    )
    parser.add_argument(
        "--page-size",
        "--block-size",
        type=size,
        default=CacheConfig.page_size,
        metavar="N",
        help="tokens per page of the cache (default: %(default)s)",
    )
    parser.add_argument(
        "--max-sequences",
        "--max-num-seqs",
        type=size,
        default=max_sequences,
        metavar="N",
        help="sequences in flight at once (default: "
        f"{max_sequences or 'one for each request, at most 256'})",
    )
    parser.add_argument(
        "--cache-bytes",
        "--kv-cache-memory-bytes",
        type=size,
        metavar="N",
        help="memory for the cache (default: what the sequences need, at most a share of the free memory)",
    )
    parser.add_argument(
        "--cache-dtype",
        "--kv-cache-dtype",
        default="auto",
        metavar="NAME",
        help="of keys and values: auto (that of the weights), float32, bfloat16, float16, fp8 or int8 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=size,
        default=1,
        metavar="N",
        help="devices that compute the model together, each a part of every layer (default: %(default)s)",
    )
    parser.add_argument(
        "--implementation",
        metavar="NAME",
        help="mosaic_gpu, xla, cudnn or xla_products (default: the fastest that runs the model here)",
    )


def add_serving_options(parser: argparse.ArgumentParser, *, max_sequences: int) -> None:
    """Adds the options of a model that serves requests, its cache and what runs it; `cache_of` reads some of them.

    Args:
        parser: the parser of the command.
        max_sequences: default of `--max-sequences`.
    """
    add_model_options(parser, max_sequences=max_sequences)
    parser.add_argument(
        "--max-model-len",
        type=size,
        metavar="N",
        help="longest prompt plus output in tokens (default: the model's own limit)",
    )
    parser.add_argument(
        "--host-bytes",
        type=size,
        default=CacheConfig.host_bytes,
        metavar="N",
        help="memory of the host for prefixes that leave the cache (default: %(default)s)",
    )


def cache_of(options: argparse.Namespace) -> CacheConfig:
    """Returns the cache that the options of `add_serving_options` describe.

    Raises:
        ValueError: an option is out of range.
    """
    return CacheConfig(
        page_size=options.page_size,
        dtype=options.cache_dtype,
        max_sequences=options.max_sequences,
        budget_bytes=options.cache_bytes,
        host_bytes=options.host_bytes,
    )


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of drafts; `speculation_of_options` reads them."""
    parser.add_argument(
        "--speculation",
        choices=METHODS,
        metavar="NAME",
        help=f"who drafts the next tokens for steps to verify: {', '.join(METHODS)}; no token changes (default: none)",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="directory or hub id of a smaller model with the same vocabulary, or with --speculation eagle3 of a head, "
        "which drafts",
    )
    parser.add_argument(
        "--draft-tokens",
        "--num-speculative-tokens",
        type=size,
        default=SpeculationConfig.tokens,
        metavar="N",
        help="most drafts of a sequence and step, with --speculation (default: %(default)s)",
    )


def speculation_of_options(options: argparse.Namespace) -> SpeculationConfig | None:
    """Returns the drafts that the options of `add_speculation_options` describe; `None` for none.

    Raises:
        ValueError: an option is out of range.
    """
    if options.speculation is None and options.draft_model is None:
        return None
    return SpeculationConfig(
        method=options.speculation, model=options.draft_model, tokens=options.draft_tokens
    )


def add_processor_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option that registers logits processors; `processor_places` reads it."""
    parser.add_argument(
        "--logits-processor",
        type=_processor,
        action="append",
        default=[],
        dest="logits_processors",
        metavar="[NAME=]MODULE:FUNCTION",
        help="a JAX function of a module that is installed or on PYTHONPATH, which requests may name in "
        "logits_processors; may be given several times (default: none)",
    )


def _processor(text: str) -> tuple[str, str]:
    """Reads "module:function" or "name=module:function"; returns the name and "module:function"."""
    name, equals, place = text.rpartition("=")
    module, _, function = place.partition(":")
    if not (module and function.isidentifier() and bool(name) == bool(equals)):
        raise argparse.ArgumentTypeError(
            f"must be MODULE:FUNCTION or NAME=MODULE:FUNCTION, got {text[:80]!r}"
        )
    return name or function, place


def processor_places(options: argparse.Namespace) -> dict[str, str]:
    """Returns name -> "module:function" of the logits processors of the options.

    Raises:
        ValueError: two have the same name.
    """
    named = dict(options.logits_processors)
    if len(named) < len(options.logits_processors):
        raise ValueError(
            "two --logits-processor have the same name; give one of them as NAME=MODULE:FUNCTION"
        )
    return named


def processor_functions(places: Mapping[str, str]) -> dict[str, Callable[..., Any]]:
    """Returns the functions at places such as "module:function". The modules are installed or on PYTHONPATH.

    Raises:
        ValueError: there is no such module or function.
    """
    found = {}
    for name, place in places.items():
        module, _, function = place.partition(":")
        try:
            found[name] = getattr(import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"--logits-processor {place} cannot be imported: {error}") from error
    return found
