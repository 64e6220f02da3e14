"""The options of `jaxkv bench` that choose the requests and their rates, and where the figures go."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxkv.options import size

# NumPy takes a while, and error messages appear at once.
if TYPE_CHECKING:
    from jaxkv.bench.workload import Workload


def add_workload_options(
    parser: argparse.ArgumentParser, *, requests: str, limit: str, with_file: bool = False
) -> None:
    """Adds the options of a workload.

    Args:
        parser: the parser of a mode.
        requests: describes the default number of requests.
        limit: what the default lengths are clipped to.
        with_file: whether prompts may come from a file.
    """
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--data",
        default="random",
        metavar="NAME",
        help="random, shared-prefix for prompts that begin alike, or sharegpt for lengths like those of ShareGPT's "
        "conversations (default: %(default)s)",
    )
    if with_file:
        source.add_argument(
            "--data-file",
            type=Path,
            metavar="FILE",
            help="prompts from ShareGPT's JSON, or from lines of JSON with a prompt or messages (default: none)",
        )
    parser.add_argument(
        "--requests", type=size, metavar="N", help=f"how many (default: {requests})"
    )
    for name in ("--prompt-tokens", "--output-tokens"):
        parser.add_argument(
            name,
            type=_range,
            metavar="A:B",
            help="least and most of a request, or one number for both (default: 100:1024, for sharegpt 4:1024, clipped "
            f"to what {limit} supports)",
        )
    parser.add_argument(
        "--prefix-tokens",
        type=size,
        default=64,
        metavar="N",
        help="that prompts of shared-prefix have in common (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 is greedy (default: %(default)g)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="of prompts and arrivals (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def add_plot_option(parser: argparse.ArgumentParser) -> None:
    """Adds the option of a file with charts."""
    parser.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw the run, and latencies against several rates, into FILE.html or FILE.png (default: none)",
    )


def workload_of(options: argparse.Namespace) -> "tuple[Workload, frozenset[str]]":
    """Returns the workload that the options ask for, and the names of its sizes that were given.

    Raises:
        ValueError: an option is out of range.
    """
    from jaxkv.bench.workload import LENGTHS, SHAREGPT_BOUNDS, Workload

    sizes = {name: getattr(options, name) for name in ("requests", *LENGTHS)}
    given: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    usual: dict[str, Any] = {}
    if options.data == "sharegpt":
        usual = dict.fromkeys(LENGTHS, SHAREGPT_BOUNDS)
    workload = Workload(
        data=options.data,
        prefix_tokens=options.prefix_tokens,
        temperature=options.temperature,
        seed=options.seed,
        **usual | given,
    )
    return workload, frozenset(given)


def rates(text: str) -> tuple[float, ...]:
    """Reads request rates such as "4" or "1,2,4,8"."""
    return tuple(_rate(part) for part in text.split(","))


def rates_or_all_at_once(text: str) -> tuple[float | None, ...]:
    """Reads request rates as `rates` does; "inf" is all at once, `None`."""
    return tuple(None if part == "inf" else _rate(part) for part in text.split(","))


def _rate(text: str) -> float:
    rate = float(text)
    if not 0 < rate < float("inf"):
        raise argparse.ArgumentTypeError(f"the request rate must be above 0, got {text}")
    return rate


def _range(text: str) -> tuple[int, int]:
    """Reads "100:1024" or "100:1k", or one number for both."""
    least, _, most = text.partition(":")
    try:
        return size(least), size(most or least)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"must be A:B or one number, got {text!r}") from None
