"""The command line's numbers and names of options."""

import argparse

import pytest

from jaxkv.cli import _parser, main
from jaxkv.options import processor_functions, size, with_command_options, with_hyphens


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-3", -3),
        ("4096", 4096),
        ("8k", 8192),
        ("8K", 8192),
        ("1.5k", 1536),
        ("0.3k", 307),
        ("2m", 2**21),
        ("1GB", 2**30),
        ("1gib", 2**30),
        ("0.5G", 2**29),
        ("512MB", 2**29),
        ("2TiB", 2**41),
        ("100B", 100),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_units_are_powers_of_1024(text, number):
    assert size(text) == number


@pytest.mark.parametrize(
    "text", ["", "x", "k", "8kk", "1.5", "1e3", "8 k", "1,024", "1.k", ".5k", "8ib", "0x10", "٣"]
)
def test_what_is_no_number_is_refused(text):
    with pytest.raises(
        argparse.ArgumentTypeError, match="must be a number such as 4096, 8k or 1GB"
    ):
        size(text)


def test_underscores_in_names_of_options_are_hyphens_and_elsewhere_stay():
    given = ["--max_tokens", "a_b", "--top_p=c_d", "-x_y", "e_f", "--", "--g_h"]
    assert with_hyphens(given) == [
        "--max-tokens",
        "a_b",
        "--top-p=c_d",
        "-x_y",
        "e_f",
        "--",
        "--g_h",
    ]


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("shorten it or raise max_model_len", "shorten it or raise --max-model-len"),
        ("max_model_len is 64; lower it", "--max-model-len is 64; lower it"),
        ("exceed max_model_len, 1,024", "exceed --max-model-len, 1,024"),
        ("budget_bytes must be\nat least 1", "--cache-bytes must be at least 1"),
        ("no such folder: /models/max_tokens/x", "no such folder: /models/max_tokens/x"),
        ("CacheConfig(max_sequences=4)", "CacheConfig(max_sequences=4)"),
        ("my_max_tokens, --max_tokens", "my_max_tokens, --max_tokens"),
    ],
)
def test_errors_of_commands_name_the_options_of_commands(message, shown):
    assert with_command_options(ValueError(message)) == shown


@pytest.mark.parametrize("command", [["generate"], ["chat"], ["plan"], ["bench", "throughput"]])
def test_the_names_that_errors_have_for_options_are_those_that_help_shows(command, capsys):
    own = {
        "generate": "max_tokens top_p top_k min_p host_bytes",
        "chat": "max_tokens top_p top_k min_p host_bytes",
        "plan": "host_bytes",
        "bench": "token_budget prompt_tokens output_tokens prefix_tokens",
    }
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    told = capsys.readouterr().out
    for name in [
        "max_model_len",
        "max_sequences",
        "page_size",
        "budget_bytes",
        *own[command[0]].split(),
    ]:
        spelled = with_command_options(ValueError(name))
        assert spelled.startswith("--")
        assert f"{spelled} " in told


def test_options_have_vllms_names_too():
    ours = ["--max-sequences=3", "--page-size=32", "--cache-dtype=int8", "--cache-bytes=1k"]
    theirs = [
        "--max-num-seqs=3",
        "--block-size=32",
        "--kv-cache-dtype=int8",
        "--kv-cache-memory-bytes=1k",
    ]
    budgets = ["--token-budget=64"], ["--max-num-batched-tokens=64"]
    read = [
        vars(_parser().parse_args(["serve", *given, *budget]))
        for given, budget in zip((ours, theirs), budgets, strict=True)
    ]
    assert read[0] == read[1]


@pytest.mark.parametrize(
    "place", ["no_such_module:f", "tests.sampling.processors:no_such_function"]
)
def test_a_logits_processor_that_cannot_be_imported_is_refused_by_name(place):
    with pytest.raises(ValueError, match=f"--logits-processor {place} cannot be imported"):
        processor_functions({"mine": place})
